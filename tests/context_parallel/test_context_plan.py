"""Tests the plan of a row over ranks: every visible pair once, in calls that kernels can run; and properties of
layouts.

``faults`` judges a plan by counting pairs one by one. The plans come from a bounded grid and from hypothesis. Plans
with a planted fault show that ``faults`` finds it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attn_core import SpecError
from attn_core.call.masks import Band, document_of
from attn_core.context_parallel import index_arrays
from attn_core.context_parallel.bands import Segment, VisibleBand
from attn_core.context_parallel.borders import size
from attn_core.context_parallel.layout import LAYOUTS, Layout, Run, build_layout, layout_for_window
from attn_core.context_parallel.plan import STRATEGIES, ContextPlan, Step, build_plan
from attn_core.context_parallel.tiles import Tile
from attn_core.errors import ShapeError

BANDS = ((None, 0), (None, None), (5, 0), (3, 2), (None, 2), (0, 0), (5, None))
KINDS = (*LAYOUTS, "window:7")
DOCUMENTS = {(23, 23): ((0, 4, 4, 11, 12, 23), (0, 23)), (3, 3): ((0, 3), (0, 1, 3))}
"""Offsets of packed documents, by the lengths of the row."""
AXES = ((1, 1), (2, 1), (3, 1), (4, 1), (5, 1), (2, 2), (3, 2), (2, 3), (1, 4))


# The judge


def positions_of(runs: tuple[Run, ...]) -> np.ndarray:
    """The positions that a block holds, in order; written a second time so that no helper of the plan judges itself."""
    return np.array([run.start + at * run.stride for run in runs for at in range(run.count)], np.int64)


def visible_set(q_len: int, kv_len: int, visible: VisibleBand) -> np.ndarray:
    """bool ``[q_len, kv_len]`` by definition."""
    band = Band(visible.left, visible.right, visible.offset)
    seen = np.ones((q_len, kv_len), bool) & band.contains(np.arange(q_len)[:, None], np.arange(kv_len)[None])
    if visible.documents is not None:
        of = document_of(np.array(visible.documents), q_len)
        seen &= of[:, None] == of[None]
    return seen


def window_of(tile: Tile, segment: Segment) -> np.ndarray:
    """bool ``[q_len, k_len]``: the pairs that a kernel computes for a segment, around its own bottom-right diagonal."""
    edge = Band(tile.left, tile.right, segment.k_len - segment.q_len)
    inside = edge.contains(np.arange(segment.q_len)[:, None], np.arange(segment.k_len)[None])
    return np.ones((segment.q_len, segment.k_len), bool) & inside


def tiles_with_positions(made: ContextPlan) -> Iterator[tuple[Tile, np.ndarray, np.ndarray]]:
    """Every tile with the positions of its block of queries and of the block of keys that its rank has in that step."""
    for step in made.steps:
        for part, mine in enumerate(step.tiles):
            keys = positions_of(made.k_blocks[(part - step.shift) % made.outer].runs)
            if step.gathered:
                keys = positions_of(made.others[part].runs)
            if step.border is not None:  # all that arrives; the last places of a short block hold no position
                keys = np.concatenate([keys[start:stop] for start, stop in step.border])
            assert (keys == positions_of(made.key_block(step, part).runs)).all()
            for tile in mine:
                yield tile, positions_of(made.q_blocks[part].runs), keys


def faults(made: ContextPlan, visible: VisibleBand) -> list[str]:
    """The faults of a plan; empty for a correct one."""
    results, counted = [], np.zeros((made.q_layout.length, made.k_layout.length), np.int64)
    for tile, queries, keys in tiles_with_positions(made):
        results += tile_faults(tile, len(queries), len(keys))
        for segment in tile.segments:
            rows, columns = np.nonzero(window_of(tile, segment))
            rows, columns = rows + segment.q_start, columns + segment.k_start
            there = (rows < len(queries)) & (columns < len(keys))  # tile_faults reports the other pairs
            np.add.at(counted, (queries[rows[there]], keys[columns[there]]), 1)
    wrong = counted != visible_set(*counted.shape, visible)
    results += [f"query {q}, key {k}: computed {counted[q, k]} times" for q, k in np.argwhere(wrong)[:3]]
    if sum(made.pairs) != counted.sum():
        results.append(f"pairs: {made.pairs}, counted {counted.sum()}")
    return results


def tile_faults(tile: Tile, queries: int, keys: int) -> list[str]:
    """The parts of a tile that a kernel could not run, or would run for nothing."""
    results = []
    if any(distance is not None and distance < 0 for distance in (tile.left, tile.right)):
        results.append(f"{tile}: a distance below 0")
    for before, after in pairwise(tile.segments):
        if after.q_start < before.q_stop or after.k_start < before.k_stop:
            results.append(f"{tile}: segments that are not one after another")
    if tile.segments[-1].q_stop > queries or tile.segments[-1].k_stop > keys:
        results.append(f"{tile}: beyond its blocks of {queries} and {keys}")
    masks = [window_of(tile, segment) for segment in tile.segments]
    if not all(mask.size and mask.any(axis=1).all() and mask.any(axis=0).all() for mask in masks):
        results.append(f"{tile}: a row that sees no key, or a key that no row sees")
    if tile.pairs != sum(int(mask.sum()) for mask in masks):
        results.append(f"{tile}: pairs {tile.pairs}")
    return results


# Every visible pair once


@pytest.mark.sampled
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_plan_of_the_grid_computes_each_pair_once(strategy: str, kind: str) -> None:
    axes = [(outer, inner) for outer, inner in AXES if strategy != "ulysses" or outer == 1]
    sizes = ((23, 23), (11, 23), (23, 11), (3, 3), (16, 16), (1, 1))
    for (outer, inner), (q_len, kv_len), band in product(axes, sizes, BANDS):
        several: tuple[Any, ...] = (None, *DOCUMENTS.get((q_len, kv_len), ()))
        if kind == "documents":  # it needs documents, and a token for each rank
            several = tuple(each for each in several if each and each[-1] >= outer * inner)
        for offset, documents in product({kv_len - q_len, 0}, several):
            visible = VisibleBand(*band, offset, documents)
            made = build_plan(strategy, kind, outer, inner, q_len, kv_len, visible)
            assert not faults(made, visible), (strategy, kind, outer, inner, q_len, kv_len, visible)


@st.composite
def requests(draw: st.DrawFn) -> tuple[Any, ...]:
    """The arguments of ``plan``."""
    strategy, kind = draw(st.sampled_from(STRATEGIES)), draw(st.sampled_from((*LAYOUTS, "window")))
    if kind == "window":
        kind = layout_for_window(draw(st.integers(1, 80)))
    outer = 1 if strategy == "ulysses" else draw(st.integers(1, 6))
    inner = draw(st.integers(1, 4))
    side = st.none() | st.integers(0, 40)
    lengths, documents = (draw(st.integers(0, 70)), draw(st.integers(0, 70))), None
    if kind == "documents" or draw(st.booleans()):
        documents = (0, *np.cumsum(draw(st.lists(st.integers(0, 19), min_size=1, max_size=9))).tolist())
        if kind == "documents" and documents[-1] < outer * inner:  # it needs a token for each rank
            documents = (*documents, outer * inner)
        lengths = (documents[-1], documents[-1])
    offset = draw(st.sampled_from((0, lengths[1] - lengths[0])))
    return strategy, kind, outer, inner, *lengths, VisibleBand(draw(side), draw(side), offset, documents)


@given(requests())
def test_any_plan_computes_each_pair_once(request: tuple[Any, ...]) -> None:
    assert not faults(build_plan(*request), request[-1])


@given(requests().filter(lambda request: request[1] == "documents"))
def test_every_rank_holds_dealt_tokens(request: tuple[Any, ...]) -> None:
    """Also in a row of as many tokens as ranks; without a token, a rank would compute nothing in every layer."""
    held = build_plan(*request).q_layout
    counts = [held.position_count(rank) for rank in range(held.world)]
    mean = held.length / held.world
    assert min(counts) >= 1 and held.shard == max(counts) <= max(np.ceil(mean), mean * 65 / 64)


@given(requests())
def test_shards_and_blocks_hold_every_position_once(request: tuple[Any, ...]) -> None:
    made = build_plan(*request)
    for held, blocks in ((made.q_layout, made.q_blocks), (made.k_layout, made.k_blocks)):
        assert sorted(position for runs in held.runs for position in positions_of(runs)) == list(range(held.length))
        assert held.shard == max(held.position_count(rank) for rank in range(held.world))
        together = np.concatenate([positions_of(block.runs) for block in blocks])
        assert sorted(together) == list(range(held.length))
        assert [len(positions_of(block.runs)) for block in blocks] == [block.count for block in blocks]
    assert (made.others is None) == (made.strategy == "ring" or made.outer == 1)
    for own, others in zip(made.k_blocks, made.others or (), strict=False):
        both = [*positions_of(own.runs), *positions_of(others.runs)]
        assert sorted(both) == list(range(made.k_layout.length))
    assert all(any(step.tiles) for step in made.steps)
    order = [(step.gathered, step.shift) for step in made.steps]
    assert order == sorted(set(order)) and not any(step.gathered and step.shift for step in made.steps)


@given(requests())
def test_the_numbers_of_summed_results_are_correct(request: tuple[Any, ...]) -> None:
    """The number of calls that see a query, and that compute the gradient of a key which stays with its part or goes
    to it."""
    made = build_plan(*request)
    queries = [np.zeros(block.count, np.int64) for block in made.q_blocks]
    own = [np.zeros(block.count, np.int64) for block in made.k_blocks]
    sent: dict[Any, np.ndarray] = {}
    for step in made.steps:
        for part, mine in enumerate(step.tiles):
            whose = part if made.others or step.border else (part - step.shift) % made.outer
            group = (step.shift if step.border else 0, whose)
            keys = own[part] if step.own else sent.setdefault(group, np.zeros(made.k_layout.length, np.int64))
            for segment in (segment for tile in mine for segment in tile.segments):
                queries[part][segment.q_start : segment.q_stop] += 1
                keys[segment.k_start : segment.k_stop] += 1
    for part in range(made.outer):
        assert made.max_tiles_per_query(part) == queries[part].max(initial=0)
        assert made.own_gradients_are_single(part) == (own[part].max(initial=0) < 2)
    assert made.sends_single_gradients == all(keys.max(initial=0) < 2 for keys in sent.values())


# Planted faults

RING = ("ring", "zigzag", 3, 1, 29, 29, VisibleBand(None, 0))
WINDOW = ("ring", "contiguous", 3, 1, 29, 29, VisibleBand(6, 2))
STRIPES = ("all_gather", "striped", 2, 2, 29, 29, VisibleBand(7, 0))
PACKED = ("ring", "zigzag", 2, 1, 29, 29, VisibleBand(None, 0, 0, (0, 12, 21, 29)))
DEALT = ("ring", "documents", 3, 1, 29, 29, VisibleBand(None, 0, 0, (0, 12, 19, 27, 29)))
SHARED = ("ring", "window:7", 3, 1, 29, 29, VisibleBand(6, 0, 0, (0, 29)))
PLANTED = {"ring": RING, "window": WINDOW, "stripes": STRIPES, "packed": PACKED, "dealt": DEALT, "shared": SHARED}


def with_tile(made: ContextPlan, change: Callable[[Tile], tuple[Tile, ...]]) -> ContextPlan:
    """The plan with its largest tile changed."""
    largest = max((tile for tile, _, _ in tiles_with_positions(made)), key=lambda tile: tile.pairs)
    steps = []
    for step in made.steps:
        mine = tuple(
            tuple(new for tile in of_part for new in (change(tile) if tile == largest else (tile,)))
            for of_part in step.tiles
        )
        steps.append(replace(step, tiles=mine))
    return replace(made, steps=tuple(steps))


def moved(tile: Tile, **places_by: int) -> tuple[Tile, ...]:
    first, *rest = tile.segments
    changed = first._replace(**{name: getattr(first, name) + by for name, by in places_by.items()})
    return (tile._replace(segments=(changed, *rest)),)


def wider(distance: int | None, by: int) -> int | None:
    return by if distance is None else distance + by


FAULTS: dict[str, Callable[[ContextPlan], ContextPlan]] = {
    "a tile lost": lambda made: with_tile(made, lambda tile: ()),
    "a tile twice": lambda made: with_tile(made, lambda tile: (tile, tile)),
    "right + 1": lambda made: with_tile(made, lambda tile: (tile._replace(right=wider(tile.right, 1)),)),
    "right - 1": lambda made: with_tile(made, lambda tile: (tile._replace(right=wider(tile.right, -1)),)),
    "left - 1": lambda made: with_tile(made, lambda tile: (tile._replace(left=wider(tile.left, -1)),)),
    "one query fewer": lambda made: with_tile(made, lambda tile: moved(tile, q_stop=-1)),
    "one key fewer": lambda made: with_tile(made, lambda tile: moved(tile, k_stop=-1)),
    "the first key lost": lambda made: with_tile(made, lambda tile: moved(tile, k_start=1)),
    "a step lost": lambda made: replace(made, steps=made.steps[:-1]),
    "another rank's queries": lambda made: replace(made, q_blocks=made.q_blocks[1:] + made.q_blocks[:1]),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("where", PLANTED)
def test_a_planted_fault_is_found(where: str, fault: str) -> None:
    made, visible = build_plan(*PLANTED[where]), PLANTED[where][-1]
    assert not faults(made, visible)
    assert faults(FAULTS[fault](made), visible), fault


def test_a_block_of_the_wrong_rank_is_found() -> None:
    made = build_plan(*RING)
    shifted = [Step((step.shift + 1) % made.outer, step.tiles) for step in made.steps]
    assert faults(replace(made, steps=tuple(shifted)), RING[-1])


def test_a_border_of_other_places_is_found() -> None:
    made, visible = build_plan(*WINDOW), WINDOW[-1]
    assert any(step.border for step in made.steps)
    for start, stop in ((-1, -1), (1, 0), (0, -1)):
        steps = [
            replace(step, border=step.border and tuple((a + start, b + stop) for a, b in step.border))
            for step in made.steps
        ]
        assert faults(replace(made, steps=tuple(steps)), visible)


# Layouts


@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
def test_zigzag_equals_torchs_head_tail_order(world: int) -> None:
    """Rank r holds the pieces r and 2P - 1 - r, in this order, as in torch's _HeadTailLoadBalancer."""
    size = 5
    pieces = np.arange(2 * world * size).reshape(2 * world, size)
    expected = [np.concatenate([pieces[rank], pieces[2 * world - 1 - rank]]) for rank in range(world)]
    assert np.array_equal(
        index_arrays.positions_by_shard(build_layout("zigzag", 2 * world * size, world)), np.stack(expected)
    )


def test_layouts_of_lengths_that_the_ranks_do_not_divide() -> None:
    assert [build_layout("contiguous", 11, 4).position_count(rank) for rank in range(4)] == [2, 3, 3, 3]
    assert build_layout("striped", 11, 4).runs[2:] == ((Run(2, 3, 4),), (Run(3, 2, 4),))
    assert build_layout("zigzag", 11, 2).runs == ((Run(0, 2), Run(8, 3)), (Run(2, 6),))
    assert build_layout("zigzag", 2, 4).shard == 1


def test_neighbouring_stripes_form_a_stripe() -> None:
    made = build_plan("ring", "striped", 2, 3, 24, 24, VisibleBand(None, 0))
    assert [block.runs for block in made.q_blocks] == [(Run(0, 12, 2),), (Run(1, 12, 2),)]


@pytest.mark.parametrize("documents", [(0, 32, 64, 96), (0, 24, 24, 56, 96), (0, 96)])
def test_zigzag_cuts_every_document(documents: tuple[int, ...]) -> None:
    """If the pieces divide every document, each rank holds an equal part of each and has equal causal work."""
    held = build_layout("zigzag", 96, 4, 1, documents)
    of = document_of(np.array(documents), 96)
    for document, (start, stop) in enumerate(pairwise(documents)):
        counts = [int((of[positions_of(runs)] == document).sum()) for runs in held.runs]
        assert counts == [(stop - start) // 4] * 4
    assert build_plan("ring", "zigzag", 4, 1, 96, 96, VisibleBand(None, 0, 0, documents)).balance == 1.0


@given(st.lists(st.integers(0, 40), min_size=2, max_size=12), st.integers(1, 6))
def test_shards_of_odd_documents_have_almost_equal_lengths(lengths: list[int], world: int) -> None:
    """Pieces of one document differ by at most one position, and the rank with the fewest positions gets the longer
    piece."""
    offsets = (0, *np.cumsum(lengths).tolist())
    held = [build_layout("zigzag", offsets[-1], world, 1, offsets).position_count(rank) for rank in range(world)]
    assert max(held) - min(held) <= 2


# Work and hops


@pytest.mark.parametrize("strategy", ["ring", "all_gather"])
@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_causal_work_is_even(strategy: str, world: int) -> None:
    length, causal = 2 * world * 64, VisibleBand(None, 0)
    zigzag, striped, contiguous = (
        build_plan(strategy, kind, world, 1, length, length, causal) for kind in ("zigzag", "striped", "contiguous")
    )
    slowest = sum(max(step.pairs) for step in zigzag.steps)
    assert zigzag.balance == 1.0 and slowest * world == sum(zigzag.pairs) == length * (length + 1) // 2
    assert 0.98 < striped.balance < 1.0
    # the imbalance of causal work in contiguous pieces
    assert contiguous.balance == pytest.approx((world / 2) / (world - 0.5), rel=0.01)


def test_a_causal_ring_needs_one_call_per_hop() -> None:
    made = build_plan("ring", "zigzag", 4, 1, 4096, 4096, VisibleBand(None, 0))
    assert [[len(mine) for mine in step.tiles] for step in made.steps] == [[1] * 4] * 4
    assert {tile.causal for tile in made.steps[0].tiles[1]} == {True}
    assert {(tile.left, tile.right) for step in made.steps[1:] for mine in step.tiles for tile in mine} == {
        (None, None)
    }


def test_all_documents_of_a_step_share_one_call() -> None:
    made = build_plan("ring", "zigzag", 2, 1, 4096, 4096, VisibleBand(None, 0, 0, tuple(range(0, 4097, 128))))
    assert [[len(mine) for mine in step.tiles] for step in made.steps] == [[1, 1], [1, 1]]
    assert len(made.steps[0].tiles[0][0].segments) == 32


def test_a_window_drops_hops() -> None:
    def shifts(kind: str, window: VisibleBand) -> list[int]:
        return [step.shift for step in build_plan("ring", kind, 4, 1, 4096, 4096, window).steps]

    assert shifts("contiguous", VisibleBand(None, 0)) == [0, 1, 2, 3]
    assert shifts("contiguous", VisibleBand(511, 0)) == [0, 1]
    assert shifts("contiguous", VisibleBand(511, 511)) == [0, 1, 3]
    assert shifts("zigzag", VisibleBand(511, 0)) == [0, 1, 3]
    assert shifts("contiguous", VisibleBand(None, 0, 0, (0, 1024, 2048, 3072, 4096))) == [0]
    assert build_plan("ring", "contiguous", 4, 1, 0, 8, VisibleBand(None, 0)).steps == ()


def test_a_window_sends_only_its_border() -> None:
    """The keys that a rank lacks: the last 511 places of the block before it, and the first 511 of the block after."""

    def borders(kind: str, ranks: int, window: VisibleBand, length: int = 4096) -> dict[int, Any]:
        made = build_plan("ring", kind, ranks, 1, length, length, window)
        assert all(made.share_sent(step) == size(step.border) / made.block_places for step in made.steps if step.border)
        return {step.shift: step.border for step in made.steps}

    assert borders("contiguous", 4, VisibleBand(511, 0)) == {0: None, 1: ((513, 1024),)}
    assert borders("contiguous", 4, VisibleBand(511, 300)) == {0: None, 1: ((513, 1024),), 3: ((0, 300),)}
    assert borders("contiguous", 2, VisibleBand(511, 300)) == {0: None, 1: ((0, 300), (1537, 2048))}
    # A window of more than a shard: the block before it as a whole, and a border of the one before that.
    assert borders("contiguous", 4, VisibleBand(1500, 0)) == {0: None, 1: None, 2: ((548, 1024),)}
    # A rank's two pieces see the end of a piece each: of the rank before it, and of the rank after it.
    assert borders("zigzag", 4, VisibleBand(200, 0)) == {0: None, 1: ((312, 512),), 3: ((824, 1024),)}
    # Shards of 7 and 8 positions: one border of a static size that contains the end of both.
    assert borders("contiguous", 4, VisibleBand(2, 0), 30) == {0: None, 1: ((5, 8),)}
    assert borders("striped", 4, VisibleBand(511, 0)) == dict.fromkeys(range(4))
    # Documents that begin inside shards: the whole of a document's beginning.
    assert borders("contiguous", 2, VisibleBand(None, 0, 0, (0, 1900, 4096))) == {0: None, 1: ((1900, 2048),)}
    assert borders("contiguous", 2, VisibleBand(None, 0, 0, (0, 100, 4096))) == {0: None, 1: None}


# Places


@given(requests())
def test_places_of_shards_and_of_the_row_are_inverse(request: tuple[Any, ...]) -> None:
    made = build_plan(*request)
    held = made.q_layout
    positions_by_shard, in_order = index_arrays.positions_by_shard(held), index_arrays.places_by_position(held)
    assert positions_by_shard.shape == (held.world, held.shard)
    row = np.append(np.arange(held.length) + 100, -1)
    shards = row[positions_by_shard]  # -1 where a place holds nothing
    assert (shards == -1).sum() == held.world * held.shard - held.length
    assert np.array_equal(shards.ravel()[in_order], row[:-1])
    for block in made.q_blocks:
        gathered = shards[list(block.ranks)].ravel()
        assert np.array_equal(gathered[index_arrays.places_of_block(held, block)] - 100, positions_of(block.runs))


def test_places_of_two_layouts_differ() -> None:
    zigzag, striped = build_layout("zigzag", 24, 3), build_layout("striped", 24, 3)
    assert not np.array_equal(
        index_arrays.positions_by_shard(zigzag).ravel()[index_arrays.places_by_position(striped)], np.arange(24)
    )


@given(st.lists(st.integers(0, 30), max_size=20))
def test_slices_cover_the_index_in_order(index: list[int]) -> None:
    actual = index_arrays.contiguous_ranges(np.array(index, np.int64), limit=64)
    assert actual is not None
    assert [place for start, stop in actual for place in range(start, stop)] == index
    assert all(start < stop for start, stop in actual)
    assert index_arrays.contiguous_ranges(np.array([0, 2, 4]), limit=2) is None


# What is refused


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("rings", "zigzag", 2, 1, 8, 8, VisibleBand(None, 0)),
            "strategy='rings': expected one of all_gather, ring, ulysses",
        ),
        (
            ("ulysses", "zigzag", 2, 2, 8, 8, VisibleBand(None, 0)),
            "strategy='ulysses': expected all 4 ranks on its axis, got 2 x 2",
        ),
        (
            ("ring", "snake", 2, 1, 8, 8, VisibleBand(None, 0)),
            "layout='snake': expected one of contiguous, zigzag, striped",
        ),
        (("ring", "zigzag", 0, 1, 8, 8, VisibleBand(None, 0)), "world=0 x 1: expected at least one rank each way"),
        (("ring", "zigzag", 2, 1, 8, 9, VisibleBand(None, 0, 0, (0, 8))), "seq_info: expected as many queries as keys"),
        (
            ("ring", "zigzag", 2, 1, 8, 8, VisibleBand(None, 0, 0, (0, 5))),
            "seq_info: expected offsets that rise from 0 to the",
        ),
        (
            ("ring", "zigzag", 2, 1, 8, 8, VisibleBand(None, 0, 0, (0, 5, 3, 8))),
            "seq_info: expected offsets that rise from 0",
        ),
    ],
)
def test_bad_arguments_of_plan_are_refused_by_name(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(SpecError, match=f"^{re.escape(message)}"):
        build_plan(*arguments)


@pytest.mark.parametrize(
    ("ranks", "documents", "message"),
    [
        ((2, 1), None, "layout='documents': expected seq_info with the row's packed documents, got None"),
        ((2, 2), (0, 2, 3), "seq_info: expected at least 4 tokens, one for each rank of layout='documents', got 3"),
    ],
)
def test_rows_that_cannot_be_dealt_are_refused(ranks: Any, documents: Any, message: str) -> None:
    length = documents[-1] if documents else 8
    with pytest.raises(SpecError, match=f"^{re.escape(message)}$"):
        build_plan("ring", "documents", *ranks, length, length, VisibleBand(None, 0, 0, documents))


def test_documents_are_checked_in_every_layout() -> None:
    for kind in KINDS:
        with pytest.raises(ShapeError, match=r"^seq_info"):
            build_plan("ring", kind, 2, 1, 8, 8, VisibleBand(None, 0, 0, (0, 5)))


def test_layouts_compare_and_hash_by_value() -> None:
    assert build_layout("zigzag", 24, 3) == build_layout("zigzag", 24, 3)
    assert hash(build_layout("zigzag", 24, 3)) == hash(build_layout("zigzag", 24, 3))
    assert isinstance(build_layout("zigzag", 24, 3), Layout)
