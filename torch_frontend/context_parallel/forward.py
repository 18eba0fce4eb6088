"""The forward of one rank's part of a context-parallel call, exchanges included."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from attn_core.backends.shared.rewrites import with_sinks
from attn_core.context_parallel import borders
from attn_core.context_parallel.call import keeps_borders, keeps_gathered
from attn_core.context_parallel.on_torch import rows
from attn_core.context_parallel.plan import prefetch
from torch_frontend.context_parallel import exchange
from torch_frontend.context_parallel.exchange import Keys, PendingExchange
from torch_frontend.context_parallel.prepare import RankPlan

Tensor = torch.Tensor


class Residuals(NamedTuple):
    """A head group's tensors that its backward needs, in this rank's block: ``[batch, places, heads, dim]``.

    ``gathered_k`` and ``gathered_v`` are the keys and values of all ranks, or of all borders, if they are kept.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    gathered_k: Tensor | None = None
    gathered_v: Tensor | None = None


def forward(
    plan: RankPlan, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *, with_lse: bool, keep: bool
) -> tuple[list[Tensor], list[Residuals]]:
    """Returns ([out] or [out, lse], the residuals of each head group), as shards.

    Args:
        q, k, v: shards ``[batch, shard, heads, dim]``.
        keep: whether there will be a backward; else there are no residuals.
    """
    keep_gathered = keep and plan.keeps  # without a backward nobody reads the gathered keys again

    def start(group: int) -> tuple[PendingExchange[list[Tensor]], Keys | None]:
        """Starts the exchange of a group's heads. If there is none, k and v are here, and their gather starts."""
        pending = _start_block(plan, q, k, v, group)
        return pending, Keys(plan, pending.wait()[1:], keep=keep_gathered) if plan.inner.size == 1 else None

    residuals, results = [], []
    for group, (pending, keys) in prefetch(plan.call.head_groups, start):
        block = pending.wait()
        keys = keys or Keys(plan, block[1:], keep=keep_gathered)
        out, lse = _attend(plan, block, keys)
        if sinks is not None:
            # Once for whole rows, because each tile would count the sink again.
            out, lse = with_sinks(out, lse, own_heads(plan, sinks, group))
        out = out.to(q.dtype)
        if keep:
            residuals.append(Residuals(*block, out, lse, *keys.gathered))  # type: ignore[call-arg]
        results.append(_start_results(plan, out, lse if with_lse else None))
        del pending, block, keys, out, lse  # free them before the next group computes
    shards = [join_groups(plan, each) for each in zip(*(each.wait() for each in results), strict=True)]
    if with_lse:
        if plan.regroups:
            shards[1] = shards[1][..., 0].transpose(1, 2)  # [batch, shard, heads, 1] -> [batch, heads, shard]
        if plan.query_count < shards[1].shape[2]:
            # Exchanges fill places without a position with 0; a log-sum-exp without keys is -inf.
            shards[1][:, :, plan.query_count :] = -torch.inf
    return shards, residuals


def join_groups(plan: RankPlan, groups: Sequence[Tensor]) -> Tensor:
    """Returns ``[batch, shard, ranks, heads of a group, dim]`` of every group as ``[batch, shard, heads, dim]``.

    If the plan does not regroup heads, there is one group, which is ``[batch, shard, heads, dim]`` already.
    """
    if not plan.regroups:
        return groups[0]
    return (torch.cat(list(groups), 3) if len(groups) > 1 else groups[0]).flatten(2, 3)


def _start_block(plan: RankPlan, q: Tensor, k: Tensor, v: Tensor, group: int) -> PendingExchange[list[Tensor]]:
    """Starts the exchange of a group's heads; returns q, k and v of this rank's block."""
    tensors = [group_heads(plan, tensor, group, kv=at > 0) for at, tensor in enumerate((q, k, v))]
    if plan.inner.size == 1:
        return PendingExchange.ready(tensors)
    return exchange.heads_to_positions(plan.inner, tensors, (plan.q_places, plan.k_places, plan.k_places))


def group_heads(plan: RankPlan, tensor: Tensor, group: int, *, kv: bool) -> Tensor:
    """Returns the heads of one group, kv heads with their copies.

    They are ``[batch, shard, heads, dim]``, or ``[batch, shard, ranks, heads of one, dim]`` if ranks exchange heads.
    """
    if not plan.regroups:
        return tensor
    call = plan.call
    if kv and call.repeats > 1:
        tensor = tensor.repeat_interleave(call.repeats, 2)
    tensor = tensor.unflatten(2, (plan.inner.size, call.head_groups, -1))[:, :, :, group]
    return tensor if plan.inner.size > 1 else tensor[:, :, 0]


def own_heads(plan: RankPlan, vector: Tensor, group: int) -> Tensor:
    """Returns the entries of a vector ``[heads]`` for the heads that this rank computes in a group, as a view."""
    return vector.unflatten(0, (plan.inner.size, plan.call.head_groups, -1))[plan.inner.rank, group]


def _attend(plan: RankPlan, block: Sequence[Tensor], keys: Keys) -> tuple[Tensor, Tensor]:
    """Returns (out ``[batch, places, heads, value_dim]`` in the dtype of sums, lse ``[batch, heads, places]``)."""
    dtypes = {"dtype": plan.q_dtype, "lse_dtype": plan.lse_dtype}
    return rows.attend(keys.blocks(), block[0], block[2].shape[3], covered=plan.covered, **dtypes)


def _start_results(plan: RankPlan, out: Tensor, lse: Tensor | None) -> PendingExchange[list[Tensor]]:
    """Starts the exchange of a group's results; returns ``[batch, shard, ranks, heads, dim]`` of out and any lse.

    If the plan does not regroup heads, they are returned as they are.
    """
    if not plan.regroups:
        return PendingExchange.ready([out] if lse is None else [out, lse])
    tensors = [out] if lse is None else [out, lse.transpose(1, 2)[..., None]]  # lse as [batch, places, heads, 1]
    if plan.inner.size == 1:
        return PendingExchange.ready([tensor[:, :, None] for tensor in tensors])
    count, shard = len(tensors), plan.call.plan.q_layout.shard
    return exchange.positions_to_heads(plan.inner, tensors, [plan.q_places] * count, [shard] * count)


def start_rows(
    plan: RankPlan, group: int, rows: Tensor, by_head: Tensor | None
) -> PendingExchange[tuple[Tensor, Tensor | None]]:
    """Starts the exchange of a group's heads of results, or of their gradients; returns both in this rank's block.

    Args:
        rows: ``[batch, shard, heads, dim]``.
        by_head: ``[batch, heads, shard]``, or None.
    """
    if not plan.regroups:
        return PendingExchange.ready((rows, by_head))
    tensors = [rows] if by_head is None else [rows, by_head.transpose(1, 2)[..., None]]  # [batch, shard, heads, 1]
    parts = [group_heads(plan, tensor, group, kv=False) for tensor in tensors]
    pending = PendingExchange.ready(parts)
    if plan.inner.size > 1:
        pending = exchange.heads_to_positions(plan.inner, parts, [plan.q_places] * len(parts))

    def unpack(_: list[Tensor]) -> tuple[Tensor, Tensor | None]:
        block, *rest = pending.wait()
        return block, rest[0][..., 0].transpose(1, 2) if rest else None

    return PendingExchange([], unpack)


def recompute_residuals(plan: RankPlan, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> list[Residuals]:
    """Returns the residuals of a forward from its shards and results; exchanges heads again."""
    residuals = []
    for group in range(plan.call.head_groups):
        block = _start_block(plan, q, k, v, group).wait()
        residuals.append(Residuals(*block, *start_rows(plan, group, out, lse).wait()))  # type: ignore[call-arg]
    return residuals


def nan_residuals(plan: RankPlan, q: Tensor, k: Tensor, v: Tensor) -> Residuals:
    """Returns residuals of one head group as an eager forward saves them, with NaN as their numbers."""
    parts, part, (heads, kv_heads) = plan.call.plan, plan.outer.rank, plan.call.heads
    shared = plan.inner.size > 1
    rows = parts.q_blocks[part].count if shared else q.shape[1]
    keys = parts.k_blocks[part].count if shared else k.shape[1]

    def nan(places: int, heads: int, width: int) -> Tensor:
        return q.new_full((q.shape[0], places, heads, width), torch.nan)

    lse = q.new_full((q.shape[0], heads, rows), torch.nan, dtype=plan.lse_dtype)
    out, widths = nan(rows, heads, v.shape[3]), (k.shape[3], v.shape[3])
    gathered = [None, None]
    if keeps_gathered(plan.call.spec, parts):
        gathered = [nan(plan.outer.size * plan.k_size, kv_heads, width) for width in widths]  # type: ignore[misc]
    elif keeps_borders(plan.call.spec, parts):
        places = sum(borders.size(step.border) for step, _ in plan.steps if step.border is not None)
        gathered = [nan(places, kv_heads, width) for width in widths]  # type: ignore[misc]
    own = (nan(keys, kv_heads, width) for width in widths)
    return Residuals(nan(rows, heads, q.shape[3]), *own, out, lse, *gathered)  # type: ignore[call-arg]
