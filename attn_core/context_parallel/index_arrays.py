"""Index arrays that cut shards out of a row, join them again, and order the positions of blocks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from attn_core.context_parallel.layout import Block, Layout, Run
from attn_core.context_parallel.plan import ContextPlan
from attn_core.context_parallel.tiles import Tile

MAX_RANGES = 16
"""The most contiguous ranges that are copied one by one; more ranges are copied by an index array."""


def positions(runs: Sequence[Run]) -> np.ndarray:
    """Returns the positions of runs, place by place, int64."""
    parts = [run.start + run.stride * np.arange(run.count) for run in runs]
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


@lru_cache(maxsize=64)
def positions_by_shard(layout: Layout) -> np.ndarray:
    """Returns int64 ``[world, shard]``: the position at every place; ``layout.length`` at places without a position."""
    table = np.full((layout.world, layout.shard), layout.length, np.int64)
    for rank, runs in enumerate(layout.runs):
        of_rank = positions(runs)
        table[rank, : len(of_rank)] = of_rank
    return table


@lru_cache(maxsize=64)
def places_by_position(layout: Layout) -> np.ndarray:
    """Returns int64 ``[length]``: the place of every position in all ranks' shards, end to end."""
    # One entry more than positions: it takes the writes of places that hold no position, and is cut off.
    index = np.zeros(layout.length + 1, np.int64)
    flat = positions_by_shard(layout).ravel()
    index[flat] = np.arange(len(flat))
    return index[: layout.length]


@lru_cache(maxsize=256)
def places_of_block(layout: Layout, block: Block) -> np.ndarray:
    """Returns int64 ``[block.count]``: the places of a block's positions in its ranks' shards, end to end."""
    places = places_by_position(layout)[positions(block.runs)]
    rank, place = places // layout.shard, places % layout.shard
    # The block has only its own ranks' shards, end to end, so count shards from the block's first rank.
    first = np.zeros(layout.world, np.int64)
    for at, name in enumerate(block.ranks):
        first[name] = at * layout.shard
    return first[rank] + place


@lru_cache(maxsize=256)
def places_in_blocks(blocks: tuple[Block, ...], size: int, block: Block) -> np.ndarray:
    """Returns int64 ``[block.count]``: the places of a block's positions in ``blocks`` end to end, ``size`` places
    each."""
    of_blocks = [positions(each.runs) for each in blocks]
    # A table from position to place. Blocks without positions have no maximum.
    index = np.zeros(max((int(part.max()) + 1 for part in of_blocks if len(part)), default=0), np.int64)
    for at, part in enumerate(of_blocks):
        index[part] = at * size + np.arange(len(part))
    return index[positions(block.runs)]


def places_in_gathered(plan: ContextPlan, part: int) -> np.ndarray:
    """Returns int64: the places of the other parts' keys in JAX's gathered buffer.

    The buffer holds all blocks end to end, each padded to its ranks' shards. With two parts it holds only the other
    part's block, because two parts swap their blocks.
    """
    assert plan.others is not None
    # 1 - part is the other of two parts.
    blocks = plan.k_blocks if plan.outer > 2 else plan.k_blocks[1 - part : 2 - part]
    return places_in_blocks(blocks, plan.inner * plan.k_layout.shard, plan.others[part])


def position_ids(layout: Layout, documents: tuple[int, ...] | None) -> np.ndarray:
    """Returns int32 ``[world, shard]``: the position (in its row, or in its document) at every place; 0 if none."""
    table = positions_by_shard(layout)
    filled = table < layout.length
    if documents is not None:
        starts = np.asarray(documents)
        # side="right": a position at the start of a document belongs to that document, not to an empty one before it.
        table = table - starts[np.searchsorted(starts[1:-1], table, side="right")]
    return np.where(filled, table, 0).astype(np.int32)


def places_of_tile(tile: Tile) -> tuple[np.ndarray, np.ndarray]:
    """Returns the places of a tile's queries and of its keys in their blocks."""
    queries, keys = ([range(*segment[at : at + 2]) for segment in tile.segments] for at in (0, 2))
    return np.concatenate(queries), np.concatenate(keys)


def contiguous_ranges(index: np.ndarray, limit: int = MAX_RANGES) -> list[tuple[int, int]] | None:
    """Returns an index array as contiguous ranges ``[start, stop)``; None if there are more than ``limit``."""
    if not len(index):
        return []
    breaks = np.flatnonzero(np.diff(index) != 1) + 1
    if len(breaks) >= limit:  # there is one range more than breaks
        return None
    starts = np.concatenate([[0], breaks])
    stops = np.concatenate([breaks, [len(index)]])
    return [(int(index[start]), int(index[stop - 1]) + 1) for start, stop in zip(starts, stops, strict=True)]
