"""Repeats the launches of FlashAttention-4's compiled kernels, without the Python of flash-attn-4's entry points.

The entry points spend most of a small call's time on choices that follow from the spec, the device, and the layout of
the operands. So the calls of a spec on a device go three ways:

1. The first call runs through the entry points, which compile. It is not recorded, because many shapes are seen once.
2. The second call does, too, and is recorded (``recording``).
3. Later calls launch the recorded kernels. What may change between calls are the tensors alone, and so their addresses
   and strides: the compiled kernels take strides at run time, and ``readable`` copies the few layouts for which
   flash-attn-4 would copy or compile another kernel. Shapes and numbers follow from the spec.

A forward's launches also serve calls of other lengths (``family``), so a decoding loop is recorded once. A call runs
through the entry points forever if its recording shows anything else than launches, such as a torch operation.
Upstream: flash-attn-4 4.0.0b36, ``flash_attn.cute.interface``.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import lru_cache, partial
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from attn_core.backends.contract import Buffers
from attn_core.backends.flash4 import masked, own_kernels, recording, versions
from attn_core.backends.flash4.recording import Operand, Recording
from attn_core.backends.shared.kernel_programs import Unrecordable
from attn_core.backends.shared.readable import copied
from attn_core.call.masks import band
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Gradients, Inputs

if TYPE_CHECKING:
    from torch import Tensor

Results = TypeVar("Results", bound=tuple[Any, ...])
Tensors = tuple[Any, ...]
Place = int | Callable[[Tensors], object]
"""The place of a kernel's argument among all values of a call, or a function that makes it from them."""

# The operands by their names in flash-attn-4, in the order in which they are replayed; None for an absent one.
ForwardOperands = namedtuple("ForwardOperands", "q k v out lse cu_seqlens_q cu_seqlens_k")
BackwardOperands = namedtuple("BackwardOperands", "q k v out dout lse dq dk dv dlse cu_seqlens_q cu_seqlens_k")
ByEntryPoints = Callable[[AttentionSpec, Any, Tensors, Any], Any]
"""``(spec, operands, tables, lane) -> results`` makes a call through a lane's entry points; see ``own_kernels``."""


class Launches(NamedTuple):
    """The kernels of a recorded call.

    Attributes:
        scratch: functions that allocate the memory between the kernels.
        constants: the arguments that are no tensors.
        kernels: each compiled kernel with a function that picks its arguments from (*operands, *tables, *scratch,
            *constants).
        has_tables: whether the call has the tensors of ``masked.operands``.
    """

    scratch: tuple[Callable[[], Tensor], ...]
    constants: tuple[object, ...]
    kernels: tuple[tuple[Callable[..., object], Callable[[Tensors], Tensors]], ...]
    has_tables: bool = False

    def run(self, operands: Tensors, tables: Tensors) -> None:
        """Launches the kernels on torch's current stream."""
        values = (*operands, *tables, *[allocate() for allocate in self.scratch], *self.constants)
        for kernel, pick in self.kernels:
            kernel(*pick(values))


Key = tuple[Any, str, int]
"""A call: its spec or ``family``, its half ("forward" or one of ``BACKWARD_HALF``), and the index of the device."""
BACKWARD_HALF = {True: "backward", False: "backward of out and lse"}
"""The half of a backward, by whether the log-sum-exp has no gradient: with one the kernels are others."""


@lru_cache(maxsize=4096)
def _compiled_spec(spec: AttentionSpec) -> AttentionSpec:
    """Returns a key that is at least as fine as the kernel's own (dtype, group, widths, properties of the lengths)."""
    return replace(spec, scale=1.0, needs_backward=False, return_lse=False)  # none of them changes the kernel


def compiled_key(spec: AttentionSpec, half: str, q: Tensor) -> Key:
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


def launches_of(spec: AttentionSpec, half: str, q: Tensor) -> Launches | None:
    """Returns the launches of a call on q's device, or None if there is no recording. half: see ``Key``."""
    device = q.get_device()
    launches = _recorded.get((spec, half, device))
    if launches is None and half == "forward":
        launches = _recorded.get((_forward_key(spec, device), half, device))
        if launches is not None:
            _remember((spec, half, device), launches)  # under the spec, whose hash is known, it is found faster
    return launches


def _forward_key(spec: AttentionSpec, device: int) -> Hashable:
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
_FIELDS = (
    "dtype num_heads num_kv_heads head_dim value_dim packed sinks paged partial invariant "
    "softcap scale deterministic dropout mask_shape bias_shape alibi_shape"
)
_WIDTHS = attrgetter(*_FIELDS.split())


def family(spec: AttentionSpec) -> Hashable:
    """Returns a key of the forwards that launch the same kernel with the same numbers; the spec itself if none do.

    On sm90 flash-attn-4 chooses the kernel by widths, groups and the band; of the lengths matters only whether the
    queries of a head, times the group, fit in one tile of 64, 128, 192 or 256.
    """
    if not masked.is_plain(spec) or (spec.packed and (spec.documents or 0) > FEW_DOCUMENTS):
        return spec
    rows = (spec.max_len_q or spec.q_len) * spec.group_size
    # The tile of 64 to 256 rows that holds them as its number, 1 to 4; 5 for more rows.
    return (*_WIDTHS(spec), window(spec), min(-(-rows // 64), 5))


# Operands have a layout for which the entry points neither copy nor compile another kernel.


def window(spec: AttentionSpec) -> tuple[int | None, int | None]:
    """Returns the band as distances from the bottom-right diagonal, possibly negative; None if a side hides nothing."""
    left, right, offset = band(spec)
    if spec.packed:  # each document has its own diagonal, which the kernel finds; ``refuses`` allows bottom-right only
        return left, right
    shift = spec.kv_len - spec.q_len - offset  # how far the bottom-right diagonal lies to the right of the spec's
    left = None if left is None or left + shift >= spec.kv_len - 1 else left + shift
    right = None if right is None or right - shift >= spec.q_len - 1 else right - shift
    return left, right


def writable(buffer: Tensor | None) -> Tensor | None:
    """Returns the buffer if the kernel can write into it, else None. The kernel stores 16 bytes at a time."""
    if buffer is None or buffer.data_ptr() % 16:
        return None
    if buffer.is_contiguous():  # perhaps of rows that are no multiple of 16 bytes, as the log-sum-exp's
        return buffer
    strides, size = buffer.stride(), buffer.element_size()
    return buffer if strides[-1] == 1 and all(step > 0 and step * size % 16 == 0 for step in strides[:-1]) else None


@lru_cache(maxsize=4096)
def _aligned(strides: tuple[int, ...]) -> bool:
    """Returns whether rows of 16-bit elements are dense, and all of them a multiple of 16 bytes apart."""
    return strides[-1] == 1 and all(step > 0 and step % 8 == 0 for step in strides[:-1])


def readable(tensor: Tensor) -> Tensor:
    """Returns a tensor ``[..., dim]`` of 16-bit elements without its graph, copied if the kernel cannot read it.

    flash-attn-4 copies rows and addresses that are not multiples of 16 bytes, and compiles another kernel for an
    expanded axis, whose stride is 0.
    """
    if tensor.requires_grad:
        tensor = tensor.detach()
    return tensor if _aligned(tensor.stride()) and not tensor.data_ptr() % 16 else copied(tensor)


def dense(tensor: Tensor) -> Tensor:
    """Returns the tensor, copied unless it is contiguous and its address is a multiple of 16 bytes."""
    return tensor if tensor.is_contiguous() and not tensor.data_ptr() % 16 else copied(tensor)


def forward(
    launches: Launches | None, spec: AttentionSpec, inputs: Inputs, into: Buffers | None, by_entry_points: ByEntryPoints
) -> tuple[Tensor, Tensor]:
    """Returns (out, lse) of a call of the kernel's own widths, from its launches if there are any.

    Args:
        into: as in ``Backend.forward``.
    """
    import torch

    q, k, v = readable(inputs.q), readable(inputs.k), readable(inputs.v)
    out, lse = (None, None) if into is None else map(writable, into)
    if out is None:
        out = torch.empty(spec.out_shape, dtype=q.dtype, device=q.device)
    if lse is None:
        lse = torch.empty(spec.lse_shape, dtype=torch.float32, device=q.device)
    # In the order of ``ForwardOperands``. Making one takes longer than making a tuple.
    operands = q, k, v, out, lse, inputs.cu_seqlens_q, inputs.cu_seqlens_k
    if launches is None:
        tables = masked.operands(spec, inputs, "forward")
        named = ForwardOperands(*operands)
        return _by_python(spec, "forward", named, tables, (out, lse), by_entry_points)
    launches.run(operands, masked.operands(spec, inputs, "forward") if launches.has_tables else ())
    return out, lse


def backward(
    launches: Launches | None,
    spec: AttentionSpec,
    inputs: Inputs,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    into: Gradients | None,
    dlse: Tensor | None,
    by_entry_points: ByEntryPoints,
) -> Gradients:
    """Returns the gradients of a call of the kernel's own widths, as ``forward``."""
    import torch

    q, k, v = readable(inputs.q), readable(inputs.k), readable(inputs.v)
    dq, dk, dv = (None, None, None) if into is None else map(writable, into[:3])
    dq = torch.empty_like(q) if dq is None else dq
    dk = torch.empty_like(k) if dk is None else dk
    dv = torch.empty_like(v) if dv is None else dv
    others = [None if x is None else dense(x) for x in (dlse, inputs.cu_seqlens_q, inputs.cu_seqlens_k)]
    # In the order of ``BackwardOperands``.
    operands = (q, k, v, readable(out), readable(dout), dense(lse), dq, dk, dv, *others)
    gradients = Gradients(dq, dk, dv)
    if launches is None:
        tables = masked.operands(spec, inputs, "backward")
        named = BackwardOperands(*operands)
        return _by_python(spec, BACKWARD_HALF[dlse is None], named, tables, gradients, by_entry_points)
    launches.run(operands, masked.operands(spec, inputs, "backward") if launches.has_tables else ())
    return gradients


# The first and the second call


def _by_python(
    spec: AttentionSpec, half: str, operands: Any, tables: Tensors, results: Results, by_entry_points: ByEntryPoints
) -> Results:
    """Makes a call that has no launches through the entry points, and records it if it is the second of its kind.

    Args:
        operands: ``ForwardOperands`` or ``BackwardOperands``; the buffers of ``results`` are among them.
        half: see ``Key``.
    """
    device = operands.q.get_device()
    key = (_forward_key(spec, device) if half == "forward" else spec), half, device
    if not _is_due(key):
        return by_entry_points(spec, operands, tables, own_kernels)
    taken: set[int] = set()

    def alone(tensor: Tensor | None) -> Tensor | None:
        """Returns a tensor with an address of its own, by which kernels may get it: k may be v, and dout may be out."""
        if tensor is None:
            return None
        if tensor.data_ptr() in taken:
            return copied(tensor)
        taken.add(tensor.data_ptr())
        return tensor

    operands, tables = type(operands)(*map(alone, operands)), tuple(map(alone, tables))
    with recording.recording(with_memory=True) as recorder:
        written = by_entry_points(spec, operands, tables, recorder)
    try:
        for buffer, result in zip(results, written, strict=True):
            if buffer is not None and buffer.data_ptr() != result.data_ptr():
                raise Unrecordable("the entry points write into buffers of their own")
        launches = _launches(recorder.recorded((*operands, *tables)), bool(tables))
    except Unrecordable:
        launches = None
    if launches is not None and launches.scratch:  # whose sizes may depend on the lengths, so no family shares it
        key = spec, half, device
    _remember(key, launches)
    return written


def _is_due(key: Key) -> bool:
    """Returns whether to record this call, the second of its kind on a GPU; remembers the first one."""
    if key[-1] < FIRST_GPU or key in _recorded:
        return False
    if not recording.is_possible():  # the first call of all asks, while it compiles, so that no recording has to wait
        return False
    if key in _seen:
        return True
    if len(_seen) >= MOST_CALLS:
        _seen.clear()
        _recorded.clear()
    _seen.add(key)
    return False


def _remember(key: Key, launches: Launches | None) -> None:
    if len(_recorded) >= 2 * MOST_CALLS:
        _recorded.clear()
    _recorded[key] = launches


def _launches(call: Recording, has_tables: bool) -> Launches:
    import torch

    # Places count the values that ``Launches.run`` has: the call's tensors, its scratch among them, then constants.
    constants: list[Any] = []
    kernels, scratch = [], []
    for launch in call.launches:
        places = [_place_of(value, len(call.tensors), constants) for value in launch.arguments]
        kernels.append((launch.kernel, _picker(places)))
    for place, zeros in call.scratch.items():
        like, allocate = call.tensors[place], torch.zeros if zeros else torch.empty
        scratch.append(partial(allocate, tuple(like.shape), dtype=like.dtype, device=like.device))
    return Launches(tuple(scratch), tuple(constants), tuple(kernels), has_tables)


def _place_of(value: Any, tensors: int, constants: list[object]) -> Place:
    """Returns the place of a kernel's argument among all values, or a function that makes it from them.

    Args:
        tensors: how many of the values are tensors. constants: the others, to which a new one is added.
    """
    if recording.is_group(value):
        return _group(type(value), [_place_of(part, tensors, constants) for part in value])
    if isinstance(value, Operand):
        return (lambda values: values[value.place].data_ptr()) if value.is_address else value.place
    number = getattr(value, "value", None)  # of the CuTe DSL
    constants.append(number if isinstance(number, int) else value)
    return tensors + len(constants) - 1


def _picker(places: list[Place]) -> Callable[[Tensors], Tensors]:
    """Returns a function that picks a kernel's arguments from all values."""
    if all(isinstance(place, int) for place in places):
        return itemgetter(*places)
    return lambda values: tuple([values[p] if isinstance(p, int) else p(values) for p in places])


def _group(kind: type, places: list[Place]) -> Callable[[Tensors], object]:
    """Returns a function that makes an argument which is a tuple or a list."""
    has_names = hasattr(kind, "_fields")

    def make(values: Tensors) -> object:
        parts = [values[p] if isinstance(p, int) else p(values) for p in places]
        return kind(*parts) if has_names else kind(parts)

    return make
