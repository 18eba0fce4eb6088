"""ContextPlan: who computes what when a row is spread over ranks, step by step, as plain data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

from attn_core.context_parallel import borders
from attn_core.context_parallel import layout as layouts
from attn_core.context_parallel.bands import VisibleBand
from attn_core.context_parallel.borders import Border
from attn_core.context_parallel.layout import Block, Layout
from attn_core.context_parallel.tiles import Tile, max_overlap, split_into_tiles
from attn_core.errors import SpecError, shown

STRATEGIES = ("all_gather", "ring", "ulysses")
"""How keys and values reach the queries: every rank gathers all of them; blocks travel from rank to rank; or ranks
exchange heads for positions. On two axes, one of the first two on the outer axis, and "ulysses" on the inner axis."""

AxisSizes = tuple[int] | tuple[int, int]
"""The sizes of one axis of ranks, or of two: (outer, inner). Ranks along the inner axis exchange heads."""
Axis = TypeVar("Axis")


ROUNDED_ONCE = 2
"""The most results of one query or key that are added up in the inputs' dtype, because the sum is then rounded only
once. Longer sums have a wider dtype."""


def outer_and_inner(axes: Sequence[Axis], strategy: str, alone: Axis) -> tuple[Axis, Axis]:
    """Returns the axis of the parts of a row, and that of the ranks that share a part by heads.

    Args:
        axes: one or two; their sizes, or names.
        alone: what stands for the axis that one axis lacks: "ulysses" has one part, other strategies one rank in each.
    """
    outer, inner = axes if len(axes) == 2 else (alone, *axes) if strategy == "ulysses" else (*axes, alone)
    return outer, inner


@dataclass(frozen=True)
class Step:
    """Attention of every part's queries to one block of keys and values.

    Attributes:
        shift: how far the block has travelled: part p has the block of part ``(p - shift) % parts``; 0 if gathered.
        tiles: the tiles of each part; empty for a part that sees none of the block.
        gathered: whether each part has the keys of all other parts at once.
        border: the places of the block that are sent, straight from its own part, and that the tiles' keys are numbered
            by; None if the whole block moves on from the step before.
    """

    shift: int
    tiles: tuple[tuple[Tile, ...], ...]
    gathered: bool = False
    border: Border | None = None

    @property
    def own(self) -> bool:
        """Whether every part computes with its own block, so that nothing is sent."""
        return not self.shift and not self.gathered

    @property
    def moves(self) -> bool:
        """Whether the whole block moves on from the step before, in a ring."""
        return bool(self.shift) and self.border is None

    @property
    def pairs(self) -> tuple[int, ...]:
        """The number of (query, key) pairs that each part computes."""
        return tuple(sum(tile.pairs for tile in of_part) for of_part in self.tiles)


@dataclass(frozen=True)
class ContextPlan:
    """One attention call over ranks. Rank ``part * inner + i`` is member i of its part; members exchange heads.

    Attributes:
        strategy: of the outer axis, one of STRATEGIES; "ulysses" if there is no outer axis.
        outer, inner: the number of parts of the row; the number of ranks that share a part by heads.
        q_layout, k_layout: the layouts of the queries, and of the keys and values.
        q_blocks, k_blocks: the block of each part, after its ranks have exchanged heads.
        others: for each part, the keys of all other parts, if keys are gathered; else None.
        steps: in order, the step on the own block first. Steps without a visible pair are left out.
    """

    strategy: str
    outer: int
    inner: int
    q_layout: Layout
    k_layout: Layout
    q_blocks: tuple[Block, ...]
    k_blocks: tuple[Block, ...]
    others: tuple[Block, ...] | None
    steps: tuple[Step, ...]

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self.outer * self.inner

    @property
    def gathers(self) -> bool:
        """Whether any part sees gathered keys of other parts."""
        return any(step.gathered for step in self.steps)

    @property
    def block_places(self) -> int:
        """The number of places of the largest block of keys."""
        return max(block.count for block in self.k_blocks)

    def share_sent(self, step: Step) -> float:
        """Returns the share of a block that travels for a step: 1 unless the step has a border."""
        return 1.0 if step.border is None else borders.size(step.border) / self.block_places

    def key_block(self, step: Step, part: int) -> Block:
        """Returns the keys that a part has in a step."""
        if step.gathered:
            assert self.others is not None
            return self.others[part]
        block = self.k_blocks[(part - step.shift) % self.outer]
        return block if step.border is None else borders.cut(block, step.border)

    @property
    def sends_single_gradients(self) -> bool:
        """Whether the gradient of every key that is sent comes from one tile, so that it is not a sum.

        In a ring, gradients are summed on their way. If keys are gathered, or a step has a border, each part sends its
        own sum. Gradients of a part's own block are not sent.
        """
        reached: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for step in (step for step in self.steps if not step.own):
            for part, tiles in enumerate(step.tiles):
                # By the sum: the sender's if keys are gathered or a border, the block's own in a ring.
                whose = part if step.gathered or step.border else (part - step.shift) % self.outer
                keys = reached.setdefault((step.shift if step.border else 0, whose), [])
                keys += [(segment.k_start, segment.k_stop) for tile in tiles for segment in tile.segments]
        return all(max_overlap(keys) < 2 for keys in reached.values())

    def own_gradients_are_single(self, part: int) -> bool:
        """Returns whether no key of a part's own block is in two of its tiles."""
        tiles = (tile for step in self.steps if step.own for tile in step.tiles[part])
        return max_overlap((segment.k_start, segment.k_stop) for tile in tiles for segment in tile.segments) < 2

    def max_tiles_per_query(self, part: int) -> int:
        """Returns the largest number of a part's tiles that contain one query."""
        tiles = (tile for step in self.steps for tile in step.tiles[part])
        return max_overlap((segment.q_start, segment.q_stop) for tile in tiles for segment in tile.segments)

    @property
    def pairs(self) -> tuple[int, ...]:
        """The number of (query, key) pairs that each part computes, per head."""
        return tuple(map(sum, zip(*(step.pairs for step in self.steps), strict=True))) or (0,) * self.outer

    @property
    def balance(self) -> float:
        """The mean work of the parts over the work of the busiest part: an upper bound of the efficiency; 1 is even."""
        pairs = self.pairs
        return sum(pairs) / (len(pairs) * max(pairs)) if max(pairs) else 1.0


@lru_cache(maxsize=256)
def build_plan(
    strategy: str, layout: str, outer: int, inner: int, q_len: int, kv_len: int, visible: VisibleBand
) -> ContextPlan:
    """Plans a call; cached.

    Args:
        strategy: one of STRATEGIES, for the outer axis; "ulysses" needs ``outer`` 1.
        layout: see ``attn_core.context_parallel.layout.build_layout``.
        outer, inner: the sizes of the two axes; inner ranks exchange heads.
        q_len, kv_len: of the whole row; with documents they are equal.

    Raises:
        SpecError: for an unknown strategy or layout, or sizes that do not match.
        ShapeError: for documents that do not fill the row.
    """
    if strategy not in STRATEGIES:
        raise SpecError(f"strategy={shown(strategy)}: expected one of {', '.join(STRATEGIES)}")
    if strategy == "ulysses" and outer != 1:
        raise SpecError(f"strategy='ulysses': expected all {outer * inner} ranks on its axis, got {outer} x {inner}")
    if visible.documents is not None and q_len != kv_len:
        raise SpecError(f"seq_info: expected as many queries as keys of every document, got {q_len} and {kv_len}")
    q_layout = layouts.build_layout(layout, q_len, outer, inner, visible.documents)
    # Documents have equal lengths of queries and keys (checked above), so separate layouts have none.
    k_layout = q_layout if q_len == kv_len else layouts.build_layout(layout, kv_len, outer, inner)
    members = [tuple(range(part * inner, (part + 1) * inner)) for part in range(outer)]
    q_blocks = tuple(layouts.build_block(q_layout, ranks) for ranks in members)
    k_blocks = tuple(layouts.build_block(k_layout, ranks) for ranks in members)
    others = None
    shifts = range(outer)
    # Only all_gather reaches this: "ulysses" has one part, whose keys are all its own.
    if strategy != "ring" and outer > 1:
        others = tuple(_join_blocks(k_layout, k_blocks[:part] + k_blocks[part + 1 :]) for part in range(outer))
        shifts = range(1)
    # Rotated by ``shift``, so that part p has the block of part p - shift. A shift of 0 gives the blocks unrotated.
    steps = [
        _step(shift, _tiles(q_blocks, k_blocks[-shift:] + k_blocks[:-shift], visible), k_blocks) for shift in shifts
    ]
    if others is not None:
        steps.append(Step(0, _tiles(q_blocks, others, visible), gathered=True))
    # A step stays if any part has a tile in it, because every part must take part in every exchange.
    visible_steps = tuple(step for step in steps if any(step.tiles))
    return ContextPlan(strategy, outer, inner, q_layout, k_layout, q_blocks, k_blocks, others, visible_steps)


def _step(shift: int, tiles: tuple[tuple[Tile, ...], ...], k_blocks: Sequence[Block]) -> Step:
    """Returns a step on a block that travelled ``shift`` parts, with its border if one is worth sending alone."""
    border = borders.find_border(tiles, max(block.count for block in k_blocks)) if shift else None
    return Step(shift, tiles) if border is None else Step(shift, borders.number_within(tiles, border), border=border)


def _tiles(queries: Sequence[Block], keys: Sequence[Block], visible: VisibleBand) -> tuple[tuple[Tile, ...], ...]:
    """Returns the tiles of each part, from the queries and the keys that each part has."""
    return tuple(split_into_tiles(q.runs, k.runs, visible) for q, k in zip(queries, keys, strict=True))


def _join_blocks(layout: Layout, blocks: Sequence[Block]) -> Block:
    """Returns several parts' keys in the order of positions.

    Stripes are not merged: a stripe of queries sees one band of each stripe of keys.
    """
    ranks = tuple(rank for block in blocks for rank in block.ranks)
    if layout.kind == "striped":
        return Block(tuple(run for block in blocks for run in block.runs), ranks)
    return layouts.build_block(layout, ranks)


T = TypeVar("T")


def prefetch(groups: int, start: Callable[[int], T]) -> Iterator[tuple[int, T]]:
    """Yields (group, ``start(group)``) in order, but calls ``start(group + 1)`` before it yields ``group``."""
    started = [start(0)]
    for group in range(groups):
        # Only one group ahead, because every started group holds its tensors in memory.
        if group + 1 < groups:
            started.append(start(group + 1))
        yield group, started.pop(0)  # keeps no reference, so that the caller can free the group's tensors
