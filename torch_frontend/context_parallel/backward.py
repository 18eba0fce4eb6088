"""The backward of one rank's part of a context-parallel call: explicit, from whole rows' output and log-sum-exp."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from attn_core.backends.shared.rewrites import sink_gradient
from attn_core.context_parallel import borders
from attn_core.context_parallel.borders import Border
from attn_core.context_parallel.on_torch.positions import Places, add_border
from attn_core.context_parallel.on_torch.rows import SavedRows, TileGradients, Total, tile_gradients
from attn_core.context_parallel.on_torch.tiles import TileRun
from attn_core.context_parallel.plan import ROUNDED_ONCE, Step, prefetch
from torch_frontend.context_parallel import exchange, forward
from torch_frontend.context_parallel.exchange import Keys, KVPair, PendingExchange
from torch_frontend.context_parallel.forward import Residuals
from torch_frontend.context_parallel.prepare import RankPlan

Tensor = torch.Tensor


class GroupGradients(NamedTuple):
    """The gradients of a head group's block, of which other ranks may still send a share.

    Attributes:
        dq: the total of this rank's queries.
        own: the totals of dk and dv from this rank's queries.
        pending: dk and dv from the other ranks' queries, under way; None if nothing is sent.
        borders: dk and dv of borders of the block, under way.
        wide: the dtype of sums that would be rounded more than once.
    """

    dq: Total
    own: list[Total]
    pending: PendingExchange[Any] | None
    borders: Sequence[tuple[Border, PendingExchange[KVPair]]] = ()
    wide: torch.dtype = torch.float32

    def wait(self) -> TileGradients:
        """Waits for the other ranks' share and adds it."""
        pair = [total.tensor() for total in self.own]
        if 1 + (self.pending is not None) + len(self.borders) > ROUNDED_ONCE:
            pair = [mine.to(self.wide) for mine in pair]
        if self.pending is not None:
            # Other ranks send as many places as the largest block has; this rank's block may have fewer.
            pair = [mine + other[:, : mine.shape[1]] for mine, other in zip(pair, self.pending.wait(), strict=True)]
        for border, arriving in self.borders:
            for mine, other in zip(pair, arriving.wait(), strict=True):
                add_border(mine, border, other)
        return TileGradients(self.dq.tensor(), *pair)


QueryGradients = list[tuple[Places, Tensor]]
"""Gradients of queries, each with its places."""


def _add_key_gradients(
    tiles: Sequence[TileRun], gradients: list[TileGradients], totals: Sequence[Total]
) -> QueryGradients:
    """Adds the tiles' dk and dv to the totals and frees them; returns dq with its places, to be added later."""
    # dk and dv first, because they are sent. dq stays here, and its sum can overlap the message.
    queries = []
    for tile in tiles:
        dq, *pair = gradients.pop(0)
        queries.append((tile.rows, dq))
        for total in totals:
            total.add(tile.key_sums, pair.pop(0))
    return queries


def _add_query_gradients(dq: Total, queries: QueryGradients) -> None:
    """Adds gradients of queries and frees them."""
    while queries:
        dq.add(*queries.pop(0))


def backward(
    plan: RankPlan, residuals: Sequence[Residuals], sinks: Tensor | None, dout: Tensor, dlse: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Returns (dq, dk, dv, dsinks) of a shard; dsinks is this rank's share of the sum over ranks."""
    call, dsinks = plan.call, None if sinks is None else torch.zeros_like(sinks)

    def start(group: int) -> tuple[Keys, PendingExchange[tuple[Tensor, Tensor | None]]]:
        """Starts the exchanges of a group's keys, unless the forward kept them, and of its dout and dlse."""
        saved = residuals[group]
        # The fields from 5 on are gathered_k and gathered_v, None unless the forward kept them.
        keys = Keys(plan, (saved.k, saved.v), [each for each in saved[5:] if each is not None])
        return keys, forward.start_rows(plan, group, dout, dlse)

    groups: list[GroupGradients] = []
    shards: list[PendingExchange[list[Tensor]]] = []
    for group, (keys, pending) in prefetch(call.head_groups, start):
        saved, (dout_rows, dlse_rows) = residuals[group], pending.wait()
        if dsinks is not None and sinks is not None:
            own = sink_gradient(forward.own_heads(plan, sinks, group), saved.out, saved.lse, dout_rows, dlse_rows)
            forward.own_heads(plan, dsinks, group).copy_(own)
        compute = _gathered_gradients if plan.gathers else _ring_gradients
        groups.append(compute(plan, saved, _steps(saved, keys, dout_rows, dlse_rows)))
        if plan.outer.size == 1:  # nothing is pending: start the exchange of heads before the next group computes
            shards.append(_start_shards(plan, groups.pop().wait(), saved.q.dtype))
        del keys, pending, dout_rows, dlse_rows
    shards += [_start_shards(plan, each.wait(), residuals[0].q.dtype) for each in groups]
    dq, dk, dv = (forward.join_groups(plan, each) for each in zip(*(each.wait() for each in shards), strict=True))
    if call.repeats > 1:  # the copies of a kv head lie side by side
        dk, dv = (each.unflatten(2, (-1, call.repeats)).sum(3).to(dq.dtype) for each in (dk, dv))
    return dq, dk, dv, dsinks


Steps = Iterator[tuple[Step, tuple[TileRun, ...], list[TileGradients]]]
"""Yields each step with its tiles' gradients, computed when the iterator reaches it."""


def _steps(saved: Residuals, keys: Keys, dout: Tensor, dlse: Tensor | None) -> Steps:
    rows = SavedRows(saved.q, saved.out, saved.lse, dout, dlse)
    for step, tiles, (k, v) in keys.blocks():
        gradients = [tile_gradients(tile, rows, k, v) for tile in tiles]
        del k, v  # free this block: the next two blocks will be in memory
        yield step, tiles, gradients


def _gathered_gradients(plan: RankPlan, saved: Residuals, steps: Steps) -> GroupGradients:
    """Computes a group's gradients from gathered keys. Sends each other rank the sum for its keys."""
    dq, own = _totals(plan, saved)
    places, pair = (plan.outer.size - 1) * plan.k_size, (saved.k, saved.v)
    pending: PendingExchange[list[Tensor]] | None = None
    for step, tiles, gradients in steps:
        if step.own:
            _add_query_gradients(dq, _add_key_gradients(tiles, gradients, own))
            continue
        # The message is made now, when the gathered keys are freed.
        sender = exchange.GradientSend(plan.outer, plan.k_size, pair, plan.sent_dtype)
        buffers = zip(pair, sender.buffers, strict=True)
        sent = [Total(block, places, plan.sent_dtype, buffer) for block, buffer in buffers]
        queries = _add_key_gradients(tiles, gradients, sent)
        sums = [total.tensor() for total in sent]
        sent.clear()
        # The sums may travel in the inputs' dtype. The gradients that arrive are added up in the wide one.
        pending = sender.send(sums, plan.lse_dtype)
        _add_query_gradients(dq, queries)  # overlaps the message just sent
    return GroupGradients(dq, own, pending)


def _ring_gradients(plan: RankPlan, saved: Residuals, steps: Steps) -> GroupGradients:
    """Computes a group's gradients in a ring.

    The gradients of a block travel one step behind the block, and home from the last rank that sees it. The gradients
    of a border go straight home. The gradients from a rank's own queries stay on the rank.
    """
    dq, own = _totals(plan, saved)
    later: QueryGradients = []
    # How far a block has moved in each step, and after the last one: it is home again.
    shifts = [*(step.shift for step, _ in plan.steps if step.moves), plan.outer.size]
    pending: PendingExchange[KVPair] | None = None
    of_borders: list[tuple[Border, PendingExchange[KVPair]]] = []
    for step, tiles, gradients in steps:
        if step.own:
            _add_query_gradients(dq, _add_key_gradients(tiles, gradients, own))
            continue
        # The first rank that sees a block starts its sum; the others add to the sum that arrived.
        if step.border is None and pending is not None:
            pair = pending.wait()
            sums = [Total.in_place(each) for each in pair]
        else:
            pair = _new_message(plan, saved, step)
            sums = [Total(each, each.shape[1], each.dtype, each) for each in pair]
        queries = _add_key_gradients(tiles, gradients, sums)
        for total in sums:
            total.tensor()  # zeros if this rank has no tile
        if step.border is not None:
            of_borders.append((step.border, pair.hop(plan.outer, -step.shift)))
        else:
            # The gradients follow their block, and the last hop brings them home.
            pending = pair.hop(plan.outer, shifts[shifts.index(step.shift) + 1] - step.shift)
        del pair, sums, total  # free this message before the next step's kernels run
        if dq.is_empty and own[0].is_empty:  # few queries, kept until the own step has written all
            later += queries
        else:
            _add_query_gradients(dq, queries)  # overlaps the message just sent
    _add_query_gradients(dq, later)
    return GroupGradients(dq, own, pending, of_borders, plan.lse_dtype)


def _new_message(plan: RankPlan, saved: Residuals, step: Step) -> KVPair:
    """Returns memory for the gradients of the keys that travel for a step of a ring."""
    places = plan.k_size if step.border is None else borders.size(step.border)
    shapes = [(block.shape[0], places, *block.shape[2:]) for block in (saved.k, saved.v)]
    return KVPair.empty(shapes, saved.k, plan.sent_dtype)


def _totals(plan: RankPlan, saved: Residuals) -> tuple[Total, list[Total]]:
    """Returns empty totals of dq, and of (dk, dv) of the own block."""
    dq = Total(saved.q, saved.q.shape[1], plan.q_dtype)
    return dq, [Total(block, block.shape[1], plan.own_dtype) for block in (saved.k, saved.v)]


def _start_shards(plan: RankPlan, gradients: TileGradients, dtype: torch.dtype) -> PendingExchange[list[Tensor]]:
    """Starts the exchange of dq, dk and dv back to shards ``[batch, shard, ranks, heads, dim]``.

    Copies of kv heads are not added up yet, so they keep the dtype of sums.
    """
    dq, *pair = gradients
    tensors = [dq.to(dtype), *(each if plan.call.repeats > 1 else each.to(dtype) for each in pair)]
    if plan.inner.size == 1:
        return PendingExchange.ready([each[:, :, None] for each in tensors] if plan.regroups else tensors)
    q_shard, k_shard = plan.call.plan.q_layout.shard, plan.call.plan.k_layout.shard
    places, shards = (plan.q_places, plan.k_places, plan.k_places), (q_shard, k_shard, k_shard)
    return exchange.positions_to_heads(plan.inner, tensors, places, shards)
