"""Plan: who computes what of an attention call whose row is spread over ranks, step by step, as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from attn_core.context_parallel import layout as layouts
from attn_core.context_parallel.layout import Block, Layout
from attn_core.context_parallel.tiles import Tile, Visible, deepest, tiles
from attn_core.errors import SpecError

STRATEGIES = ("all_gather", "ring", "ulysses")
"""How ranks exchange keys and values: all ranks gather all of them; blocks travel from rank to rank; or heads are
exchanged for positions. On two axes, one of the first two on the outer axis, and "ulysses" on the inner axis."""


ROUNDED_ONCE = 2
"""The most results of one query or key whose sum has the inputs' dtype: it is rounded once. Longer sums are wider."""


@dataclass(frozen=True)
class Step:
    """Attention of every part's queries to one block of keys and values.

    Attributes:
        shift: how far the block has travelled: part p has the block of part ``(p - shift) % parts``; 0 if gathered.
        tiles: for each part its tiles; empty for a part that sees none of the block.
        gathered: whether part p has the keys of all parts except p at once.
    """

    shift: int
    tiles: tuple[tuple[Tile, ...], ...]
    gathered: bool = False

    @property
    def own(self) -> bool:
        """Whether every part computes with its own block, so that nothing is sent."""
        return not self.shift and not self.gathered

    @property
    def pairs(self) -> tuple[int, ...]:
        """The (query, key) pairs that each part computes."""
        return tuple(sum(tile.pairs for tile in mine) for mine in self.tiles)


@dataclass(frozen=True)
class Plan:
    """One attention call over ranks. Rank ``part * inner + i`` is the i-th of a part, whose ranks exchange heads.

    Attributes:
        strategy: of the outer axis, one of STRATEGIES; "ulysses" if there is no outer axis.
        outer, inner: number of parts of the row; number of ranks that share a part by heads.
        q_layout, k_layout: the layouts of the queries, and of the keys and values.
        q_blocks, k_blocks: the block of each part, after its ranks have exchanged heads.
        others: for each part the keys of all other parts, if keys are gathered; else None.
        steps: in order, the own block's step first; steps without a visible pair are left out.
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
        """How many ranks there are."""
        return self.outer * self.inner

    @property
    def gathers(self) -> bool:
        """Whether any part sees gathered keys of other parts."""
        return any(step.gathered for step in self.steps)

    def keys(self, step: Step, part: int) -> Block:
        """The keys that a part has in a step."""
        if step.gathered:
            assert self.others is not None
            return self.others[part]
        return self.k_blocks[(part - step.shift) % self.outer]

    @property
    def gradients_travel_alone(self) -> bool:
        """Whether the gradient of every key that is sent comes from one tile instead of a sum of several.

        In a ring, gradients are summed on their way. If keys are gathered, each part sends its own sum. Gradients of a
        part's own block are not sent.
        """
        reached: dict[int, list[tuple[int, int]]] = {}
        for step in (step for step in self.steps if not step.own):
            for part, mine in enumerate(step.tiles):
                keys = reached.setdefault(part if step.gathered else (part - step.shift) % self.outer, [])
                keys += [(segment.k_start, segment.k_stop) for tile in mine for segment in tile.segments]
        return all(deepest(keys) < 2 for keys in reached.values())

    def own_gradients_alone(self, part: int) -> bool:
        """Whether no key of a part's own block is in two of its tiles."""
        mine = (tile for step in self.steps if step.own for tile in step.tiles[part])
        return deepest((segment.k_start, segment.k_stop) for tile in mine for segment in tile.segments) < 2

    def calls_of_a_query(self, part: int) -> int:
        """The most tiles of a part that see one query."""
        mine = (tile for step in self.steps for tile in step.tiles[part])
        return deepest((segment.q_start, segment.q_stop) for tile in mine for segment in tile.segments)

    @property
    def pairs(self) -> tuple[int, ...]:
        """The (query, key) pairs that each part computes, per head."""
        return tuple(map(sum, zip(*(step.pairs for step in self.steps), strict=True))) or (0,) * self.outer

    @property
    def balance(self) -> float:
        """The mean work of the parts over the work of the busiest part: 1 is even. An upper bound of the efficiency."""
        pairs = self.pairs
        return sum(pairs) / (len(pairs) * max(pairs)) if max(pairs) else 1.0

    @property
    def critical_pairs(self) -> int:
        """The sum over steps of the busiest part's pairs: the critical path if parts go step by step together."""
        return sum(max(step.pairs) for step in self.steps)


@lru_cache(maxsize=256)
def plan(
    strategy: str,
    layout: str,
    outer: int,
    inner: int,
    q_len: int,
    kv_len: int,
    visible: Visible,
) -> Plan:
    """The plan of a call.

    Args:
        strategy: one of STRATEGIES, for the outer axis; "ulysses" needs ``outer`` 1.
        layout: ``"contiguous"``, ``"zigzag"`` or ``"striped"``, see ``attn_core.context_parallel.layout``.
        outer, inner: the sizes of the two axes; inner ranks exchange heads.
        q_len, kv_len: of the whole row; packed documents have one length for both.

    Raises:
        SpecError: for an unknown strategy or layout, or sizes that do not match.
        ShapeError: for documents that do not fill the row.
    """
    if strategy not in STRATEGIES:
        raise SpecError(f"strategy={strategy!r}: expected one of {', '.join(STRATEGIES)}")
    if strategy == "ulysses" and outer != 1:
        raise SpecError(f"strategy='ulysses': expected all {outer * inner} ranks on its axis, got {outer} x {inner}")
    if visible.documents is not None and q_len != kv_len:
        raise SpecError(f"seq_info: expected as many queries as keys of every document, got {q_len} and {kv_len}")
    q_layout = layouts.layout(layout, q_len, outer, inner, visible.documents)
    k_layout = q_layout if q_len == kv_len else layouts.layout(layout, kv_len, outer, inner)
    members = [tuple(range(part * inner, (part + 1) * inner)) for part in range(outer)]
    q_blocks = tuple(layouts.block(q_layout, ranks) for ranks in members)
    k_blocks = tuple(layouts.block(k_layout, ranks) for ranks in members)
    others = None
    shifts = range(outer)
    if strategy != "ring" and outer > 1:
        others = tuple(_together(k_layout, k_blocks[:part] + k_blocks[part + 1 :]) for part in range(outer))
        shifts = range(1)
    steps = [_step(q_blocks, k_blocks, shift, visible) for shift in shifts]
    if others is not None:
        rest = (tiles(block.runs, its.runs, visible) for block, its in zip(q_blocks, others, strict=True))
        steps.append(Step(0, tuple(rest), gathered=True))
    kept = tuple(step for step in steps if any(step.tiles))
    return Plan(strategy, outer, inner, q_layout, k_layout, q_blocks, k_blocks, others, kept)


def _step(q_blocks: Sequence[Block], k_blocks: Sequence[Block], shift: int, visible: Visible) -> Step:
    parts = range(len(q_blocks))
    return Step(
        shift, tuple(tiles(q_blocks[part].runs, k_blocks[(part - shift) % len(parts)].runs, visible) for part in parts)
    )


def _together(layout: Layout, blocks: Sequence[Block]) -> Block:
    """Several parts' keys in the order of positions. Stripes stay apart: a stripe of queries sees a band of each."""
    ranks = tuple(rank for block in blocks for rank in block.ranks)
    if layout.kind == "striped":
        return Block(tuple(run for block in blocks for run in block.runs), ranks)
    return layouts.block(layout, ranks)
