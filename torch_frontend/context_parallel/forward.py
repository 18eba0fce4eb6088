"""The forward of one rank's part of a context-parallel call, exchanges included."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from attn_core.backends.shared.rewrites import with_sinks
from attn_core.call.tensors import Inputs
from attn_core.context_parallel.on_torch import step
from attn_core.context_parallel.on_torch.places import Places
from torch_frontend.context_parallel import exchange
from torch_frontend.context_parallel.keys import Keys, blocks, keys_of
from torch_frontend.context_parallel.program import TileCall, Work

Tensor = torch.Tensor


class Residuals(NamedTuple):
    """What a group's backward needs of its forward, as the kernels saw it; ``all_k`` and ``all_v`` if they are kept."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    all_k: Tensor | None = None
    all_v: Tensor | None = None


def forward(
    work: Work, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *, with_lse: bool, keep: bool
) -> tuple[list[Tensor], list[Residuals]]:
    """([out ``[batch, shard, heads, value_dim]``] or [out, lse ``[batch, heads, shard]``], residuals of each group).

    Args:
        q, k, v: shards ``[batch, shard, heads, dim]``.
        keep: whether there will be a backward; else there are no residuals.
    """
    arriving = (_exchanged(work, q, k, v, group) for group in range(work.program.call.head_groups))
    saved, returns = [], []
    for group, (mine, keys) in one_ahead(arriving):
        keys, kept = keys.kept() if keep and work.program.call.keeps_gathered else (keys, [])
        out, lse = _attend(work, mine, keys)
        if sinks is not None:
            out, lse = with_sinks(out, lse, of_heads(work, sinks, group))
        out = out.to(q.dtype)
        if keep:
            q_rows, k_rows, v_rows = mine
            saved.append(Residuals(q_rows, k_rows, v_rows, out, lse, *kept))
        returns.append(_returned(work, out, lse if with_lse else None))
        del mine, keys, kept, out, lse
    results = [of_all_heads(list(each)) for each in zip(*(wait() for wait in returns), strict=True)]
    if with_lse:
        results[1] = results[1][..., 0].transpose(1, 2)  # [batch, shard, heads, 1] -> [batch, heads, shard]
        results[1][:, :, count_of_queries(work) :] = -torch.inf
    return results, saved


def count_of_queries(work: Work) -> int:
    """The number of places of this rank's shard of q that hold a position; they come first."""
    return work.program.call.plan.q_layout.position_count(work.outer.rank * work.inner.size + work.inner.rank)


def of_all_heads(groups: list[Tensor]) -> Tensor:
    """``[batch, shard, ranks, heads of a group, dim]`` of every group as ``[batch, shard, heads, dim]``."""
    return (torch.cat(groups, 3) if len(groups) > 1 else groups[0]).flatten(2, 3)


def one_ahead(makers: Iterator[Callable[[], object]]) -> Iterator:
    """Yields results in order; starts exchange i + 1 before it waits for exchange i."""
    ahead = next(makers, None)
    group = 0
    while ahead is not None:
        following = next(makers, None)
        result, ahead = ahead(), following
        yield group, result
        del result  # free the received tensors before the next exchange starts
        group += 1


def _exchanged(work: Work, q: Tensor, k: Tensor, v: Tensor, group: int) -> Callable[[], tuple[list[Tensor], Keys]]:
    """Starts a group's exchanges; the result waits for q, k, v of this rank's block and for the keys it attends to."""
    received = _of_block(work, q, k, v, group)
    if work.inner.size == 1:
        mine = received()
        keys = keys_of(work, mine[1:])
        return lambda: (mine, keys)

    def wait() -> tuple[list[Tensor], Keys]:
        mine = received()
        return mine, keys_of(work, mine[1:])

    return wait


def _of_block(work: Work, q: Tensor, k: Tensor, v: Tensor, group: int) -> exchange.Waiting:
    """Starts the exchange of a group's heads; the result waits for q, k and v of this rank's block."""
    tensors = [group_of(work, tensor, group, kv=at > 0) for at, tensor in enumerate((q, k, v))]
    if work.inner.size == 1:
        return lambda: tensors
    return exchange.heads_to_positions(work.inner, tensors, held(work))


def held(work: Work) -> tuple[Places, Places, Places]:
    """Where the positions of q, k and v are in the shards of this part's ranks; one object if they are the same."""
    program, plan = work.program, work.program.call.plan
    keys = program.q_held if plan.q_layout is plan.k_layout else program.k_held
    return program.q_held, keys, keys


def group_of(work: Work, tensor: Tensor, group: int, *, kv: bool) -> Tensor:
    """The heads of one group, kv heads with their copies: ``[batch, shard, heads, dim]``; if ranks exchange heads,
    ``[batch, shard, ranks, heads of one, dim]``."""
    call = work.program.call
    if kv and call.repeats > 1:
        tensor = tensor.repeat_interleave(call.repeats, 2)
    tensor = tensor.unflatten(2, (work.inner.size, call.head_groups, -1))[:, :, :, group]
    return tensor if work.inner.size > 1 else tensor[:, :, 0]


def of_heads(work: Work, vector: Tensor, group: int) -> Tensor:
    """The entries ``[heads]`` of the heads that this rank computes in a group."""
    return vector.unflatten(0, (work.inner.size, work.program.call.head_groups, -1))[work.inner.rank, group]


def _attend(work: Work, mine: Sequence[Tensor], keys: Keys) -> tuple[Tensor, Tensor]:
    """(out ``[batch, places, heads, value_dim]``, lse ``[batch, heads, places]``) of a group, in the dtype of sums."""
    program, q, v = work.program, mine[0], mine[2]
    wide = getattr(torch, program.call.spec.lse_dtype)
    batch, rows, heads = q.shape[:3]
    shape = (batch, rows, heads, v.shape[3])
    new, summed = q.new_empty if program.covered else q.new_zeros, summed_in(work, q, wide)
    out = lse = None
    for _, runs, (k, v) in blocks(work, keys):
        for run in runs:
            part = run.plan.forward(run.plan.spec, inputs_of(run, q, k, v))
            part_out, part_lse = (tensor[None] for tensor in part) if run.plan.spec.packed else part
            if out is None and run.q.is_whole(rows):
                out, lse = part_out.to(summed), part_lse
                continue
            if out is None or lse is None:
                out, lse = new(shape, dtype=summed), q.new_full((batch, heads, rows), -torch.inf, dtype=wide)
            step.merge_tile(run.q, out, lse, part_out, part_lse, first=run.first)
            del part, part_out, part_lse
        del k, v  # free this block: the next two blocks will be in memory
    if out is None or lse is None:  # no key is visible
        return q.new_zeros(shape), q.new_full((batch, heads, rows), -torch.inf, dtype=wide)
    return out, lse


def summed_in(work: Work, q: Tensor, wide: torch.dtype) -> torch.dtype:
    """The dtype in which a query's results are added up."""
    return wide if work.program.rows_wide else q.dtype


def inputs_of(run: TileCall, q: Tensor, k: Tensor, v: Tensor) -> Inputs:
    """A tile's operands, taken from a block."""
    return step.tile_inputs(run.q.take(q), run.k.take(k), run.k.take(v), run.cu_seqlens)


def _returned(work: Work, out: Tensor, lse: Tensor | None) -> Callable[[], list[Tensor]]:
    """Starts the exchange of a group's results; waits for ``[batch, shard, ranks, heads, dim]`` of out and any lse."""
    if lse is not None:
        lse = lse.transpose(1, 2)[..., None]  # [batch, heads, places] -> [batch, places, heads, 1]
    if work.inner.size == 1:
        return lambda: [tensor[:, :, None] for tensor in (out, lse) if tensor is not None]
    places, shard = work.program.q_held, work.program.call.plan.q_layout.shard
    waits = [
        exchange.positions_to_heads(work.inner, [tensor], [places], [shard])
        for tensor in (out, lse)
        if tensor is not None
    ]
    return lambda: [part for received in waits for part in received()]


def again(work: Work, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> list[Residuals]:
    """The residuals of a forward from its shards and results; exchanges heads again."""
    saved = []
    for group in range(work.program.call.head_groups):
        mine = _of_block(work, q, k, v, group)()
        results = [group_of(work, each, group, kv=False) for each in (out, lse.transpose(1, 2)[..., None])]
        if work.inner.size > 1:
            waits = [exchange.heads_to_positions(work.inner, [each], [work.program.q_held]) for each in results]
            results = [part for received in waits for part in received()]
        q_rows, k_rows, v_rows = mine
        saved.append(Residuals(q_rows, k_rows, v_rows, results[0], results[1][..., 0].transpose(1, 2)))
    return saved
