"""Tests how documents are dealt to ranks: even work and almost even tokens, few cuts, and nothing sent in vain."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from math import ceil, floor

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from attn_core.context_parallel import index_arrays
from attn_core.context_parallel.bands import VisibleBand
from attn_core.context_parallel.dealing import TOKEN_SLACK, WORK_SLACK, deal
from attn_core.context_parallel.layout import Run, build_layout
from attn_core.context_parallel.plan import ContextPlan, build_plan

SEVEN = (9000, 3000, 8000, 768, 6000, 2000, 4000)
"""Seven documents in 32768 tokens."""


def offsets_of(lengths: Sequence[int]) -> tuple[int, ...]:
    return tuple(accumulate(lengths, initial=0))


def ring(lengths: Sequence[int], ranks: int, *, causal: bool = True) -> ContextPlan:
    offsets = offsets_of(lengths)
    return build_plan(
        "ring", "documents", ranks, 1, offsets[-1], offsets[-1], VisibleBand(None, 0 if causal else None, 0, offsets)
    )


def keys_seen(start: int, stop: int) -> int:
    """The keys that a document's queries [start, stop) see under a causal mask, counted from its start."""
    return sum(range(start + 1, stop + 1))


def dealt(offsets: tuple[int, ...], ranks: int) -> tuple[list[int], list[int]]:
    """Each rank's tokens, and the keys that they see under a causal mask. Every position must be dealt once."""
    taken = deal(offsets, ranks)
    assert sorted(place for rank in taken for piece in rank for place in range(*piece)) == list(range(offsets[-1]))
    tokens = [sum(stop - start for start, stop in rank) for rank in taken]
    work = [
        sum(
            keys_seen(max(start, first) - first, min(stop, last) - first)
            for start, stop in rank
            for first, last in pairwise(offsets)
            if max(start, first) < min(stop, last)
        )
        for rank in taken
    ]
    return tokens, work


def rows(count: int, ranks: int, tokens: tuple[int, int], seed: int = 0) -> Iterator[tuple[int, ...]]:
    """The offsets of random rows with so many tokens on each rank, some of them with empty documents."""
    draw = random.Random(seed)
    for _ in range(count):
        length = draw.randint(tokens[0] * ranks, tokens[1] * ranks)
        yield (0, *sorted(draw.randint(0, length) for _ in range(draw.randint(0, 12))), length)


def all_rows(length: int) -> Iterator[tuple[int, ...]]:
    """The offsets of every row of so many tokens without empty documents."""
    for cuts in range(2 ** (length - 1)):
        yield (0, *(at for at in range(1, length) if cuts >> (at - 1) & 1), length)


row_of_documents = st.lists(st.integers(0, 300), min_size=1, max_size=20).filter(lambda lengths: sum(lengths) > 8)


def assert_even(offsets: tuple[int, ...], ranks: int) -> None:
    """Of tokens a rank has 1/64 more than the mean, rounded down, or the mean rounded up. Of pairs it has 1/128 more,
    and those of one token, which are nothing beside the mean work in a long row."""
    held, work = dealt(offsets, ranks)
    mean, longest = offsets[-1] / ranks, max(stop - start for start, stop in pairwise(offsets))
    of_one_token = longest if mean < 2000 else 0.001 * sum(work) / ranks
    assert max(held) <= max(ceil(mean), floor(mean * (1 + TOKEN_SLACK))), (offsets, held)
    assert max(work) <= sum(work) / ranks * (1 + WORK_SLACK) + of_one_token, (offsets, work)
    assert min(held) >= floor(mean) if mean < 63 else min(held) > 0.9 * mean, (offsets, held)


@given(row_of_documents, st.integers(1, 8))
@example([300], 8)
@example([100] * 3, 2)
@example([3, 1], 2)
@example([1] * 20, 7)
def test_any_row_is_dealt_evenly(lengths: list[int], ranks: int) -> None:
    offsets = offsets_of(lengths)
    assert deal(offsets, ranks) is deal(offsets, ranks)
    assert_even(offsets, ranks)


@pytest.mark.sampled
@pytest.mark.parametrize("length", range(1, 10))
def test_every_short_row_is_dealt_as_evenly_as_whole_tokens_allow(length: int) -> None:
    """No rank is empty, and no two ranks differ by more than a token, in every row and on every number of ranks."""
    for offsets in all_rows(length):
        for ranks in range(1, length + 1):
            assert set(dealt(offsets, ranks)[0]) == {floor(length / ranks), ceil(length / ranks)}, (offsets, ranks)


@pytest.mark.sampled
@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 16])
@pytest.mark.parametrize(
    ("tokens", "count"), [((1, 4), 60), ((4, 16), 60), ((16, 64), 60), ((64, 256), 60), ((2000, 4000), 20)]
)
def test_no_rank_has_many_more_tokens_or_pairs_than_the_mean(tokens: tuple[int, int], count: int, ranks: int) -> None:
    for offsets in rows(count, ranks, tokens):
        assert_even(offsets, ranks)


def test_two_documents_are_cut_if_one_cut_is_not_even() -> None:
    assert deal((0, 4), 4) == (((0, 1),), ((3, 4),), ((1, 2),), ((2, 3),))
    assert deal((0, 2), 2) == (((0, 1),), ((1, 2),))
    tokens, work = dealt((0, 10, 24), 2)
    assert tokens == [12, 12] and max(work) - min(work) <= 2


@pytest.mark.parametrize(("ranks", "longest", "padded"), [(2, 1.001, 1.002), (3, 1.01, 1.01), (4, 1.001, 1.01)])
def test_seven_documents_are_dealt_evenly(ranks: int, longest: float, padded: float) -> None:
    made = ring(SEVEN, ranks)
    assert 1 / made.balance < longest
    assert made.q_layout.shard * ranks / 32768 < padded


def balances(lengths: Sequence[int], ranks: int, window: int) -> list[float]:
    """Of dealt documents, and of a zigzag of documents, under a causal window."""
    offsets = offsets_of(lengths)
    visible = VisibleBand(window - 1, 0, 0, offsets)
    return [
        build_plan("ring", kind, ranks, 1, offsets[-1], offsets[-1], visible).balance
        for kind in ("documents", "zigzag")
    ]


@pytest.mark.parametrize(
    ("window", "dealt", "zigzag"), [(256, 0.997, 0.974), (1024, 0.985, 0.915), (4096, 0.957, 0.888)]
)
def test_windows_may_leave_work_more_even_than_a_zigzag(window: int, dealt: float, zigzag: float) -> None:
    actual = balances(SEVEN, 2, window)
    assert actual[0] > dealt > zigzag > actual[1]


def test_windows_may_leave_work_less_even_than_a_zigzag() -> None:
    """A row that dealing leaves more even than a zigzag, on eight ranks as even; and one whose zigzag is more even."""
    example = (9000, 8168, 6000, 4400, 3000, 2000, 200)
    assert [round(balance, 2) for balance in balances(example, 2, 4096)] == [0.98, 0.89]
    assert [round(balance, 2) for balance in balances(example, 8, 4096)] == [0.83, 0.83]
    dealt, zigzag = balances((2400, 8000, 1000, 600, 900), 2, 1900)
    assert dealt < 0.87 < 0.89 < zigzag


@given(row_of_documents, st.integers(2, 6))
def test_few_documents_are_cut(lengths: list[int], ranks: int) -> None:
    """Two cuts between a rank and those behind it, at most."""
    offsets = offsets_of(lengths)
    held = [
        {at for start, stop in rank for at in range(len(lengths)) if start < offsets[at + 1] and offsets[at] < stop}
        for rank in deal(offsets, ranks)
    ]
    assert sum(map(len, held)) - sum(length > 0 for length in lengths) <= 2 * (ranks - 1)


def test_documents_of_one_length_stay_whole() -> None:
    made = ring([256] * 16, 4)
    assert [step.shift for step in made.steps] == [0]
    assert [made.q_layout.position_count(rank) for rank in range(4)] == [1024] * 4


def test_one_long_document_is_a_zigzag() -> None:
    zigzag = build_layout("zigzag", 4096, 4)
    assert build_layout("documents", 4096, 4, 1, (0, 4096)).runs == zigzag.runs


def test_a_rank_computes_its_documents_in_one_call_without_copies() -> None:
    """In the own step all documents of a rank are one call, whose operands are its shard without the padding."""
    for made in (ring(SEVEN, 2), ring(SEVEN, 4), ring(SEVEN, 3, causal=False)):
        for rank, of_part in enumerate(made.steps[0].tiles):
            (tile,) = of_part
            for index in index_arrays.places_of_tile(tile):
                assert index_arrays.contiguous_ranges(index) == [(0, made.q_layout.position_count(rank))]


def test_a_window_may_need_three_calls() -> None:
    """The two halves of a cut document see other keys. Without a window, every step is one call."""
    found = set()
    for ranks in (2, 3, 4, 8):
        for offsets in rows(25, ranks, (200, 2000), seed=1):
            window = random.Random(offsets[-1]).randint(1, 2000)
            for left, most in ((None, 1), (window, 3)):
                visible = VisibleBand(left, 0, 0, offsets)
                made = build_plan("ring", "documents", ranks, 1, offsets[-1], offsets[-1], visible)
                calls = {len(of_part) for step in made.steps for of_part in step.tiles}
                assert max(calls) <= most, (offsets, ranks, left)
                found |= calls if left is not None else set()
    assert {1, 2, 3} <= found


def test_whole_documents_are_contiguous_behind_the_cut_ones() -> None:
    layout = ring(SEVEN, 2).q_layout
    assert layout.runs == (
        (Run(0, 3317), Run(5683, 6317), Run(20000, 6768)),
        (Run(3317, 2366), Run(12000, 8000), Run(26768, 6000)),
    )


def test_only_the_cut_document_is_sent() -> None:
    """Of rank 0 the 3317 first tokens of the document that both have, of rank 1 its 2366 tokens: as few places as have
    both, because all messages of a step have one size."""
    made = ring(SEVEN, 2)
    assert [(step.shift, step.border) for step in made.steps] == [(0, None), (1, ((0, 3317),))]
    offsets = np.array(offsets_of(SEVEN))
    for step in made.steps[1:]:
        for part, tiles in enumerate(step.tiles):
            keys = index_arrays.positions(made.key_block(step, part).runs)
            for segment in (segment for tile in tiles for segment in tile.segments):
                seen = keys[segment.k_start : segment.k_stop]
                assert set(np.searchsorted(offsets, seen, side="right") - 1) == {0}


@given(row_of_documents, st.integers(2, 5))
def test_no_hop_is_taken_that_nobody_needs(lengths: list[int], ranks: int) -> None:
    """A step is there only if two ranks that are so far apart hold one document."""
    offsets = np.array(offsets_of(lengths))
    made = ring(lengths, ranks)
    held = [
        set(np.searchsorted(offsets, index_arrays.positions(runs), side="right").tolist())
        for runs in made.q_layout.runs
    ]
    needed = {(rank - other) % ranks for rank in range(ranks) for other in range(ranks) if held[rank] & held[other]}
    assert {step.shift for step in made.steps} <= needed


@given(st.lists(st.integers(1, 9), min_size=8, max_size=20), st.sampled_from([(2, 2), (4, 2), (1, 4), (2, 3)]))
def test_two_axes_and_one_have_one_order(lengths: list[int], axes: tuple[int, int]) -> None:
    """Shards are cut before a strategy is chosen, so the order depends on the number of ranks alone."""
    offsets, world = offsets_of(lengths), axes[0] * axes[1]
    expected = build_layout("documents", offsets[-1], world, 1, offsets)
    assert build_layout("documents", offsets[-1], *axes, offsets) == expected
