"""Eager paged calls by the table of prepared calls, see ``dispatch.prepared``."""

from __future__ import annotations

from collections.abc import Callable

import torch

from attn_core.backends.shared.torch_ranges import in_range
from attn_core.call.observe import ranges_enabled
from attn_core.call.options import requested_names
from attn_core.call.spec import PagedKV
from attn_core.call.tensors import PagedInputs
from attn_core.errors import note_call
from attn_core.paged.tables import FEW_ENTRIES, are_valid
from torch_frontend.dispatch import run_plan
from torch_frontend.dispatch.plan import Metadata
from torch_frontend.dispatch.prepared import Prepared, Request
from torch_frontend.paged.plan import PagedPlan, options_of, plan_call
from torch_frontend.paged.tables import check_values

Tensor = torch.Tensor
Run = Callable[..., tuple[Tensor, Tensor] | None]


def prepare_call(request: Request) -> Prepared | None:
    """Prepares a call of ``paged_attention`` without ranges, slopes, starts and a buffer.

    Its window must be plain, because the key has no types inside a pair.
    """
    return None if request.needs else prepare(request.entries, request.options, requested_names(request.requested))


def prepare(
    entries: tuple[Metadata | None, ...], options: tuple[object, ...], requested: tuple[str, ...] | None
) -> Prepared | None:
    """Prepares a call; None for one without keys or queries, and for one whose backend has no fast path for it.

    Args:
        entries: of q, k, v, block_table, seq_lens and sinks, or also of cu_seqlens_q, k_scales and v_scales. These are
            the arguments of ``run``, which returns (out, lse).
    """
    q, k, v, table, lengths, sinks, *others = entries
    cu, k_scales, v_scales = others or (None, None, None)
    assert q is not None
    if any(each is not None and each[1] is torch.int64 for each in (table, lengths, cu)):
        return None  # the general path casts them
    tensors = PagedInputs(q, k, v, table, lengths, cu, sinks, k_scales=k_scales, v_scales=v_scales)
    plan = plan_call(tensors, options_of(*options), requested)
    if plan.shortcut is None:
        return None
    on_host = q[2].type == "cpu"
    sizes = plan.spec.paged if on_host else None  # kernels on a GPU clamp the values of tables

    def in_ranges() -> Run:
        return _runner(plan, in_range(plan.shortcut, plan.range_name, ranges_enabled()), sizes)

    return Prepared(_runner(plan, plan.shortcut, sizes), in_ranges, "all" if on_host else None)


def prepare_rows(
    entries: tuple[Metadata | None, ...],
    options: tuple[object, ...],
    invariant: str | None,
    requested: tuple[str, ...] | None,
) -> Prepared | None:
    """Prepares, as ``prepare`` does, a call with equally many queries of each sequence.

    Args:
        entries: of q ``[batch, tokens, heads, head_dim]``, k, v, block_table, seq_lens and sinks. ``run`` takes q with
            its tokens end to end; with more than one token also cu_seqlens_q, None and None.
        options: from causal to return_lse.
    """
    q, *others = entries
    assert q is not None
    (batch, tokens, *heads), dtype, device = q
    queries = torch.Size((batch * tokens, *heads)), dtype, device
    if tokens == 1:
        return prepare((queries, *others), (*options, None, invariant), requested)
    offsets = torch.Size((batch + 1,)), torch.int32, device
    return prepare((queries, *others, offsets, None, None), (*options, tokens, invariant), requested)


def _runner(plan: PagedPlan, shortcut: Run, sizes: PagedKV | None) -> Run:
    """Returns what runs a plan by its backend's ``paged_shortcut``.

    Args:
        sizes: of the pool, against which each call checks its tables; None if the kernel clamps them.
    """
    fills = plan.spec.return_lse

    # more: cu_seqlens_q, k_scales and v_scales, for backends that take them.
    def run(
        q: Tensor, k: Tensor, v: Tensor, table: Tensor, lengths: Tensor, sinks: Tensor | None, *more: Tensor | None
    ) -> tuple[Tensor, Tensor] | None:
        if sizes is not None:
            if table.numel() > FEW_ENTRIES:  # numpy is faster from here on; it raises the error of a wrong entry
                check_values(None, 0, k, table, lengths, None)
            elif not are_valid(sizes, table.tolist(), lengths.tolist()):
                return None  # the general path raises the error
        try:
            results = shortcut(q, k, v, table, lengths, sinks, *more)
        except Exception as error:
            note_call(error, plan.range_name)
            raise
        if results is None or sinks is None or not fills:
            return results
        offsets = more[0] if more else None
        last = None if offsets is None else offsets[-1]  # rows behind it have no sequence
        # The log-sum-exp of a row that sees no key becomes its sink.
        return results[0], run_plan.fill_with_sinks(results[1], sinks, last)

    return run
