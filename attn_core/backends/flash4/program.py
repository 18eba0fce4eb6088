"""Builds a program from a FlashAttention-4 call: its kernels in order, and their buffers. XLA runs it without Python.

The program is built from a recording of one call (``recorder.py``). Numbers become constants of the compiled code, so
that a step takes only buffers. Compiled code is kept on disk like flash-attn-4's own (``disk_cache``). Upstream:
flash-attn-4 4.0.0b36 with nvidia-cutlass-dsl 4.8. Calls that do not look as they do there raise Unrecordable.
"""

from __future__ import annotations

import hashlib
import re
import warnings
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Any

from attn_core.backends.flash4 import disk_cache
from attn_core.backends.flash4.masked import program_inputs
from attn_core.backends.flash4.own_kernels import compiled_code, described
from attn_core.backends.flash4.recorder import AddressOf, Launch, Recorder
from attn_core.backends.shared import dry_run
from attn_core.backends.shared.cached_once import cached_once
from attn_core.backends.shared.programs.kernel_programs import (
    RESULTS,
    SCRATCH,
    Buffer,
    KernelProgram,
    KernelStep,
    Unrecordable,
)
from attn_core.backends.shared.programs.operator_recorder import FAKE_DEVICE
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Inputs, dtype_name

# Operations that launch no kernel. Any other operation between the kernels would be missing from the program.
ALLOCATES = ("aten.empty", "aten.new_empty", "aten.detach", "prim.")
ZEROS = ("aten.zeros", "aten.new_zeros")

# XLA passes whole arrays alone. So if q, k and v are one array, a recorded call works on parts of one fake tensor, and
# the compiled step takes the parts of the whole array itself.
PARTS = {"qkv": ("q", "k", "v"), "dqkv": ("dq", "dk", "dv")}
"""The arrays ``[..., tokens, 3, heads, head_dim]`` and their parts."""

Run = Callable[[Recorder, Inputs, dict[str, Any]], None]


def program(spec: AttentionSpec, direction: str, with_dlse: bool, as_one: bool, run: Run) -> KernelProgram:
    """Records a call and returns its program.

    Args:
        as_one: whether q, k and v are one array, and so are their gradients.
        run: makes the call in a recorder, from its inputs, and the other tensors by name.

    Raises:
        Unrecordable: if torch operations run between the kernels, or a kernel takes a view of a buffer.
    """
    with Recorder() as notes:
        inputs = program_inputs(dry_run.zeros(spec, FAKE_DEVICE))
        others = _tensors(spec, direction, with_dlse)
        operands = {name: tensor for name, tensor in zip(Inputs._fields, inputs, strict=True) if tensor is not None}
        named = {**operands, **others}
        if as_one:
            for whole, parts in PARTS.items():
                named |= _as_one(named, whole, parts)
            inputs = inputs._replace(**{name: named.pop(name) for name in PARTS["qkv"]})
            others = {name: named.get(name) for name in others}
            for name in PARTS["dqkv"]:
                named.pop(name, None)
        notes.watch()
        run(notes, inputs, others)
        return _assemble(notes, named, direction)


def _assemble(notes: Recorder, named: dict[str, Any], direction: str) -> KernelProgram:
    """Returns the program of a recording. named: the tensors of operands and results by name."""
    zeros = zeroed_memory(notes.operations)
    buffers: dict[Any, Buffer] = {
        _memory(tensor): _buffer(tensor, name, tensor.shape) for name, tensor in named.items()
    }
    wholes = {_memory(named[name]): named[name] for name in PARTS if name in named}
    results = {_memory(named[name]) for name in RESULTS[direction] if name in named}
    written = {place for place in buffers if place not in results}  # operands have values before the first step
    operands = frozenset(written)
    steps = []
    for call in notes.calls:
        tensors = [tensor for tensor in (tensor_of(value) for value, _ in leaves(call)) if tensor is not None]
        for tensor in tensors:
            if _memory(tensor) not in buffers:
                buffers[_memory(tensor)] = _buffer(tensor, SCRATCH, tensor.shape, zeros)
            buffer = buffers[_memory(tensor)]
            if buffer.shape != tuple(tensor.shape) and _part(tensor, wholes) is None:
                raise Unrecordable(f"a kernel sees {buffer} as {list(tensor.shape)}")
        places = [_memory(tensor) for tensor in tensors]
        # Zeros count as written: XLA must pass them in. A kernel reads what was written before it, and may write
        # everything except operands, because the recording does not show which of its arguments are outputs.
        written |= {place for place in places if buffers[place].zeros}
        numbers = {place: number for number, place in enumerate(buffers)}
        reads = tuple(dict.fromkeys(numbers[place] for place in places if place in written))
        writes = tuple(dict.fromkeys(numbers[place] for place in places if place not in operands))
        parts = [_part(tensor, wholes) for tensor in tensors]
        wide = {numbers[place]: whole for place, whole in wholes.items() if place in places}
        steps.append(_step(call, [numbers[place] for place in places], reads, writes, parts, wide))
        written |= set(places)
    if not results <= written:
        raise Unrecordable("the kernels do not write the results into the buffers of the call")
    return KernelProgram(tuple(buffers.values()), tuple(steps))


def _part(tensor: Any, wholes: dict[Any, Any]) -> int | None:
    """Returns which part of an array a tensor is; None for a whole tensor. wholes: the arrays by their memory."""
    whole = wholes.get(_memory(tensor))
    return None if whole is None else _part_of(tensor, whole)


def _step(
    call: Launch,
    order: list[int],
    reads: tuple[int, ...],
    writes: tuple[int, ...],
    parts: list[int | None],
    wholes: dict[int, Any],
) -> KernelStep:
    """Returns the step of a kernel call.

    Args:
        order: for each tensor argument, the number of its buffer; parts: which part of the buffer it is.
        wholes: by number of a buffer, the array that has parts.
    """
    # XLA passes the read buffers first, then the written ones. The compiled function must take them in this order.
    parameters = (*reads, *writes)
    last = {place: slot for slot, place in enumerate(parameters)}  # an updated buffer is in both: take it from writes
    slots = [*zip((last[place] for place in order), parts, strict=True)]
    arguments = list(leaves(call))
    of_tensors = [
        described((value.tensor,))[0] if isinstance(value, AddressOf) else about
        for value, about in arguments
        if tensor_of(value) is not None
    ]
    whole = {place: described((array,), alignment=16)[0] for place, array in wholes.items()}
    by_slot = [whole.get(place) or of_tensors[order.index(place)] for place in parameters]
    constants = tuple(None if tensor_of(value) is not None else check_constant(value) for value, _ in arguments)
    key = (call.key, [str(one) for one in by_slot], slots, constants, call.kernel.options)
    text = repr((_versions(), type(call.kernel.kernel).__qualname__, key))
    if re.search(r"\bat 0x|0x[0-9a-f]{8}[0-9a-f]*[1-9a-f]", text):  # an address differs between processes
        raise Unrecordable(
            f"the key of {type(call.kernel.kernel).__name__} holds an address, so it is no lasting name: {text[:500]}"
        )
    target = f"attn_core.flash4.{hashlib.sha256(text.encode()).hexdigest()[:32]}"
    return KernelStep(target, reads, writes, lambda: compile_step(target, call, slots, by_slot))


def check_constant(value: Any) -> Any:
    """Checks a value that becomes part of the compiled code, and returns what says it."""
    if is_number(value):
        return f"{type(value).__name__}({value.value})"
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if type(value).__name__ == "AuxData" and all(part is None for part in value):
        return "no AuxData"
    raise Unrecordable(f"a kernel takes {type(value).__name__} {value!r:.200}")


def zeroed_memory(operations: list[tuple[str, Any]]) -> set[Any]:
    """Returns the memory of tensors that were allocated as zeros.

    Raises:
        Unrecordable: if there is an operation that does more than allocate.
    """
    zeros = set()
    for name, result in operations:
        if name.startswith(ZEROS):
            zeros.add(_memory(result))
        elif not name.startswith(ALLOCATES):
            raise Unrecordable(f"a torch operation, {name}, among its kernels")
    return zeros


def _memory(tensor: Any) -> Any:
    """Returns a tensor's storage, which identifies its memory."""
    return tensor.untyped_storage()._cdata


def _buffer(tensor: Any, name: str, shape: Any, zeros: Any = ()) -> Buffer:
    if not tensor.is_contiguous() or tensor.storage_offset():
        raise Unrecordable(f"a kernel takes a view of {name}: {list(tensor.shape)}, strides {tensor.stride()}")
    return Buffer(name, tuple(shape), dtype_name(tensor), _memory(tensor) in zeros)


@cached_once
def _versions() -> tuple[str, ...]:
    """Returns versions that are part of each step's name, because the compiled code depends on them."""
    return tuple(f"{name} {metadata.version(name)}" for name in disk_cache.PACKAGES)


def _tensors(spec: AttentionSpec, direction: str, with_dlse: bool) -> dict[str, Any]:
    """Returns a call's tensors other than ``Inputs``, by name: results, and for a backward also out, lse and dout."""
    import torch

    query, key, value = dry_run.shapes(spec)
    wide, narrow = spec.dtype, "float32"
    shapes = {"out": (spec.out_shape, wide), "lse": (spec.lse_shape, narrow)}
    if direction == "backward":
        shapes |= {"dout": (spec.out_shape, wide)} | ({"dlse": (spec.lse_shape, narrow)} if with_dlse else {})
        shapes |= {"dq": (query, wide), "dk": (key, wide), "dv": (value, wide)}
        shapes |= {"dsinks": ((spec.num_heads,), narrow)} if spec.sinks else {}
    return {
        name: torch.empty(shape, dtype=getattr(torch, dtype), device=FAKE_DEVICE)
        for name, (shape, dtype) in shapes.items()
    }


# The compiled code of a step: a recorded kernel as a function of buffers alone.


def compile_step(target: str, call: Launch, slots: list[tuple[int, int | None]], by_slot: list[Any]) -> Any:
    """Returns a ``tvm_ffi.Function`` of tensors alone that launches the kernel on the environment's stream."""
    import cutlass
    from cutlass import cute

    code = compiled_code()
    if target in code:
        return _function(code[target])
    kernel, arguments = call.kernel, call.arguments

    # Numbers are captured, so they become constants of the compiled code, and XLA passes buffers only.
    def launch(stream: Any, tensors: Any) -> None:
        places, filled = iter(slots), []
        for value, _ in leaves(call):
            if is_tensor(value):
                slot, part = next(places)
                filled.append(_in_kernel(tensors[slot], part))
            elif isinstance(value, AddressOf):
                filled.append(tensors[next(places)[0]].iterator.toint())
            elif is_number(value):
                filled.append(_in_code(type(value)(value.value)))
            elif isinstance(value, float):
                filled.append(_in_code(cutlass.Float32(value)))
            elif isinstance(value, int) and not isinstance(value, bool):
                filled.append(cutlass.Int32(value))
            else:
                filled.append(value)
        rest = iter(filled)
        kernel.kernel(*(_rebuilt(value, about, rest) for value, about in zip(arguments, kernel.described)), stream)

    with warnings.catch_warnings():  # about an argument that flash-attn-4 leaves empty
        warnings.filterwarnings("ignore", "Argument aux_data ")
        compiled = cute.compile(_entry(), launch, kernel.described[-1], *by_slot, options=kernel.options)
    code[target] = compiled
    return _function(compiled)


def _in_code(number: Any) -> Any:
    """Returns a float as a value of the compiled code; other numbers as they are.

    The DSL computes with a number of Python in 64 bits. torch's launches pass it at run time, in 32 bits.
    """
    import cutlass

    return cutlass.Float32(number.ir_value()) if isinstance(number, cutlass.Float32) else number


def leaves(call: Launch) -> Iterator[tuple[Any, Any]]:
    """Yields a kernel's arguments with their descriptions; of a tuple or list, its parts."""
    pairs = [*zip(call.arguments, call.kernel.described)][::-1]
    while pairs:
        value, about = pairs.pop()
        if _is_group(value):
            pairs += [*zip(value, about, strict=True)][::-1]
        else:
            yield value, about


def _rebuilt(value: Any, about: Any, leaves: Iterator[Any]) -> Any:
    """Returns an argument as the kernel takes it, from its leaves. about: its description, which has the right type."""
    if not _is_group(value):
        return next(leaves)
    parts = [_rebuilt(part, of_part, leaves) for part, of_part in zip(value, about, strict=True)]
    return type(about)(*parts) if hasattr(about, "_fields") else type(about)(parts)


def _is_group(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and any(part is not None for part in value)


def _function(compiled: Any) -> Any:
    """Returns the TVM-FFI function of compiled code: the code itself, or a member if the code also takes keywords."""
    import tvm_ffi

    function = compiled if isinstance(compiled, tvm_ffi.Function) else getattr(compiled, "_tvm_ffi_function", None)
    if not isinstance(function, tvm_ffi.Function):
        raise Unrecordable(f"cute.compile gave {type(compiled).__name__}, which holds no TVM-FFI function")
    return function


@cached_once
def _entry() -> Any:
    import cutlass
    from cutlass import cute

    def entry(launch, stream, *tensors):  # type: ignore[no-untyped-def]
        launch(stream, tensors)

    entry.__annotations__ = {"launch": cutlass.Constexpr}  # text annotations would be looked up in this module
    return cute.jit(entry)


def is_number(value: Any) -> bool:
    """Returns whether an argument is a number of the CuTe DSL."""
    return isinstance(getattr(value, "value", None), (int, float))


def is_tensor(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor)


def tensor_of(value: Any) -> Any:
    """Returns the tensor that an argument is or points to; None for any other argument."""
    if isinstance(value, AddressOf):
        return value.tensor
    return value if is_tensor(value) else None


def _as_one(named: dict[str, Any], whole: str, parts: tuple[str, ...]) -> dict[str, Any]:
    """Returns one array and its three parts by name, for three tensors of equal shapes; nothing if they are absent."""
    import torch

    if parts[0] not in named:
        return {}
    one = named[parts[0]]
    *rows, heads, dim = one.shape
    array = torch.empty((*rows, len(parts), heads, dim), dtype=one.dtype, device=one.device)
    return {whole: array, **dict(zip(parts, array.unbind(-3), strict=True))}


def _part_of(tensor: Any, whole: Any) -> int | None:
    """Returns which part of an array a tensor of the same memory is; None for the array itself and any other view."""
    for number, piece in enumerate(whole.unbind(-3) if whole.dim() > 3 else ()):
        if all(getattr(tensor, about)() == getattr(piece, about)() for about in ("size", "stride", "storage_offset")):
            return number
    return None


def _in_kernel(tensor: Any, part: int | None) -> Any:
    """Returns a part of an array ``[..., tokens, 3, heads, head_dim]`` in a function of the CuTe DSL."""
    if part is None:
        return tensor
    from cutlass import cute

    rows = cute.rank(tensor) - 3
    piece = tensor[(*(None,) * rows, part, None, None)]
    # The array is aligned, and the rows of its parts are multiples of 16 bytes.
    return cute.make_tensor(piece.iterator.align(16), piece.layout)
