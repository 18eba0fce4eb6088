"""Builds a program from a FlashAttention-4 call: its kernels in order, and their buffers. XLA runs it without Python.

The program is built from a ``recording`` of the call on tensors without memory. Numbers become constants of the
compiled code, so that a step takes only buffers. Compiled code is kept on disk like flash-attn-4's own
(``disk_cache``). Upstream: flash-attn-4 4.0.0b36 with nvidia-cutlass-dsl 4.8. Calls that do not look as they do there
raise Unrecordable.
"""

from __future__ import annotations

import hashlib
import re
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib import metadata
from typing import TYPE_CHECKING, Any, NamedTuple

from attn_core.backends.flash4 import disk_cache
from attn_core.backends.flash4.masked import program_inputs
from attn_core.backends.flash4.own_kernels import compiled_code, described
from attn_core.backends.flash4.recording import (
    Launch,
    Operand,
    Recorder,
    Recording,
    check_constant,
    is_number,
    recording,
    with_leaves,
)
from attn_core.backends.flash4.replay import BackwardOperands, ForwardOperands
from attn_core.backends.shared import first_calls
from attn_core.backends.shared.caches import cached_once
from attn_core.backends.shared.kernel_programs import RESULTS, SCRATCH, Buffer, KernelProgram, KernelStep, Unrecordable
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Inputs, dtype_name

if TYPE_CHECKING:
    import tvm_ffi
    from torch import Tensor

# XLA passes whole arrays alone. So if q, k and v are one array, a recorded call works on parts of one fake tensor, and
# the compiled step takes the parts of the whole array itself.
PARTS = {"qkv": ("q", "k", "v"), "dqkv": ("dq", "dk", "dv")}
"""The arrays ``[..., tokens, 3, heads, head_dim]`` and their parts."""

FAKE_DEVICE = "cuda:0"
"""The device of tensors without memory. Without an index torch takes the thread's current device, or that of an equal
tensor before; then a call's tensors were on two devices once a process had used two GPUs."""

Tensors = dict[str, Any]
"""Tensors by their names in ``Inputs`` or in flash-attn-4."""


class Place(NamedTuple):
    """Where a tensor of the call lies in a program: the number of its buffer, and its part of it, None for all."""

    buffer: int
    part: int | None = None


Run = Callable[[Recorder, Inputs, Any, Any], None]
"""``(recorder, inputs, operands, dsinks)`` makes a call: operands as ``replay`` names them, and a buffer or None."""


def program(spec: AttentionSpec, direction: str, with_dlse: bool, as_one: bool, run: Run) -> KernelProgram:
    """Records a call and returns its program.

    Args:
        as_one: whether q, k and v are one array, and so are their gradients.
        run: makes the call in a recorder.

    Raises:
        Unrecordable: if torch operations run between the kernels, or a kernel takes a view of a buffer.
    """
    with without_memory():
        tensors = _tensors(spec, direction, with_dlse)
        arrays = dict(tensors)
        # q, k and v in one array are views of it: three tensors of the call, and one buffer of XLA.
        for whole, parts in PARTS.items() if as_one else ():
            if parts[0] in tensors:
                one = arrays.pop(parts[0])
                del arrays[parts[1]], arrays[parts[2]]
                *rows, heads, dim = one.shape
                arrays[whole] = one.new_empty((*rows, len(parts), heads, dim))
                tensors |= dict(zip(parts, arrays[whole].unbind(-3), strict=True))
        inputs = Inputs(*map(tensors.get, Inputs._fields))
        kind: Any = ForwardOperands if direction == "forward" else BackwardOperands
        operands = kind(*map(tensors.get, kind._fields))
        with recording(with_memory=False) as recorder:
            run(recorder, inputs, operands, tensors.get("dsinks"))
        return _program(recorder.recorded(tensors.values()), list(tensors), arrays, direction)


def without_memory() -> AbstractContextManager[object]:
    """Returns a context in which torch's functions create tensors without memory."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    _suppress_address_warning()
    return FakeTensorMode()


@cached_once
def _suppress_address_warning() -> None:
    """Triggers and suppresses torch's once-per-process warning about reading a FakeTensor's data_ptr.

    flash-attn-4 and cutlass read addresses for their alignment, so users would see the warning.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    with warnings.catch_warnings(), FakeTensorMode():
        warnings.simplefilter("ignore")
        torch.empty(1, device="cpu").data_ptr()


def _program(call: Recording, names: list[str], arrays: Tensors, direction: str) -> KernelProgram:
    """Returns the program of a recorded call.

    Args:
        names: of its operands, results among them.
        arrays: the same as XLA passes them, by name; some may be parts of one array.
    """
    buffers = [_buffer(name, array) for name, array in arrays.items()]
    number = {name: at for at, name in enumerate(arrays)}
    part_of = {part: Place(number[one], at) for one in PARTS if one in arrays for at, part in enumerate(PARTS[one])}
    places = {at: part_of.get(name) or Place(number[name]) for at, name in enumerate(names)}
    results = {number[name] for name in RESULTS[direction] if name in number}
    operands = set(number.values()) - results
    written = set(operands)  # they have values before the first step
    steps = []
    for launch in call.launches:
        used = [value.place for value, _ in leaves(launch) if isinstance(value, Operand)]
        for place in used:
            if place not in places:  # scratch, which gets a buffer of its own
                places[place] = Place(len(buffers))
                buffers.append(_buffer(SCRATCH, call.tensors[place], call.scratch[place]))
        numbers = dict.fromkeys(places[place].buffer for place in used)
        # Zeros count as written: XLA must pass them in. A kernel reads what was written before it, and may write
        # everything except operands, because the recording does not show which of its arguments are outputs.
        written |= {one for one in numbers if buffers[one].zeros}
        reads = tuple(one for one in numbers if one in written)
        writes = tuple(one for one in numbers if one not in operands)
        steps.append(_step(launch, reads, writes, places, call.tensors, list(arrays.values())))
        written |= numbers.keys()
    if not results <= written:
        raise Unrecordable("the kernels do not write the results into the buffers of the call")
    return KernelProgram(tuple(buffers), tuple(steps))


def _buffer(name: str, tensor: Tensor, zeros: bool = False) -> Buffer:
    return Buffer(name, tuple(tensor.shape), dtype_name(tensor), zeros)


def _step(
    launch: Launch,
    reads: tuple[int, ...],
    writes: tuple[int, ...],
    places: dict[int, Place],
    tensors: list[Tensor],
    arrays: list[Tensor],
) -> KernelStep:
    """Returns the step of a launch.

    Args:
        places: of the call's tensors.
        arrays: by number of a buffer, the array that has parts.
    """
    # XLA passes the read buffers first, then the written ones. The compiled function must take them in this order.
    parameters = (*reads, *writes)
    last = {buffer: slot for slot, buffer in enumerate(parameters)}  # an updated buffer is in both: take the second
    slots: list[tuple[int, int | None]] = []
    constants: list[Any] = []
    described_by: dict[int, Any] = {}
    for value, about in leaves(launch):
        constants.append(None if isinstance(value, Operand) else check_constant(value))
        if isinstance(value, Operand):
            buffer, part = places[value.place]
            slots.append((last[buffer], part))
            # The compiled function takes whole buffers as tensors, of which it makes parts and addresses itself.
            if part is not None:
                about = described((arrays[buffer],), alignment=16)[0]
            elif value.is_address:
                about = described((tensors[value.place],))[0]
            described_by.setdefault(buffer, about)
    by_slot = [described_by[buffer] for buffer in parameters]
    # All that the code depends on, as text, because a program may be read again in another process.
    key = (launch.name, [str(one) for one in by_slot], slots, tuple(constants), launch.kernel.options)
    kind = type(launch.kernel.code)
    text = repr((_versions(), kind.__qualname__, key))
    if re.search(r"\bat 0x|0x[0-9a-f]{8}[0-9a-f]*[1-9a-f]", text):  # an address differs between processes
        raise Unrecordable(f"the key of {kind.__name__} holds an address, so it is no lasting name: {text[:500]}")
    target = f"attn_core.flash4.{hashlib.sha256(text.encode()).hexdigest()[:32]}"
    return KernelStep(target, reads, writes, lambda: compile_step(target, launch, slots, by_slot))


def leaves(launch: Launch) -> list[tuple[Any, Any]]:
    """Returns a kernel's arguments with their descriptions; of a tuple or list, its parts."""
    found: list[tuple[Any, Any]] = []
    for value, about in zip(launch.arguments, launch.kernel.described):  # the stream alone has no value
        with_leaves(lambda *leaf: found.append(leaf), value, about)
    return found


@cached_once
def _versions() -> tuple[str, ...]:
    """Returns versions that are part of each step's name, because the compiled code depends on them."""
    return tuple(f"{name} {metadata.version(name)}" for name in disk_cache.PACKAGES)


def _tensors(spec: AttentionSpec, direction: str, with_dlse: bool) -> Tensors:
    """Returns a call's tensors: operands, then results; a backward has out, lse and dout as operands."""
    import torch

    inputs = program_inputs(first_calls.zeros(spec, FAKE_DEVICE))
    operands = {name: tensor for name, tensor in zip(Inputs._fields, inputs, strict=True) if tensor is not None}
    query, key, value = first_calls.shapes(spec)
    wide, narrow = spec.dtype, "float32"
    shapes = {"out": (spec.out_shape, wide), "lse": (spec.lse_shape, narrow)}
    if direction == "backward":
        shapes |= {"dout": (spec.out_shape, wide)} | ({"dlse": (spec.lse_shape, narrow)} if with_dlse else {})
        shapes |= {"dq": (query, wide), "dk": (key, wide), "dv": (value, wide)}
        shapes |= {"dsinks": ((spec.num_heads,), narrow)} if spec.sinks else {}
    return operands | {
        name: torch.empty(shape, dtype=getattr(torch, dtype), device=FAKE_DEVICE)
        for name, (shape, dtype) in shapes.items()
    }


# The compiled code of a step: a recorded kernel as a function of buffers alone.


def compile_step(
    target: str, call: Launch, slots: list[tuple[int, int | None]], by_slot: list[object]
) -> tvm_ffi.Function:
    """Returns a ``tvm_ffi.Function`` of tensors alone that launches the kernel on the environment's stream."""
    from cutlass import cute

    code = compiled_code()
    if target in code:
        return _function(code[target])
    kernel = call.kernel

    # Numbers are captured, so they become constants of the compiled code, and XLA passes buffers only.
    def launch(stream: Any, tensors: Any) -> None:
        places = iter(slots)

        def argument(value: Any, _: Any) -> Any:
            if not isinstance(value, Operand):
                return _in_code(value)
            slot, part = next(places)
            return tensors[slot].iterator.toint() if value.is_address else _part(tensors[slot], part)

        pairs = zip(call.arguments, kernel.described)
        kernel.code(*[with_leaves(argument, value, about) for value, about in pairs], stream)

    with warnings.catch_warnings():  # about an argument that flash-attn-4 leaves empty
        warnings.filterwarnings("ignore", "Argument aux_data ")
        compiled = cute.compile(_entry(), launch, kernel.described[-1], *by_slot, options=kernel.options)
    code[target] = compiled
    return _function(compiled)


def _in_code(value: Any) -> Any:
    """Returns a number as a value of the compiled code; any other argument as it is.

    The DSL computes with a number of Python in 64 bits. torch's launches pass it at run time, in 32 bits.
    """
    import cutlass

    if is_number(value):
        number = type(value)(value.value)
    elif isinstance(value, float):
        number = cutlass.Float32(value)
    elif isinstance(value, int) and not isinstance(value, bool):
        number = cutlass.Int32(value)
    else:
        return value
    return cutlass.Float32(number.ir_value()) if isinstance(number, cutlass.Float32) else number


def _part(tensor: Any, part: int | None) -> Any:
    """Returns a part of an array ``[..., tokens, 3, heads, head_dim]`` in a function of the CuTe DSL."""
    if part is None:
        return tensor
    from cutlass import cute

    rows = cute.rank(tensor) - 3
    piece = tensor[(*(None,) * rows, part, None, None)]
    # The array is aligned, and the rows of its parts are multiples of 16 bytes.
    return cute.make_tensor(piece.iterator.align(16), piece.layout)


def _function(compiled: object) -> tvm_ffi.Function:
    """Returns the TVM-FFI function of compiled code: the code itself, or a member if the code also takes keywords."""
    import tvm_ffi

    function = compiled if isinstance(compiled, tvm_ffi.Function) else getattr(compiled, "_tvm_ffi_function", None)
    if not isinstance(function, tvm_ffi.Function):
        raise Unrecordable(f"cute.compile gave {type(compiled).__name__}, which holds no TVM-FFI function")
    return function


@cached_once
def _entry() -> Any:
    """Returns the function that is compiled for XLA: a recorded launch, a constant, on XLA's stream and buffers."""
    import cutlass
    from cutlass import cute

    def entry(launch, stream, *tensors):  # type: ignore[no-untyped-def]
        launch(stream, tensors)

    entry.__annotations__ = {"launch": cutlass.Constexpr}  # text annotations would be looked up in this module
    return cute.jit(entry)
