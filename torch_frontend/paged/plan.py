"""Plans a paged call: checks its arguments, puts its tables on the right device and chooses a backend."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch

from attn_core import backends
from attn_core.backends.shared.torch_ranges import in_range, is_on
from attn_core.call import counters
from attn_core.call.failed_calls import note_call
from attn_core.call.options import Options, check_traced_options, is_plain_window
from attn_core.call.pages import PagedKV
from attn_core.call.ranges import enabled, range_name
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import PagedInputs
from attn_core.errors import DTypeError, SpecError
from attn_core.paged import arguments
from attn_core.paged import tables as paged_tables
from attn_core.paged.scales import check_scale_values
from attn_core.selection import Target, new_plans, override, select
from torch_frontend.dispatch import empty_rows, offsets, plan, tensor_kinds
from torch_frontend.dispatch.run_plan import check_key_ranges
from torch_frontend.dispatch.wrappers import on_device
from torch_frontend.paged.key_ranges import ranges_of

Tensor = torch.Tensor
Metadata = tuple[torch.Size, torch.dtype, torch.device]


class PagedPlan(NamedTuple):
    """A checked paged call with the functions of its backend."""

    spec: AttentionSpec
    range_name: str
    forward: Any
    shortcut: Any = None
    """The backend's fast path, see ``contract.paged_shortcut``; None with ``cu_seqlens_q`` and for an empty call."""


@lru_cache(maxsize=4096)
def plan_call(metadata: tuple[Metadata | None, ...], options: Options, requested: tuple[str, ...] | None) -> PagedPlan:
    """Checks a paged call and chooses its backend; results are cached."""
    new_plans.evicted(plan_call)
    selection = select(*request(metadata, options, requested))
    new_plans.selected(selection)
    module = backends.load(selection.backend or "", selection.target.kind)
    assert metadata[0] is not None
    name = range_name(selection.backend or "", selection.spec, "forward")
    if selection.spec.empty:
        return PagedPlan(selection.spec, name, plan.empty_forward)
    plain = selection.spec.paged.dtype is metadata[5] is metadata[7] is None  # type: ignore[union-attr]
    shortcut = backends.paged_shortcut(module, selection.spec) if plain else None
    forward, shortcut = (on_device(function, metadata[0][2]) for function in (module.forward, shortcut))
    return PagedPlan(selection.spec, name, forward, shortcut)


def request(
    metadata: tuple[Metadata | None, ...], options: Options, requested: tuple[str, ...] | None
) -> tuple[AttentionSpec, Target, tuple[str, ...] | None]:
    """Returns the arguments of ``select``: the spec, the target and the requested backends."""
    spec = arguments.build_spec(arguments.PagedArrays(*(entry and plan.facts(*entry) for entry in metadata)), options)  # type: ignore[arg-type]
    device = metadata[0][2] if metadata[0] else torch.device("cpu")
    return spec, Target.here("torch", plan.device_name(device)), requested


def metadata(inputs: PagedInputs) -> tuple[Metadata | None, ...]:
    """Returns (shape, dtype, device) of every tensor, None for an absent one."""
    return tuple(None if t is None else (t.shape, t.dtype, t.device) for t in inputs)


def options_of(
    causal: Any, window: Any, softcap: Any, scale: Any, deterministic: Any, return_lse: Any, max_len_q: Any
) -> Options:
    """Returns the options of a paged call, checked unless they may be symbols."""
    if torch.compiler.is_compiling():
        numbers = (softcap, scale, max_len_q, None, 0.0)
        options = Options(causal, "bottom_right", window, *numbers, deterministic, return_lse)
        return check_traced_options(options)
    # The key of the cache has the types of arguments, but not of a pair's entries. (True, 0) would find (1, 0).
    check = _checked if is_plain_window(window) else arguments.check_paged_options
    try:
        return check(causal, window, softcap, scale, deterministic, return_lse, max_len_q)
    except TypeError:  # unhashable: a list as window, or an invalid value that the uncached check names
        return arguments.check_paged_options(causal, window, softcap, scale, deterministic, return_lse, max_len_q)


# typed, so that True and 1.0 do not hit the entry of 1
_checked = lru_cache(maxsize=1024, typed=True)(arguments.check_paged_options)


def gather_arguments(
    q: Any,
    k_pages: Any,
    v_pages: Any,
    block_table: Any,
    seq_lens: Any,
    cu_seqlens_q: Any,
    sinks: Any,
    max_len_q: Any,
    key_ranges: Any,
    k_scales: Any = None,
    v_scales: Any = None,
) -> PagedInputs:
    """Returns the arguments as PagedInputs on one device; ``run`` checks the values of tables on the CPU."""
    _check_floats(q, k_pages, v_pages, sinks, k_scales, v_scales)
    tensor_kinds.check_data(
        q,
        k_pages=k_pages,
        v_pages=v_pages,
        sinks=sinks,
        block_table=block_table,
        seq_lens=seq_lens,
        cu_seqlens_q=cu_seqlens_q,
        key_ranges=key_ranges,
        k_scales=k_scales,
        v_scales=v_scales,
    )
    tables = tables_of(q, k_pages, max_len_q, block_table, seq_lens, cu_seqlens_q)
    ranges, scales = ranges_of(q, key_ranges), {"k_scales": k_scales, "v_scales": v_scales}
    return PagedInputs(q, k_pages, v_pages, *tables, sinks=sinks, key_ranges=ranges, **scales)


def _check_floats(q: Any, k_pages: Any, v_pages: Any, sinks: Any, k_scales: Any, v_scales: Any) -> None:
    """Checks the types of the tensors of numbers, and that none requires a gradient."""
    optional = {"sinks": sinks, "k_scales": k_scales, "v_scales": v_scales}
    for name, tensor in ({"q": q, "k_pages": k_pages, "v_pages": v_pages} | optional).items():
        if tensor is not None or name not in optional:
            plan.check_tensor(name, tensor)
            check_no_gradient(name, tensor)


def check_no_gradient(name: str, tensor: Tensor) -> None:
    """Raises SpecError for a tensor that requires a gradient, because paged attention has no backward."""
    if tensor.requires_grad and torch.is_grad_enabled():
        raise SpecError(
            f"{name}: expected requires_grad=False, keys and values in pages are for inference; use torch.no_grad()"
        )


def tables_of(q: Tensor, k_pages: Tensor, max_len_q: int | None, *tables: Any) -> tuple[Any, Any, Any]:
    """Returns block_table, seq_lens and cu_seqlens_q as tensors.

    Checks the values of numpy tables and copies them to q's device. Clamps offsets on a GPU, so that no kernel can read
    out of bounds.
    """
    names = ("block_table", "seq_lens", "cu_seqlens_q")
    for name, table in zip(names[:2], tables):
        # Only cu_seqlens_q may be None; check_tensor names the other.
        if table is None:
            plan.check_tensor(name, table)
    if all(table is None or isinstance(table, np.ndarray) for table in tables):
        # On a CPU, `run` and `append` check the values of all tables later, whatever their type.
        if q.device.type != "cpu":
            check_values(max_len_q, q.shape[0], k_pages, *tables)
        _check_kinds(names, tables)
        return tuple(None if t is None else torch.from_numpy(t).to(q.device) for t in tables)  # type: ignore[return-value]
    for name, table in zip(names, tables, strict=True):
        if table is not None:
            plan.check_tensor(name, table)
    block_table, seq_lens, cu = tables
    if cu is not None and not cu.is_cpu and cu.dtype == torch.int32 and cu.dim() == 1 and q.dim() == 3:
        cu = offsets.clamp(cu, q.shape[0])
    return block_table, seq_lens, cu


def op_tables(q: Tensor, *tables: Any) -> tuple[Any, Any, Any]:
    """Returns the tables of a call that becomes one op, in the form that ops accept together with q."""
    for name, table in zip(("block_table", "seq_lens", "cu_seqlens_q"), tables, strict=True):
        if not isinstance(table, np.ndarray) and (table is not None or name != "cu_seqlens_q"):
            plan.check_tensor(name, table)
    named = dict(zip(("block_table", "seq_lens", "cu_seqlens_q"), tables, strict=True))
    _check_kinds(tuple(named), tables)
    tensor_kinds.check_data(q, **named)
    return tuple(tensor_kinds.to_device_of(q, t) if isinstance(t, np.ndarray) else t for t in tables)  # type: ignore[return-value]


def check_op(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    tables: tuple[Any, ...],
    sinks: Tensor | None,
    key_ranges: Any,
    options: Options,
    scales: tuple[Any, Any] = (None, None),
) -> tuple[tuple[Any, Any, Any], Any]:
    """Checks the arguments of a call that becomes one op, if its sizes are ints.

    Returns:
        (``op_tables``, key_ranges in the same form).
    """
    _check_floats(q, k_pages, v_pages, sinks, *scales)
    ranges = ranges_of(q, key_ranges)
    tensor_kinds.check_data(q, key_ranges=ranges)
    tensors = op_tables(q, *tables)
    scaled = dict(zip(("k_scales", "v_scales"), scales, strict=True))
    entries = metadata(PagedInputs(q, k_pages, v_pages, *tensors, sinks=sinks, key_ranges=ranges, **scaled))
    if all(type(size) is int for entry in entries if entry for size in entry[0]):
        arguments.build_spec(arguments.PagedArrays(*(entry and plan.facts(*entry) for entry in entries)), options)  # type: ignore[arg-type]
    return tensors, ranges


def _check_kinds(names: tuple[str, ...], tables: tuple[Any, ...]) -> None:
    """Raises DTypeError for a numpy array of a dtype that no tensor has, such as dates."""
    for name, table in zip(names, tables):
        if isinstance(table, np.ndarray) and table.dtype.kind not in "biufc":
            raise DTypeError(f"{name}: expected dtype int32, got {table.dtype}")


def check_values(
    max_len_q: int | None,
    tokens: int,
    pages: Tensor,
    block_table: Any,
    seq_lens: Any,
    cu: Any,
    *,
    writes: bool = False,
) -> None:
    """Checks the values of tables on the host. ``build_spec`` raises for wrong shapes and dtypes."""
    block_table, seq_lens, cu = (None if table is None else np.asarray(table) for table in (block_table, seq_lens, cu))
    if block_table.ndim != 2 or seq_lens.shape != block_table.shape[:1] or pages.dim() != 4:
        return
    if cu is not None and cu.shape != (len(seq_lens) + 1,):
        return
    paged = PagedKV(num_pages=pages.shape[0], page_size=pages.shape[1], width=block_table.shape[1])
    paged_tables.check_values(paged, tokens, max_len_q, block_table, seq_lens, cu, writes=writes)


def run(inputs: PagedInputs, options: Options, requested: tuple[str, ...] | None) -> tuple[Tensor, Tensor]:
    """Plans and runs a paged call; returns (out, lse)."""
    # use_backend is read here, because in compiled code this runs inside the op.
    call_plan = plan_call(metadata(inputs), options, requested or override.requested())
    if inputs.q.device.type == "cpu":
        check_values(options.max_len_q, call_plan.spec.q_len, inputs.k, *inputs[3:6])
        check_key_ranges(call_plan.spec, inputs.key_ranges)
        if inputs.k_scales is not None and call_plan.spec.paged is not None:
            scales = {name: getattr(inputs, name).numpy() for name in ("k_scales", "v_scales")}
            check_scale_values(scales, call_plan.spec.paged, inputs.block_table.numpy(), inputs.seq_lens.numpy())
    forward = call_plan.forward
    if is_on() and not call_plan.spec.empty:
        forward = in_range(forward, call_plan.range_name, enabled())
    try:
        out, lse = forward(call_plan.spec, inputs)
    except Exception as error:
        note_call(error, call_plan.range_name)
        raise
    cu = inputs.cu_seqlens_q
    # Kernels leave the rows behind the last offset unwritten, and the host does not know the last offset.
    out, lse = offsets.clear_tail(out, lse, cu) if cu is not None and not cu.is_cpu else (out, lse)
    if inputs.sinks is None or not options.return_lse:
        return out, lse
    return out, empty_rows.fill_with_sinks(lse, inputs.sinks, None if cu is None else cu[-1])


counters.watch("torch", plan_call)
