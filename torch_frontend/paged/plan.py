"""Plans a paged call: checks its arguments, puts its tables on the right device and chooses a backend."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch

from attn_core import backends
from attn_core.backends.shared.autograd import without_gradient
from attn_core.backends.shared.caches import from_records
from attn_core.backends.shared.torch_ranges import in_range, is_on
from attn_core.call import observe
from attn_core.call.key_ranges import check_values as check_range_values
from attn_core.call.kinds import check_int32
from attn_core.call.observe import range_name, ranges_enabled
from attn_core.call.options import PAGED, Options, check_paged_options, check_traced_options, is_plain_window
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import PagedInputs
from attn_core.errors import DeviceError, DTypeError, ShapeError, SpecError, note_call
from attn_core.paged import arguments
from attn_core.paged import tables as paged_tables
from attn_core.paged.tables import READ, TABLES, check_read
from attn_core.selection import Target, new_plans, override, select
from torch_frontend.dispatch import offsets, plan, run_plan, tensor_kinds
from torch_frontend.dispatch.plan import on_device
from torch_frontend.paged.tables import index_of, op_tables, tables_of

Tensor = torch.Tensor
_NUMBERS = ("q", "k_pages", "v_pages", "sinks", "alibi_slopes", "k_scales", "v_scales")


class PagedPlan(NamedTuple):
    """A checked paged call with the functions of its backend."""

    spec: AttentionSpec
    range_name: str
    forward: Any
    shortcut: Any = None
    """The backend's fast path, see ``Backend.paged_shortcut_of``; None for an empty call, or if it lacks a tensor."""
    writes: tuple[bool, bool] = (False, False)
    """Whether the backend writes into a buffer, and into one with strides."""


@from_records(maxsize=4096)
def plan_call(entries: PagedInputs, options: Options, requested: tuple[str, ...] | None) -> PagedPlan:
    """Checks a paged call and chooses its backend; results are cached.

    Args:
        entries: ``metadata`` of the call's tensors.
    """
    new_plans.evicted(plan_call)
    selection = select(*request(entries, options, requested))
    new_plans.selected(selection)
    record = backends.load(selection.backend or "", selection.target.kind)
    name = range_name(selection.backend or "", selection.spec, "forward")
    if selection.spec.empty:
        return PagedPlan(selection.spec, name, plan.empty_forward)
    takes = {"q", "k", "v", "block_table", "seq_lens", "sinks"}  # the arguments of every shortcut
    if record.takes_pages_alone:
        takes |= {"cu_seqlens_q", "k_scales", "v_scales"}
    usual = all(name in takes for name, entry in entries._asdict().items() if entry)
    shortcut = record.paged_shortcut_of(selection.spec) if usual else None
    forward, shortcut = (on_device(function, _device_of(entries)) for function in (record.forward, shortcut))
    writes = bool(record.writes_into), record.takes_pages_alone
    return PagedPlan(selection.spec, name, forward, shortcut, writes)


def request(
    entries: PagedInputs, options: Options, requested: tuple[str, ...] | None
) -> tuple[AttentionSpec, Target, tuple[str, ...] | None]:
    """Returns the arguments of ``select``: the spec, the target and the requested backends.

    Args:
        entries: ``metadata`` of the call's tensors.
    """
    spec = arguments.build_spec(_facts_of(entries), options)
    return spec, Target.here("torch", plan.device_name(_device_of(entries))), requested


def metadata(inputs: PagedInputs) -> PagedInputs:
    """Returns (shape, dtype, device) in the place of every tensor, None for an absent one."""
    return PagedInputs(*(None if t is None else (t.shape, t.dtype, t.device) for t in inputs))


def _facts_of(entries: PagedInputs) -> PagedInputs:
    """Returns ``metadata`` as attn_core's checks expect it."""
    return PagedInputs(*(entry and plan.facts(*entry) for entry in entries))


def _device_of(entries: PagedInputs) -> torch.device:
    _, _, device = entries.q
    return device  # type: ignore[no-any-return]


def options_of(*values: Any) -> Options:
    """Returns the options of a paged call, in the order of ``PAGED``, checked unless they may be symbols."""
    if torch.compiler.is_compiling():
        return check_traced_options(Options(**dict(zip(PAGED, values))))
    # The key of the cache has the types of arguments, but not of a pair's entries. (True, 0) would find (1, 0).
    check = _checked if is_plain_window(values[_WINDOW]) else check_paged_options
    try:
        return check(*values)
    except TypeError:  # unhashable: a list as window, or an invalid value that the uncached check names
        return check_paged_options(*values)


# typed, so that True and 1.0 do not hit the entry of 1
_checked = lru_cache(maxsize=1024, typed=True)(check_paged_options)
_WINDOW = PAGED.index("window")


def gather_arguments(given: PagedInputs, max_len_q: int | None) -> PagedInputs:
    """Returns a call's arguments on one device; ``run`` checks the values of those on the CPU."""
    check_numbers(given)
    tensor_kinds.check_data(**dict(zip(arguments.ARGUMENTS, given, strict=True)))
    tables = tables_of(given.q, given.k, max_len_q, given.block_table, given.seq_lens, given.cu_seqlens_q)
    starts = _starts_of(given.q, given.kv_starts, given.seq_lens)
    ranges = _ranges_of(given.q, given.key_ranges)
    return given._replace(**dict(zip(TABLES, tables, strict=True)), key_ranges=ranges, kv_starts=starts)


def _ranges_of(q: Tensor, key_ranges: Any) -> Tensor | None:
    """Returns key_ranges as a tensor. Checks the values of numpy's arrays and copies them to q's device."""
    ranges = _int32_of(q, "key_ranges", key_ranges)
    # On a CPU ``run`` checks the values. ``build_spec`` raises for a wrong shape.
    is_known = isinstance(key_ranges, np.ndarray) and q.device.type != "cpu"
    if is_known and key_ranges.ndim == 5 and key_ranges.shape[-1] == 2:
        check_range_values(key_ranges, q.shape[0])
    return ranges


def _starts_of(q: Tensor, kv_starts: Any, seq_lens: Any) -> Tensor | None:
    """Returns kv_starts as a tensor. Compares numpy's values with lengths in numpy, and copies them to q's device."""
    starts = _int32_of(q, "kv_starts", kv_starts)
    # On a CPU ``run`` checks the values. ``build_spec`` raises for a wrong shape.
    is_known = q.device.type != "cpu" and isinstance(kv_starts, np.ndarray) and isinstance(seq_lens, np.ndarray)
    if is_known and kv_starts.shape == seq_lens.shape:
        paged_tables.check_starts(kv_starts, seq_lens)
    return starts


def _int32_of(q: Tensor, name: str, array: Tensor | np.ndarray | None) -> Tensor | None:
    if isinstance(array, np.ndarray):
        check_int32(name, array.dtype)
    return None if array is None else index_of(q, name, array)


def check_numbers(given: PagedInputs) -> None:
    """Raises TypeError or SpecError unless the tensors are plain and have no derivative; q and pages must exist.

    Only those of floats count, and of stored numbers.
    """
    for name, tensor in zip(arguments.ARGUMENTS, given, strict=True):
        if name in _NUMBERS and (tensor is not None or name in ("q", "k_pages", "v_pages")):
            plan.check_tensor(name, tensor)
            check_no_gradient(name, tensor)


def check_no_gradient(name: str, tensor: Tensor) -> None:
    """Raises SpecError for a tensor with a gradient or a tangent, because paged attention has no derivative."""
    if tensor_kinds.is_trained(tensor):
        kind, remedy = (
            ("requires_grad=False", "no_grad()") if tensor.requires_grad else ("no tangent", "Tensor.detach()")
        )
        raise SpecError(f"{name}: expected {kind}, keys and values in pages are for inference; use torch.{remedy}")


def check_op(given: PagedInputs, options: Options) -> PagedInputs:
    """Checks the arguments of a call that becomes one op, if its sizes are ints; returns them in the op's form."""
    check_numbers(given)
    q = given.q
    ranges, starts = _ranges_of(q, given.key_ranges), _starts_of(q, given.kv_starts, None)
    tensor_kinds.check_data(q, key_ranges=ranges, alibi_slopes=given.alibi_slopes, kv_starts=starts)
    tables = op_tables(q, given.block_table, given.seq_lens, given.cu_seqlens_q)
    inputs = given._replace(**dict(zip(TABLES, tables, strict=True)), key_ranges=ranges, kv_starts=starts)
    entries = metadata(inputs)
    if all(type(size) is int for entry in entries if entry for size in entry[0]):
        arguments.build_spec(_facts_of(entries), options)
    return inputs


def arrays_of(inputs: PagedInputs) -> dict[str, np.ndarray | None]:
    """Returns the tables, ranges and scales of a call on the CPU as numpy arrays, for ``check_read``."""
    return {name: None if (tensor := getattr(inputs, name)) is None else tensor.numpy() for name in READ}


def run(
    inputs: PagedInputs, options: Options, requested: tuple[str, ...] | None, into: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Plans and runs a paged call; returns (out, lse). into: the caller's buffer for out, or None."""
    # use_backend is read here, because in compiled code this runs inside the op.
    call_plan = plan_call(metadata(inputs), options, requested or override.requested())
    if inputs.q.device.type == "cpu":
        check_read(call_plan.spec, options.max_len_q, arrays_of(inputs))
    forward = call_plan.forward
    if into is not None:
        check_out(into, *inputs[:3])
        if call_plan.writes[0] and (call_plan.writes[1] or into.is_contiguous()):
            forward = partial(forward, into=(into, None))
    if is_on() and not call_plan.spec.empty:
        forward = in_range(forward, call_plan.range_name, ranges_enabled())
    try:
        out, lse = forward(call_plan.spec, inputs)
    except Exception as error:
        note_call(error, call_plan.range_name)
        raise
    cu = inputs.cu_seqlens_q
    # Kernels leave the rows behind the last offset unwritten, and the host does not know the last offset.
    out, lse = offsets.clear_tail(out, lse, cu) if cu is not None and not cu.is_cpu else (out, lse)
    out = out if into is None else copied(out, into)
    if inputs.sinks is None or not options.return_lse:
        return out, lse
    return out, run_plan.fill_with_sinks(lse, inputs.sinks, None if cu is None else cu[-1])


def check_out(out: Tensor, q: Tensor, k_pages: Tensor, v_pages: Tensor) -> None:
    """Checks ``out`` for a call whose other arguments are right: ``[tokens, heads, value_dim]`` of q's dtype.

    Raises:
        TypeError, ShapeError, DTypeError, DeviceError, SpecError: naming out, its value and what was expected.
    """
    plan.check_tensor("out", out)
    tensor_kinds.check_data(q, out=out)
    shape = (*q.shape[:2], v_pages.shape[3])
    if tuple(out.shape) != shape:
        raise ShapeError(f"out: expected [tokens, heads, value_dim] = {list(shape)}, got {list(out.shape)}")
    if out.dtype != q.dtype:
        raise DTypeError(f"out: expected the dtype of q, {_dtype_name(q)}, got {_dtype_name(out)}")
    if out.device != q.device:
        raise DeviceError(f"out: expected the device of q ({q.device}), got {out.device}; move it there")
    if out.requires_grad and torch.is_grad_enabled():
        raise SpecError("out: expected requires_grad=False, because it is written to; use torch.no_grad()")
    if out.stride(-1) != 1 and shape[2] > 1:
        raise ShapeError(f"out: expected dense channels (a last stride of 1), got {list(out.stride())}")
    if torch.compiler.is_compiling() or tensor_kinds.is_watched(q):
        return
    if torch._debug_has_internal_overlap(out) == 1:
        raise SpecError(f"out: expected memory of its own for each element, got the strides {list(out.stride())}")
    for name, other in (("q", q), ("k_pages", k_pages), ("v_pages", v_pages)):
        if _overlap(out, other):
            raise SpecError(f"out: expected memory apart from {name}, which the kernel reads while it writes")


@without_gradient
def copied(result: Tensor, out: Tensor) -> Tensor:
    """Returns out with a result in it."""
    return out if result is out else out.copy_(result)


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Returns whether the memory between the first and the last element of two tensors has a common part."""
    if not one.numel() or not other.numel():
        return False
    (first, end), (start, stop) = (_span(tensor) for tensor in (one, other))
    return first < stop and start < end


def _span(tensor: Tensor) -> tuple[int, int]:
    first = tensor.data_ptr()
    last = sum([(size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)])
    return first, first + (last + 1) * tensor.element_size()


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


observe.watch("torch", plan_call)
