"""Tests prefixes that are found by their content: what is found, what is evicted, and what is refused."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from page_steps import advance

from attn_core import PageAllocator, PoolFullError, SpecError
from attn_core.paged.allocation.allocator import Copies, Match, PrefixReport
from attn_core.paged.step import take_step

PROMPT = [7, 3, 5, 2, 11, 13, 17, 19, 23]
"""Two full pages of four tokens, and one token."""


def recorded(pages: int = 6, name: Any = "a", tokens: Any = PROMPT, salt: Any = None) -> PageAllocator:
    """A pool with pages of four tokens, and a sequence whose tokens are recorded."""
    allocator = PageAllocator(pages, 4)
    start(allocator, name, tokens, salt)
    return allocator


def start(allocator: PageAllocator, name: Any, tokens: Any, salt: Any = None) -> int:
    """Starts a sequence as a server does: what is not found is computed and recorded. Returns what was found."""
    matched = allocator.allocate_matching(name, tokens, salt=salt)
    allocator.extend(name, len(tokens) - matched)
    allocator.record(name, tokens)
    return matched


def test_a_prompt_shares_the_full_pages_of_its_beginning() -> None:
    allocator = recorded()
    first, second, _ = allocator.pages("a")
    assert allocator.match(PROMPT) == Match(8, (first, second), 0)
    assert allocator.match([*PROMPT[:7], 1, 2]) == Match(4, (first,), 0)
    assert allocator.match(PROMPT[:3]) == Match(0, (), 0) == allocator.match([]) == allocator.match([1, *PROMPT])
    assert allocator.allocate_matching("b", PROMPT) == 8
    assert allocator.pages("b") == (first, second) and allocator.length("b") == 8
    assert allocator.extend("b", 3) == Copies(), "its own page"
    assert allocator.recorded("b") == tuple(PROMPT[:8])
    assert allocator.prefix_report() == PrefixReport(cached=0, hits=2, misses=2, evictions=0, evicted=())
    assert allocator.prefix_report().hit_rate == 0.5


def test_one_token_of_a_prompt_is_always_left_to_compute() -> None:
    allocator = recorded()
    assert allocator.match(PROMPT[:8]).tokens == 8
    assert allocator.allocate_matching("b", PROMPT[:8]) == 4


def test_pages_of_a_sequence_that_ended_are_found_until_they_are_taken() -> None:
    allocator = recorded(pages=4)
    first, second, third = allocator.free("a")[::-1]
    assert allocator.free_pages == 4 and allocator.prefix_report().cached == 2
    assert str(allocator).count("|####| cached") == 2 and str(allocator).count("|....| free") == 2
    allocator.allocate("b", 5)  # two pages were free of content
    assert third in allocator.pages("b") and allocator.match(PROMPT) == Match(8, (first, second), 2)
    assert start(allocator, "c", PROMPT[:6]) == 4
    assert allocator.pages("c") == (first, second) and allocator.match(PROMPT).tokens == 4
    assert allocator.prefix_report()[3:] == (1, (second,)), "the end of the text went first"


def test_the_page_that_nobody_used_for_the_longest_time_is_evicted() -> None:
    allocator = PageAllocator(3, 4)
    for number in range(3):
        start(allocator, number, [number] * 4)
    pages = [allocator.pages(number)[0] for number in range(3)]
    for number in (1, 0, 2):
        allocator.free(number)
    assert allocator.allocate_matching("again", [1] * 5) == 4  # the oldest one is in use for a while
    allocator.free("again")
    allocator.allocate("two pages", 8)
    assert allocator.prefix_report().evicted == (pages[0], pages[2])
    assert [allocator.match([number] * 4).tokens for number in range(3)] == [0, 4, 0]


def test_equal_hashes_are_different_tokens() -> None:
    one, other = [0, 1, 2, 3], [2**61 - 1, 1, 2, 3]
    assert hash(tuple(one)) == hash(tuple(other))
    allocator = recorded(tokens=one)
    assert allocator.match(other).tokens == 0 and allocator.match(one).tokens == 4


def test_a_page_is_found_only_behind_the_same_beginning_and_with_the_same_salt() -> None:
    allocator = recorded(tokens=[1, 1, 1, 1, 2, 2, 2, 2])
    assert allocator.match([2, 2, 2, 2]).tokens == 0
    start(allocator, "b", [3, 3, 3, 3, 2, 2, 2, 2])
    assert set(allocator.pages("a")).isdisjoint(allocator.pages("b"))
    assert start(allocator, "c", [1, 1, 1, 1, 2], salt="adapter") == 0
    assert allocator.match([1] * 4, salt="adapter").pages == allocator.pages("c")[:1]
    assert allocator.match([1] * 4, salt="other").tokens == 0


def test_sequences_that_compute_one_text_at_one_time() -> None:
    allocator = PageAllocator(6, 4)
    for name in "ab":
        allocator.allocate(name, 8)
    for name in "ab":
        allocator.record(name, PROMPT[:8])
    pages = allocator.pages("a")
    assert allocator.match(PROMPT).pages == pages
    allocator.free("a")
    allocator.allocate("c", 16)
    assert allocator.match(PROMPT).pages == allocator.pages("b")


def test_a_page_that_is_written_again_is_not_found() -> None:
    """The fork has a part of a full page. When its parent is gone, it writes there."""
    allocator = recorded(tokens=PROMPT[:8])
    allocator.fork("a", "b", 6)
    assert allocator.recorded("b") == tuple(PROMPT[:4])
    allocator.free("a")
    assert allocator.match(PROMPT).tokens == 8
    assert allocator.extend("b") == Copies()
    assert allocator.match(PROMPT).tokens == 4
    allocator.extend("b")
    allocator.record("b", [*PROMPT[:6], 1, 2])
    assert allocator.match([*PROMPT[:6], 1, 2]).tokens == 8 and allocator.match(PROMPT).tokens == 4


def test_a_page_that_somebody_found_is_copied_before_it_is_written() -> None:
    allocator = recorded(tokens=PROMPT[:8])
    allocator.fork("a", "b", 6)
    allocator.free("a")
    assert allocator.allocate_matching("c", PROMPT) == 8
    assert allocator.extend("b").source == allocator.pages("c")[1:]
    assert allocator.match(PROMPT).tokens == 8


def test_only_the_new_part_of_a_record_is_read() -> None:
    allocator = recorded(pages=8)
    allocator.extend("a", 7)
    allocator.record("a", [None] * 8 + [1] * 8)
    assert allocator.recorded("a") == (*PROMPT[:8], *[1] * 8)
    allocator.record("a", [])  # nothing is forgotten
    assert allocator.match([*PROMPT[:8], *[1] * 8]).tokens == 16


def test_a_sequence_of_many_pages_can_be_shown() -> None:
    """Its record has the chain of its pages, each of which has the one before it."""
    allocator = PageAllocator(num_pages=2000, page_size=1)
    allocator.allocate("a", 2000)
    allocator.record("a", range(2000))
    assert "Chain" in repr(allocator._held)


def test_a_step_that_fails_forgets_what_it_evicted() -> None:
    """The copy may have written to those pages. What it would have evicted later is still found."""
    allocator = recorded(pages=4, tokens=PROMPT[:8])
    allocator.free("a")
    allocator.allocate("b", 3)
    allocator.fork("b", "c")
    allocator.extend("c", 1)  # takes the last page without content, for a copy
    allocator.fork("b", "d")

    def fail(_: Any) -> None:
        raise MemoryError("planted")

    free = [*allocator._free]
    with pytest.raises(MemoryError, match="planted"):
        take_step(allocator, ["d"], 1, None, fail, lambda table: table)
    assert allocator.length("d") == 3 and [*allocator._free] == free
    assert allocator.match(PROMPT).tokens == 4
    step = take_step(allocator, ["d"], 1, None, lambda _: None, lambda table: table)
    assert step.block_table.tolist() == [free[:1]]


def test_a_full_pool_evicts_nothing_for_a_request_that_it_refuses() -> None:
    allocator = recorded(pages=3, tokens=PROMPT[:8])
    allocator.free("a")
    with pytest.raises(PoolFullError, match="3 of the pool's 3 are free"):
        allocator.allocate("b", 13)
    assert allocator.match(PROMPT).tokens == 8


def test_numpy_arrays_are_tokens() -> None:
    allocator = recorded(tokens=np.array(PROMPT, np.uint32))
    assert allocator.match(np.array(PROMPT)).tokens == 8 == allocator.match([np.int32(each) for each in PROMPT]).tokens
    assert all(type(token) is int for token in allocator.recorded("a"))
    assert allocator.match(range(7, 8)).tokens == 0


NO_LIST = "expected a list of token ids, or a numpy array of an integer dtype with one axis; a tensor has tolist()"


@pytest.mark.parametrize(
    ("tokens", "says"),
    [
        ([7, 3, "5", 2], "tokens[2]='5': expected the id of a token, an int"),
        ([True, 3, 5, 2], "tokens[0]=True: expected the id of a token, an int"),
        ([7, 3.0, 5, 2], "tokens[1]=3.0: expected the id of a token, an int"),
        ([7, 3, 5, 2, True], "tokens[4]=True: expected the id of a token, an int"),
        ([7, 0.5], "tokens[1]=0.5: expected the id of a token, an int"),  # no full page
        ("text", f"tokens='text': {NO_LIST}"),
        (b"text", f"tokens=b'text': {NO_LIST}"),
        (7, f"tokens=7: {NO_LIST}"),
        (None, f"tokens=None: {NO_LIST}"),
        (np.ones(4), f": {NO_LIST}"),
        (np.ones((2, 4), int), f": {NO_LIST}"),
        (torch.arange(4), f": {NO_LIST}"),
    ],
)
def test_tokens_that_are_no_ints_are_refused(tokens: Any, says: str) -> None:
    allocator = recorded()
    allocator.allocate("b", 5)
    before = allocator.prefix_report(), allocator.sequences, str(allocator)
    calls: tuple[Any, ...] = (
        allocator.match,
        lambda tokens: allocator.allocate_matching("c", [*tokens, 1] if isinstance(tokens, list) else tokens),
        lambda tokens: allocator.record("b", tokens),
    )
    for call in calls:
        with pytest.raises(SpecError, match=re.escape(says) + "$"):
            call(tokens)
    assert (allocator.prefix_report(), allocator.sequences, str(allocator)) == before


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda a: a.allocate_matching("a", [1]), "^name='a': expected a new name"),
        (lambda a: a.allocate_matching("b", [1], salt=[]), r"^salt=\[\]: expected a hashable value"),
        (lambda a: a.match([1], salt=[]), r"^salt=\[\]: expected a hashable value"),
        (lambda a: a.record("x", [1]), "^name='x': expected the name of a sequence"),
        (lambda a: a.record("a", [*PROMPT, 1]), "^tokens: expected at most the 9 that 'a' has, got 10$"),
        (lambda a: a.recorded("x"), "^name='x': expected the name of a sequence"),
        (
            lambda a: a.record("twin", [1, 2, 3, 4]),
            r"^tokens=\(1, 2, 3, 4\): expected the tokens that are recorded for",
        ),
        (lambda a: a.swap_out("x"), "^name='x': expected the name of a sequence"),
        (lambda a: a.swap_in("a"), "^name='a': expected the name of a sequence that is swapped out$"),
        (lambda a: a.swap_out("twin"), "^name='twin': expected a sequence that shares no page, but 1 of its 1 pages"),
        (lambda a: a.allocate("out"), "^name='out': expected a new name"),
        (lambda a: a.swap_out("out"), "^name='out': expected a sequence in the pool, but this one is swapped out"),
        *(
            (call, "^name='out': expected a sequence in the pool, but this one is swapped out; swap it in first$")
            for call in (
                lambda a: a.extend("out"),
                lambda a: a.fork("out", "new"),
                lambda a: a.record("out", [1]),
                lambda a: a.block_table(["out"]),
                lambda a: advance(a, ["a", "out"], 1, None),
            )
        ),
    ],
)
def test_refusals_change_nothing(call: Any, says: str) -> None:
    allocator = recorded(pages=9)
    for name in ("parent", "out"):
        allocator.allocate(name, 4)
    allocator.fork("parent", "twin")
    allocator.record("parent", [9, 9, 9, 9])
    allocator.swap_out("out")
    before = str(allocator), allocator.prefix_report(), allocator.swapped
    with pytest.raises(SpecError, match=says):
        call(allocator)
    assert (str(allocator), allocator.prefix_report(), allocator.swapped) == before


def test_a_sequence_that_is_swapped_out_keeps_its_salt() -> None:
    allocator = recorded(salt="adapter")
    tokens = allocator.recorded("a")
    allocator.swap_out("a")
    assert allocator.swapped == ("a",) and "a" not in allocator and allocator.free_pages == 6
    assert allocator.match(PROMPT, salt="adapter").tokens == 8, "its pages are cached"
    allocator.allocate("b", 12)
    pages = allocator.swap_in("a")
    assert allocator.pages("a") == pages and allocator.length("a") == 9 and allocator.recorded("a") == ()
    allocator.record("a", tokens)
    assert allocator.match(PROMPT, salt="adapter").tokens == 8 and allocator.match(PROMPT).tokens == 0
