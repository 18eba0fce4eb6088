"""Launches FlashAttention-4's compiled kernels directly, without the Python of flash-attn-4's entry points.

The entry points spend most of a small call's time on choices that follow from the spec, the device, and the layout of
the operands. So we record the second call of a spec on a device: the compiled kernels in their order, their arguments,
and the scratch between them. Later calls launch the same kernels with the same arguments on their own tensors. The
first call is not recorded, because it compiles, and because many shapes are seen only once.

A forward's launches also serve calls of other lengths (``family``), so a decoding loop is recorded once.

A call goes through the entry points forever if its recording shows anything else, such as a torch operation.
Upstream: flash-attn-4 4.0.0b36, ``flash_attn.cute.interface``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache, partial
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

from attn_core.backends.flash4 import masked, versions
from attn_core.backends.flash4.program import check_constant, zeroed_memory
from attn_core.backends.flash4.recorder import private_copy, watching
from attn_core.backends.shared.cached_once import cached_once
from attn_core.backends.shared.programs.kernel_programs import Unrecordable
from attn_core.backends.shared.readable import copied
from attn_core.call.after_fork import free_in_children
from attn_core.call.masks import band
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Gradients, Inputs

Tensors = tuple[Any, ...]


class Launches(NamedTuple):
    """The kernels of a recorded call.

    Attributes:
        scratch: functions that allocate the memory between the kernels.
        constants: the arguments that are no tensors.
        kernels: each compiled kernel with a function that picks its arguments from (*operands, *scratch, *constants).
        more: whether the call has the operands of ``masked.operands``.
    """

    scratch: tuple[Callable[[], Any], ...]
    constants: tuple[Any, ...]
    kernels: tuple[tuple[Callable[..., Any], Callable[[Tensors], Tensors]], ...]
    more: bool = False

    def run(self, operands: Tensors) -> None:
        """Launches the kernels on torch's current stream."""
        values = (*operands, *[allocate() for allocate in self.scratch], *self.constants)
        for kernel, pick in self.kernels:
            kernel(*pick(values))


Key = tuple[Any, str, int]
"""A call: its spec or ``family``, "forward" or "backward" or "backward of out and lse", and the index of the device."""


@lru_cache(maxsize=4096)
def _compiled_spec(spec: AttentionSpec) -> AttentionSpec:
    """Returns a key that is at least as fine as the kernel's own (dtype, group, widths, properties of the lengths)."""
    return replace(spec, scale=1.0, needs_backward=False, return_lse=False)  # none of them changes the kernel


def compiled_key(spec: AttentionSpec, half: str, q: Any) -> Key:
    """Returns the key of a call's compiled kernels; calls with equal keys share them."""
    return _compiled_spec(spec), half, q.get_device()


MOST_CALLS = 4096
"""The most calls that are remembered. Beyond it all are forgotten, and recorded again."""
FIRST_GPU = 0
"""The index of the first GPU. Calls on devices before it, the CPU in tests, are never recorded."""
_seen: set[Key] = set()
"""Calls on a GPU that ran at least once."""
_recorded: dict[Key, Launches | None] = {}
"""The launches of a call, or None if it cannot be recorded. Two threads may record a call twice, which is harmless."""


def launches_of(spec: AttentionSpec, half: str, q: Any) -> Launches | None:
    """Returns the launches of a call on q's device, or None if there is no recording. half: see ``Key``."""
    device = q.get_device()
    launches = _recorded.get((spec, half, device))
    if launches is None and half == "forward":
        launches = _recorded.get((_forward_key(spec, device), half, device))
        if launches is not None:
            _remember((spec, half, device), launches)  # under the spec, whose hash is known, it is found faster
    return launches


def _forward_key(spec: AttentionSpec, device: int) -> Any:
    """Returns what a forward is recorded under: its family if its launches may serve other lengths, else its spec."""
    if device < FIRST_GPU or not _chooses_by_family(device):
        return spec
    return family(spec)


@lru_cache(maxsize=64)
def _chooses_by_family(device: int) -> bool:
    """Returns whether flash-attn-4 chooses as ``family`` assumes: in the version, and for the GPU, that we read."""
    import torch

    try:
        return versions.installed() == versions.READ and torch.cuda.get_device_capability(device) == (9, 0)
    except ImportError:
        return False


FEW_DOCUMENTS = 256
"""With more packed documents flash-attn-4 launches more kernels, which depend on the lengths."""
_WIDTHS = attrgetter(
    *(
        "dtype",
        "num_heads",
        "num_kv_heads",
        "head_dim",
        "value_dim",
        "packed",
        "sinks",
        "paged",
        "partial",
        "invariant",
    ),
    *("softcap", "scale", "deterministic", "dropout", "mask_shape", "bias_shape", "alibi_shape"),
)


def family(spec: AttentionSpec) -> Any:
    """Returns a key of the forwards that launch the same kernel with the same numbers; the spec itself if none do.

    On sm90 flash-attn-4 chooses the kernel by widths, groups and the band; of the lengths matters only whether the
    queries of a head, times the group, fit in one tile of 64, 128, 192 or 256.
    """
    if not masked.is_plain(spec) or (spec.packed and (spec.documents or 0) > FEW_DOCUMENTS):
        return spec
    rows = (spec.max_len_q or spec.q_len) * spec.group_size
    return (*_WIDTHS(spec), window(spec), min(-(-rows // 64), 5))


def forward(spec: AttentionSpec, inputs: Inputs, into: Any, entry: Callable[..., Any]) -> tuple[Any, Any]:
    """Returns (out, lse) of a call of the kernel's own widths, through the entry points unless it is recorded.

    Args:
        entry: ``(spec, inputs, into, entry_points, *more)`` makes the call through the entry points, None for the usual
            ones. more: ``masked.operands``.
    """
    launches = launches_of(spec, "forward", inputs.q)
    if launches is not None:
        return launch_forward(launches, spec, inputs, into)
    device = inputs.q.get_device()
    key = (_forward_key(spec, device), "forward", device)
    if not _is_due(key):
        return entry(spec, inputs, into, None, *masked.operands(spec, inputs, "forward"))  # type: ignore[no-any-return]

    def call(entry_points: Any, tensors: Tensors) -> tuple[Any, Any]:
        q, k, v, out, lse, *others = tensors
        offsets, more = _split(spec, others)
        return entry(spec, _inputs(q, k, v, offsets), (out, lse), entry_points, *more)  # type: ignore[no-any-return]

    has_more = not masked.is_plain(spec)
    operands, results = _forward_operands(spec, inputs, into, has_more)
    written, launches = record(operands, results, call, has_more)
    if launches is not None and launches.scratch:  # whose sizes may depend on the lengths
        key = (spec, "forward", device)
    _remember(key, launches)
    return written


def launch_forward(launches: Launches, spec: AttentionSpec, inputs: Inputs, into: Any) -> tuple[Any, Any]:
    """Returns (out, lse) from recorded launches; ``into`` as in ``Backend.forward``."""
    operands, results = _forward_operands(spec, inputs, into, launches.more)
    launches.run(operands)
    return results


def backward(
    spec: AttentionSpec, inputs: Inputs, out: Any, lse: Any, dout: Any, into: Any, dlse: Any, entry: Callable[..., Any]
) -> Gradients:
    """Returns the gradients of a call of the kernel's own widths, through the entry points unless it is recorded.

    Args:
        entry: ``(spec, inputs, out, lse, dout, into, dlse, entry_points)``, as in ``forward``.
    """
    half = "backward" if dlse is None else "backward of out and lse"
    launches = launches_of(spec, half, inputs.q)
    if launches is not None:
        return launch_backward(launches, spec, inputs, out, lse, dout, into, dlse)
    key = (spec, half, inputs.q.get_device())
    if not _is_due(key):
        more = masked.operands(spec, inputs, "backward")
        return entry(spec, inputs, out, lse, dout, into, dlse, None, *more)  # type: ignore[no-any-return]

    def call(entry_points: Any, tensors: Tensors) -> Gradients:
        q, k, v, out, dout, lse, dq, dk, dv, *others = tensors
        dlse_given = None if dlse is None else others.pop(0)
        offsets, more = _split(spec, others)
        buffers = Gradients(dq, dk, dv)
        results = entry(spec, _inputs(q, k, v, offsets), out, lse, dout, buffers, dlse_given, entry_points, *more)
        return results  # type: ignore[no-any-return]

    has_more = not masked.is_plain(spec)
    operands, gradients = _backward_operands(spec, inputs, out, lse, dout, into, dlse, has_more)
    written, launches = record(operands, gradients, call, has_more)
    _remember(key, launches)
    return written


def launch_backward(
    launches: Launches, spec: AttentionSpec, inputs: Inputs, out: Any, lse: Any, dout: Any, into: Any, dlse: Any
) -> Gradients:
    """Returns the gradients from recorded launches; ``into`` as in ``Backend.backward``."""
    operands, gradients = _backward_operands(spec, inputs, out, lse, dout, into, dlse, launches.more)
    launches.run(operands)
    return gradients


# Operands: always in one order, and in a layout for which the entry points neither copy nor compile another kernel.


def window(spec: AttentionSpec) -> tuple[int | None, int | None]:
    """Returns the band as distances from the bottom-right diagonal, possibly negative; None if a side hides nothing."""
    left, right, offset = band(spec)
    if spec.packed:  # each document has its own diagonal, which the kernel finds; ``refuses`` allows bottom-right only
        return left, right
    shift = spec.kv_len - spec.q_len - offset  # how far the bottom-right diagonal lies to the right of the spec's
    left = None if left is None or left + shift >= spec.kv_len - 1 else left + shift
    right = None if right is None or right - shift >= spec.q_len - 1 else right - shift
    return left, right


def backward_width(dim: int) -> int:
    """Returns the head dimension at which the backward writes and reads dq in the same widths."""
    return -(-dim // 32) * 32 if dim <= 128 else -(-dim // 64) * 64


def copy_if_expanded(tensor: Any) -> Any:
    """Returns the tensor, copied if an axis is expanded: flash-attn-4 would compile another kernel for stride 0.

    Its entry points themselves copy strides and addresses that are not multiples of 16 bytes.
    """
    return copied(tensor) if 0 in tensor.stride() else tensor


def writable(buffer: Any) -> Any:
    """Returns the buffer if the kernel can write into it, else None. The kernel stores 16 bytes at a time.

    A FakeTensor has no address. It stands for a whole buffer of XLA's, and XLA aligns those to more than 16 bytes.
    """
    if buffer is None:
        return None
    strides, size = buffer.stride(), buffer.element_size()
    # A contiguous buffer may have rows that are no multiple of 16 bytes, as the log-sum-exp's: the kernel allows that.
    dense = strides[-1] == 1 and all(step > 0 and step * size % 16 == 0 for step in strides[:-1])
    aligned = hasattr(buffer, "fake_mode") or buffer.data_ptr() % 16 == 0
    return buffer if (dense or buffer.is_contiguous()) and aligned else None


@lru_cache(maxsize=4096)
def _aligned(strides: tuple[int, ...]) -> bool:
    """Returns whether rows of 16-bit elements are dense, and all of them a multiple of 16 bytes apart."""
    return strides[-1] == 1 and all(step > 0 and step % 8 == 0 for step in strides[:-1])


def readable(tensor: Any) -> Any:
    """Returns a tensor ``[..., dim]`` of 16-bit elements without its graph, copied if the kernel cannot read it."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    return tensor if _aligned(tensor.stride()) and not tensor.data_ptr() % 16 else copied(tensor)


def dense(tensor: Any) -> Any:
    """Returns the tensor, copied unless it is contiguous and its address is a multiple of 16 bytes."""
    return tensor if tensor.is_contiguous() and not tensor.data_ptr() % 16 else copied(tensor)


def _forward_operands(
    spec: AttentionSpec, inputs: Inputs, into: Any, has_more: bool
) -> tuple[Tensors, tuple[Any, Any]]:
    """Returns all operands of a forward, and the results among them. has_more: see ``Launches.more``."""
    import torch

    q, k, v = readable(inputs.q), readable(inputs.k), readable(inputs.v)
    out, lse = (None, None) if into is None else map(_buffer, into)
    if out is None:
        out = torch.empty(spec.out_shape, dtype=q.dtype, device=q.device)
    if lse is None:
        lse = torch.empty(spec.lse_shape, dtype=torch.float32, device=q.device)
    offsets = () if inputs.cu_seqlens_q is None else (inputs.cu_seqlens_q, inputs.cu_seqlens_k)
    more = masked.operands(spec, inputs, "forward") if has_more else ()
    return (q, k, v, out, lse, *offsets, *more), (out, lse)


def _backward_operands(
    spec: AttentionSpec, inputs: Inputs, out: Any, lse: Any, dout: Any, into: Any, dlse: Any, has_more: bool
) -> tuple[Tensors, Gradients]:
    """Returns all operands of a backward, and the gradients among them."""
    import torch

    q, k, v = readable(inputs.q), readable(inputs.k), readable(inputs.v)
    dq, dk, dv = (None, None, None) if into is None else map(_buffer, into[:3])
    dq = torch.empty_like(q) if dq is None else dq
    dk = torch.empty_like(k) if dk is None else dk
    dv = torch.empty_like(v) if dv is None else dv
    others = [dense(other) for other in (dlse, inputs.cu_seqlens_q, inputs.cu_seqlens_k) if other is not None]
    others += masked.operands(spec, inputs, "backward") if has_more else ()
    return (q, k, v, readable(out), readable(dout), dense(lse), dq, dk, dv, *others), Gradients(dq, dk, dv)


def _split(spec: AttentionSpec, others: list[Any]) -> tuple[list[Any], list[Any]]:
    """Returns the offsets of packed documents, and the operands of ``masked.operands``."""
    count = 2 if spec.packed else 0
    return others[:count], others[count:]


def _buffer(buffer: Any) -> Any:
    whole = buffer is not None and buffer.is_contiguous() and not buffer.data_ptr() % 16
    return buffer if whole else writable(buffer)  # whole ones are common, and ``writable`` takes its time


def _inputs(q: Any, k: Any, v: Any, offsets: Any) -> Inputs:
    queries, keys = offsets or (None, None)
    return Inputs(q, k, v, cu_seqlens_q=queries, cu_seqlens_k=keys)


def _is_due(key: Key) -> bool:
    """Returns whether to record this call, the second of its kind on a GPU; remembers the first one."""
    if key[-1] < FIRST_GPU or key in _recorded:
        return False
    if key in _seen:
        return True
    if not _seen:
        copied_entry_points()  # now, while kernels compile, so that the first recording is no slow call
    if len(_seen) >= MOST_CALLS:
        _seen.clear()
        _recorded.clear()
    _seen.add(key)
    return False


def _remember(key: Key, launches: Launches | None) -> None:
    if len(_recorded) >= 2 * MOST_CALLS:
        _recorded.clear()
    _recorded[key] = launches


# A recorded call runs as usual, on the tensors of the call, from a private copy of the entry points' module. The copy's
# caches of compiled kernels are flash-attn-4's own, and note each launch.


def record(
    operands: Tensors, results: Tensors, call: Callable[[Any, Tensors], Any], has_more: bool = False
) -> tuple[Any, Launches | None]:
    """Makes a call; returns its results, and its launches or None if they cannot be repeated.

    Args:
        operands: every tensor of the call, contiguous results among them.
        results: the operands that the call should write into, None for a result that it has not.
        call: ``(entry_points, operands) -> results`` makes the call; entry_points is None for the usual ones.
        has_more: ``Launches.more``.
    """
    entry_points = copied_entry_points()
    if entry_points is None:
        return call(None, operands), None
    # A kernel's argument is known by its address, so no two operands may have one: k may be v, and dout may be out.
    addresses = [tensor.data_ptr() for tensor in operands]
    operands = tuple(copied(one) if addresses.index(one.data_ptr()) < at else one for at, one in enumerate(operands))
    launched: list[tuple[Any, Tensors]] = []
    operations: list[tuple[str, Any]] = []
    try:
        with _noting(launched), watching(operations):
            written = call(entry_points, operands)
        launches = _repeatable(operands, results, written, launched, operations)
        return written, launches and launches._replace(more=has_more)
    finally:
        # Both lists outlive this function: the copy's caches hold one, and a class with a reference cycle the other.
        # XLA does not allow its tensors, which may be operands, to outlive the call.
        launched.clear()
        operations.clear()


def _repeatable(
    operands: Tensors,
    results: Tensors,
    written: Tensors,
    launched: list[tuple[Any, Tensors]],
    operations: list[tuple[str, Any]],
) -> Launches | None:
    """Returns the launches of a recorded call, or None if they cannot be repeated."""
    try:
        for buffer, result in zip(results, written, strict=True):
            if buffer is not None and buffer.data_ptr() != result.data_ptr():
                raise Unrecordable("the entry points write into buffers of their own")
        return _assemble(operands, launched, operations)
    except Unrecordable:
        return None


def _assemble(operands: Tensors, launched: list[tuple[Any, Tensors]], operations: list[tuple[str, Any]]) -> Launches:
    """Returns the launches of a recorded call."""
    import torch

    zeros = zeroed_memory(operations)  # raises an error for an operation that computes
    allocated = [result for name, result in operations if not name.startswith(("aten.detach", "prim."))]
    known = [*operands, *allocated]
    constants: list[Any] = []
    picks = [(kernel, _picker([_place_of(value, known, constants) for value in values])) for kernel, values in launched]
    scratch = []
    for tensor in allocated:
        allocate = torch.zeros if tensor.untyped_storage()._cdata in zeros else torch.empty
        if not tensor.is_contiguous():
            raise Unrecordable(f"scratch of strides {tensor.stride()}")
        scratch.append(partial(allocate, tuple(tensor.shape), dtype=tensor.dtype, device=tensor.device))
    return Launches(tuple(scratch), tuple(constants), tuple(picks))


def _place_of(value: Any, known: list[Any], constants: list[Any]) -> Any:
    """Returns the place of a kernel's argument among all values, for a tuple of them a ``_Group``. Adds to constants.

    Args:
        known: the tensors of the call, operands first.
    """
    import torch

    if isinstance(value, torch.Tensor):
        address = value.data_ptr()
        place = next((place for place, tensor in reversed([*enumerate(known)]) if tensor.data_ptr() == address), None)
        if place is None or _layout(value) != _layout(known[place]):
            raise Unrecordable(f"a kernel takes a view, or a tensor that is not the call's: {list(value.shape)}")
        return place
    if isinstance(value, (tuple, list)) and any(part is not None for part in value):
        return _Group(type(value), [_place_of(part, known, constants) for part in value])
    if isinstance(getattr(value, "value", None), int):  # a number of the CuTe DSL, perhaps an operand's address
        value = value.value
        for place, tensor in enumerate(known):
            if tensor.data_ptr() == value:
                return _Address(place)
    check_constant(value)
    constants.append(value)
    return len(known) + len(constants) - 1


class _Address(NamedTuple):
    """An argument that is the address of a tensor."""

    place: int

    def of(self, values: Tensors) -> int:
        return values[self.place].data_ptr()  # type: ignore[no-any-return]


class _Group(NamedTuple):
    """An argument that is a tuple or a list: its type, and the places of its parts."""

    kind: type
    places: list[Any]

    def of(self, values: Tensors) -> Any:
        parts = [values[place] if isinstance(place, int) else place.of(values) for place in self.places]
        return self.kind(*parts) if hasattr(self.kind, "_fields") else self.kind(parts)


def _picker(places: list[Any]) -> Callable[[Tensors], Tensors]:
    """Returns a function that picks a kernel's arguments from all values."""
    if all(isinstance(place, int) for place in places):
        return itemgetter(*places)
    return lambda values: tuple([values[p] if isinstance(p, int) else p.of(values) for p in places])


def _layout(tensor: Any) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype


_recording = free_in_children(threading.Lock())
"""Held during a recording, because all recordings share one copy of the entry points."""


@cached_once
def _module() -> tuple[Any, Any]:
    """Returns flash-attn-4's interface, and a copy whose caches can be replaced without effect on other callers."""
    from flash_attn.cute import interface  # type: ignore[import-not-found]

    return interface, private_copy("flash_attn.cute._attn_core_direct")


def copied_entry_points() -> tuple[Any, Any] | None:
    """Returns the entry points of the copy, or None if there can be none. The first call takes 30 ms."""
    try:
        copy = _module()[1]
        return copy._flash_attn_fwd, copy._flash_attn_bwd
    except Exception:  # an interface that changed upstream can raise anything, and the usual entry points still work
        return None


class _NotingCache:
    """A cache of compiled kernels, flash-attn-4's own, that notes each launch."""

    def __init__(self, compiled: Any, launched: list[tuple[Any, Tensors]]) -> None:
        self._compiled, self._launched = compiled, launched

    def __contains__(self, key: Any) -> bool:
        return key in self._compiled

    def __setitem__(self, key: Any, kernel: Any) -> None:
        self._compiled[key] = kernel

    def __getitem__(self, key: Any) -> Callable[..., None]:
        kernel = self._compiled[key]

        def launch(*arguments: Any) -> None:
            self._launched.append((kernel, arguments))
            kernel(*arguments)

        return launch


@contextmanager
def _noting(launched: list[tuple[Any, Tensors]]) -> Iterator[None]:
    """Notes each kernel that the copy of the entry points launches, with its arguments."""
    interface, copy = _module()
    with _recording:
        for name, function in vars(copy).items():
            if hasattr(function, "compile_cache") and function.__globals__ is vars(copy):
                function.compile_cache = _NotingCache(getattr(interface, name).compile_cache, launched)
        yield
