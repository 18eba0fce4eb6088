"""Eager paged calls: one lookup by metadata instead of many checks.

The checks that depend on metadata alone run once per plan. Types, ``requires_grad`` and, on a CPU, the values of tables
are checked on every call. Whatever this path does not know, it leaves to the general one, which accepts it or names it
in an error.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch.autograd import profiler

from attn_core.backends.shared.torch_ranges import in_range
from attn_core.call import counters, ranges
from attn_core.call.failed_calls import note_call
from attn_core.call.options import is_plain_window, requested_names
from attn_core.call.pages import PagedKV
from attn_core.paged.tables import FEW_ENTRIES, are_valid
from attn_core.selection import new_plans, override
from torch_frontend.dispatch import empty_rows, tensor_kinds
from torch_frontend.paged.plan import Metadata, options_of, plan_call
from torch_frontend.paged.tables import check_values

Tensor = torch.Tensor
_KINDS = frozenset((Tensor, torch.nn.Parameter))
_STRIDED, _is_grad_enabled, _requested, _ranges = (
    torch.strided,
    torch.is_grad_enabled,
    override.requested,
    ranges.enabled,
)


_NONE: tuple[Metadata | None, ...] = (None,) * 3


class SeenCall(NamedTuple):
    """A planned call: its backend's ``paged_shortcut``, and the sizes against which values of tables are checked.

    The sizes are None on a GPU, where kernels clamp the values.
    """

    run: Callable[..., tuple[Any, Any] | None]
    sizes: PagedKV | None
    range_name: str
    fills_sinks: bool = False
    """Whether the log-sum-exp of a row that sees no key becomes its sink."""


@lru_cache(maxsize=4096, typed=True)  # True and 1.0 are not 1
def seen_call(
    q_shape: torch.Size,
    k_shape: torch.Size,
    v_shape: torch.Size,
    table_shape: torch.Size,
    lengths_shape: torch.Size,
    q_dtype: torch.dtype,
    k_dtype: torch.dtype,
    v_dtype: torch.dtype,
    table_dtype: torch.dtype,
    lengths_dtype: torch.dtype,
    q_device: torch.device,
    k_device: torch.device,
    v_device: torch.device,
    table_device: torch.device,
    lengths_device: torch.device,
    sinks: Metadata | None,
    more: tuple[Metadata | None, ...],
    backend: str | tuple[str, ...] | None,
    *options: Any,
) -> SeenCall | None:
    """Plans a call as ``plan_call`` does; None for one without keys or queries. A flat key is compared faster.

    Args:
        more: of cu_seqlens_q, k_scales and v_scales.
        backend: the backends that the call's ``backend=`` or ``use_backend`` names.
        options: as ``options_of`` takes them. A window must be plain, because the key has no types inside a pair.
    """
    if q_device.type == "meta" or tensor_kinds.are_jit_traces_active() is not None:
        # The caller catches this and takes the general path: the sizes in a trace are tensors, and no cache key.
        raise TypeError("meta tensors and traces have no plan in this cache")
    if torch.int64 in (table_dtype, lengths_dtype) or any(each and each[1] is torch.int64 for each in more):
        return None  # the general path casts them
    new_plans.evicted(seen_call)
    tensors = (
        *((q_shape, q_dtype, q_device), (k_shape, k_dtype, k_device), (v_shape, v_dtype, v_device)),
        *((table_shape, table_dtype, table_device), (lengths_shape, lengths_dtype, lengths_device)),
    )
    cu, *others = more
    plan = plan_call((*tensors, cu, sinks, None, None, None, *others), options_of(*options), requested_names(backend))
    sizes = plan.spec.paged if q_device.type == "cpu" else None
    return None if plan.shortcut is None else SeenCall(plan.shortcut, sizes, plan.range_name, plan.spec.return_lse)


def attend(  # noqa: C901
    q: Any,
    k: Any,
    v: Any,
    table: Any,
    lengths: Any,
    sinks: Any,
    more: tuple[Any, ...],
    backend: Any,
    options: tuple[Any, ...],
) -> Any:
    """Returns out or (out, lse), as ``paged_attention`` does; None if the general path must run the call.

    Args:
        more: cu_seqlens_q, k_scales and v_scales.
        options: as ``options_of`` takes them, from the caller.
    """
    if not (type(q) is type(k) is type(v) is type(table) is type(lengths) is Tensor):
        return None
    if not (q.layout is k.layout is v.layout is table.layout is lengths.layout is _STRIDED):
        return None
    if type(options[1]) is tuple and not is_plain_window(options[1]):
        return None
    sinks_key = None
    try:
        if _is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
            return None
        if sinks is not None:
            if type(sinks) not in _KINDS or sinks.layout is not _STRIDED or torch._is_functional_tensor(sinks):
                return None
            if sinks.requires_grad and _is_grad_enabled():
                return None
            sinks_key = (sinks.shape, sinks.dtype, sinks.device)
        more_key = _NONE
        if not (more[0] is more[1] is more[2] is None):
            if not all([each is None or _is_plain(each) for each in more]):
                return None
            more_key = tuple([None if each is None else (each.shape, each.dtype, each.device) for each in more])
        if torch._is_functional_tensor(q) or torch._is_functional_tensor(k) or torch._is_functional_tensor(v):
            return None
        if q.is_cpu:
            for each in (q, k, v, table, lengths, q if sinks is None else sinks):
                if each.untyped_storage().nbytes() < each.nbytes and not tensor_kinds.fits_its_storage(each):
                    return None
        seen = seen_call(
            q.shape,
            k.shape,
            v.shape,
            table.shape,
            lengths.shape,
            q.dtype,
            k.dtype,
            v.dtype,
            table.dtype,
            lengths.dtype,
            q.device,
            k.device,
            v.device,
            table.device,
            lengths.device,
            sinks_key,
            more_key,
            _requested() if backend is None else backend,
            *options,
        )
    except Exception:  # a nested tensor has no shape; the general path raises the error again, or an earlier one
        return None
    if seen is None:
        return None
    results = run(seen, q, k, v, table, lengths, sinks, *(() if more_key is _NONE else more))
    return results if results is None or options[5] else results[0]


def run(
    seen: SeenCall, q: Tensor, k: Tensor, v: Tensor, table: Tensor, lengths: Tensor, sinks: Tensor | None, *more: Any
) -> tuple[Any, Any] | None:
    """Runs a planned call on tensors of its metadata; returns (out, lse), or None if the general path must run it.

    Args:
        more: nothing, or all of ``attend``'s.
    """
    shortcut, sizes, name, fills = seen
    if sizes is not None:
        if table.numel() > FEW_ENTRIES:
            check_values(None, 0, k, table, lengths, None)
        elif not are_valid(sizes, table.tolist(), lengths.tolist()):
            return None
    if profiler._is_profiler_enabled or _ranges():
        shortcut = in_range(shortcut, name, _ranges())
    try:
        results = shortcut(q, k, v, table, lengths, sinks, *more)
    except Exception as error:
        note_call(error, name)
        raise
    if results is None or sinks is None or not fills:
        return results
    last = more[0][-1] if more and more[0] is not None else None
    return results[0], empty_rows.fill_with_sinks(results[1], sinks, last)


def _is_plain(tensor: Any) -> bool:
    """Returns whether this is a dense tensor of no subclass that no transform or gradient is about."""
    plain = type(tensor) is Tensor and tensor.layout is _STRIDED and not torch._is_functional_tensor(tensor)
    return plain and not (tensor.requires_grad and _is_grad_enabled())


counters.watch("torch", seen_call)
