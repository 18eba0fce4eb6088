"""Index arrays that cut shards from a row, join them again, and order blocks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from attn_core.context_parallel.layout import Block, Layout, Run
from attn_core.context_parallel.plan import Plan
from attn_core.context_parallel.tiles import Tile


def positions(runs: Sequence[Run]) -> np.ndarray:
    """The positions of runs, place by place, int64."""
    parts = [run.start + run.stride * np.arange(run.count) for run in runs]
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


@lru_cache(maxsize=64)
def of_shards(layout: Layout) -> np.ndarray:
    """int64 ``[world, shard]``: the position at every place of every rank; ``layout.length`` at places without one."""
    table = np.full((layout.world, layout.shard), layout.length, np.int64)
    for rank, runs in enumerate(layout.runs):
        held = positions(runs)
        table[rank, : len(held)] = held
    return table


@lru_cache(maxsize=64)
def in_order(layout: Layout) -> np.ndarray:
    """int64 ``[length]``: the place of every position in all ranks' shards, end to end."""
    index = np.zeros(layout.length + 1, np.int64)
    flat = of_shards(layout).ravel()
    index[flat] = np.arange(len(flat))
    return index[: layout.length]


@lru_cache(maxsize=256)
def order(layout: Layout, block: Block) -> np.ndarray:
    """int64 ``[block.count]``: places of a block's positions in its ranks' shards, end to end in the order of ranks."""
    start = {rank: at * layout.shard for at, rank in enumerate(block.ranks)}
    places = in_order(layout)[positions(block.runs)]
    rank, place = places // layout.shard, places % layout.shard
    first = np.zeros(layout.world, np.int64)
    for name, at in start.items():
        first[name] = at
    return first[rank] + place


@lru_cache(maxsize=256)
def in_blocks(blocks: tuple[Block, ...], size: int, block: Block) -> np.ndarray:
    """int64 ``[block.count]``: places of its positions in blocks end to end, each padded to ``size`` places."""
    held = [positions(each.runs) for each in blocks]
    index = np.zeros(max((int(part.max()) + 1 for part in held if len(part)), default=0), np.int64)
    for at, part in enumerate(held):
        index[part] = at * size + np.arange(len(part))
    return index[positions(block.runs)]


def among_all(plan: Plan, part: int) -> np.ndarray:
    """int64: places of the other parts' keys in the gathered buffer: all blocks end to end, each padded to its ranks'
    shards. With two parts the buffer holds only the other part's block."""
    assert plan.others is not None
    blocks = plan.k_blocks if plan.outer > 2 else plan.k_blocks[1 - part : 2 - part]
    return in_blocks(blocks, plan.inner * plan.k_layout.shard, plan.others[part])


def held_positions(layout: Layout, documents: tuple[int, ...] | None) -> np.ndarray:
    """int32 ``[world, shard]``: the position (in its row, or in its document) at every place; 0 if none."""
    table = of_shards(layout)
    held = table < layout.length
    if documents is not None:
        starts = np.asarray(documents)
        table = table - starts[np.searchsorted(starts[1:-1], table, side="right")]
    return np.where(held, table, 0).astype(np.int32)


def spans(ranges: Sequence[Sequence[int]]) -> np.ndarray:
    """Ranges ``[start, stop)`` of places as one index array."""
    return np.concatenate([np.arange(start, stop) for start, stop in ranges])


def of_tile(tile: Tile) -> tuple[np.ndarray, np.ndarray]:
    """Places of a tile's queries and keys in their blocks."""
    return spans([segment[:2] for segment in tile.segments]), spans([segment[2:] for segment in tile.segments])


def slices(index: np.ndarray, limit: int) -> list[tuple[int, int]] | None:
    """An index array as contiguous ranges ``[start, stop)``; None if it takes more than ``limit`` ranges."""
    if not len(index):
        return []
    breaks = np.flatnonzero(np.diff(index) != 1) + 1
    if len(breaks) >= limit:
        return None
    starts = np.concatenate([[0], breaks])
    stops = np.concatenate([breaks, [len(index)]])
    return [(int(index[start]), int(index[stop - 1]) + 1) for start, stop in zip(starts, stops, strict=True)]
