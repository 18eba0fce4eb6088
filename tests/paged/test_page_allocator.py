"""Tests PageAllocator: exact refusals, tables, and what ``test_page_allocator_model`` does not see of prefixes."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from page_steps import advance

from attn_core import PageAllocator, PoolFullError, SpecError
from attn_core.paged.allocator import UNUSED
from attn_core.paged.step import take_step

PROMPT = [7, 3, 5, 2, 11, 13, 17, 19, 23]
"""Two full pages of four tokens, and one token."""


def holding(pages: int = 8, **tokens: int) -> PageAllocator:
    """Pages of four tokens, and sequences with the given numbers of tokens."""
    allocator = PageAllocator(pages, 4)
    for name, count in tokens.items():
        allocator.allocate(name, count)
    return allocator


def recorded(pages: int = 6, tokens: Any = PROMPT) -> PageAllocator:
    """A pool with pages of four tokens, and a sequence "a" whose tokens are recorded."""
    allocator = PageAllocator(pages, 4)
    assert allocator.allocate_matching("a", tokens) == 0
    allocator.extend("a", len(tokens))
    allocator.record("a", tokens)
    return allocator


def state(allocator: PageAllocator) -> Any:
    """All observable state of an allocator."""
    sequences = [(name, allocator.length(name), allocator.pages(name)) for name in allocator.sequences]
    return sequences, allocator.swapped, allocator.report(), allocator.prefix_report(), str(allocator)


@pytest.mark.parametrize("name", ["num_pages", "page_size"])
@pytest.mark.parametrize("value", [0, -1, 2.0, True, None, "8"])
def test_sizes_below_1_are_refused(name: str, value: Any) -> None:
    with pytest.raises(SpecError, match=f"^{re.escape(f'{name}={value!r}')}: expected at least 1, as an int$"):
        PageAllocator(**{"num_pages": 8, "page_size": 4, name: value})


def test_numpy_sizes_and_any_hashable_names_are_accepted() -> None:
    allocator = PageAllocator(np.int64(8), np.int32(4))
    assert (allocator.num_pages, allocator.page_size) == (8, 4) and type(allocator.num_pages) is int
    for name in (0, ("user", 3), None, "text"):
        allocator.allocate(name, 1)
        assert allocator.length(name) == 1 and name in allocator
    assert "two" not in allocator
    assert advance(allocator, [0], np.int64(2), None)[0].cu_seqlens_q.tolist() == [0, 2]


def test_the_page_freed_last_is_reused_first() -> None:
    allocator = holding(a=4, b=4)
    (page,) = allocator.free("a")
    allocator.allocate("c", 1)
    assert allocator.pages("c") == (page,)


def test_tables_of_sequences() -> None:
    allocator = holding(a=6, b=0, c=4)
    (first, second), (other,) = allocator.pages("a"), allocator.pages("c")
    table = allocator.block_table(["c", "a", "b"])
    assert table.dtype == np.int32
    assert table.tolist() == [[other, UNUSED], [first, second], [UNUSED, UNUSED]]
    assert allocator.block_table(["a"], 4).tolist() == [[first, second, UNUSED, UNUSED]]
    assert allocator.block_table([]).shape == (0, 0) and allocator.block_table([], 3).shape == (0, 3)
    lengths = allocator.seq_lens(["c", "b", "a"])
    assert lengths.dtype == np.int32 and lengths.tolist() == [4, 0, 6]


# Refusals

NOBODY, OUT = (
    "^name='x': expected the name of a sequence of this allocator",
    "^name='out': expected a sequence in the pool",
)
FULL = "6 of the pool's 12 are free; free a sequence, or make the pool larger$"
REFUSED: dict[str, tuple[Any, str]] = {
    "a name twice": (lambda a: a.allocate("a"), "^name='a': expected a new name, .*; free it first$"),
    "a fork's name twice": (lambda a: a.fork("a", "b"), "^name='b': expected a new name, .*free it first$"),
    "a prompt's name twice": (lambda a: a.allocate_matching("a", [1]), "^name='a': expected a new name"),
    "the name of a swapped sequence": (lambda a: a.allocate("out"), "^name='out': expected a new name"),
    **{
        f"{what} of nobody": (call, NOBODY)
        for what, call in {
            "a fork": lambda a: a.fork("x", "c"),
            "an extension": lambda a: a.extend("x"),
            "the length": lambda a: a.length("x"),
            "pages": lambda a: a.pages("x"),
            "freed pages": lambda a: a.free("x"),
            "a table": lambda a: a.block_table(["a", "x"]),
            "lengths": lambda a: a.seq_lens(["x"]),
            "a record": lambda a: a.record("x", [1]),
            "recorded tokens": lambda a: a.recorded("x"),
            "a swap": lambda a: a.swap_out("x"),
        }.items()
    },
    **{
        f"{what} of a swapped sequence": (call, f"{OUT}, but this one is swapped out; swap it in first$")
        for what, call in {
            "an extension": lambda a: a.extend("out"),
            "a fork": lambda a: a.fork("out", "new"),
            "a record": lambda a: a.record("out", [1]),
            "a table": lambda a: a.block_table(["out"]),
            "a step": lambda a: advance(a, ["a", "out"], 1, None),
        }.items()
    },
    **{
        f"{tokens!r} tokens": (
            lambda a, n=tokens: a.extend("a", n),
            f"^tokens={tokens!r}: expected at least 0, as an int$",
        )
        for tokens in (-1, 1.0, True, None)
    },
    "a fork of -1 tokens": (lambda a: a.fork("a", "c", -1), "^tokens=-1: expected at least 0, as an int$"),
    "a fork beyond its parent": (lambda a: a.fork("a", "c", 10), "^tokens=10: expected at most the 9 that"),
    "a narrow table": (
        lambda a: a.block_table(["a", "b"], 1),
        "^width=1: expected at least the 3 pages of the longest sequence$",
    ),
    "an allocation that does not fit": (
        lambda a: a.allocate("c", 25),
        "^'c' needs 7 more pages of 4 tokens, and " + FULL,
    ),
    "an extension that does not fit": (lambda a: a.extend("a", 28), "^'a' needs 7 more pages of 4 tokens, and " + FULL),
    "a copy that does not fit": (  # six new pages would fit, but the seventh is the copy of a shared one
        lambda a: a.extend("part", 24),
        "^'part' needs 7 more pages of 4 tokens, and " + FULL,
    ),
    "a salt of a prompt": (lambda a: a.allocate_matching("c", [1], salt=[]), r"^salt=\[\]: expected a hashable value"),
    "a salt": (lambda a: a.match([1], salt=[]), r"^salt=\[\]: expected a hashable value"),
    "a long record": (
        lambda a: a.record("a", [*PROMPT, 1]),
        "^tokens: expected at most the 9 that 'a' has, got 10$",
    ),
    "another record of a shared page": (
        lambda a: a.record("twin", [1, 2, 3, 4]),
        r"^tokens=\(1, 2, 3, 4\): expected the tokens that are recorded for",
    ),
    "a swap in of one that is there": (
        lambda a: a.swap_in("a"),
        "^name='a': expected the name of a sequence that is swapped out$",
    ),
    "a swap of a shared page": (
        lambda a: a.swap_out("twin"),
        "^name='twin': expected a sequence that shares no page, but 1 of its 1 pages",
    ),
    "a second swap": (lambda a: a.swap_out("out"), f"{OUT}, but this one is swapped out"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_change_nothing(name: str) -> None:
    call, says = REFUSED[name]
    allocator = recorded(pages=12)
    for sequence, tokens in (("b", 8), ("parent", 4), ("out", 4)):
        allocator.allocate(sequence, tokens)
    allocator.fork("parent", "twin")
    allocator.fork("b", "part", 6)
    allocator.record("parent", [9, 9, 9, 9])
    allocator.swap_out("out")
    before = state(allocator)
    with pytest.raises(PoolFullError if says.endswith(FULL) else SpecError, match=says):
        call(allocator)
    assert state(allocator) == before


def test_a_full_pool_raises_a_memory_error() -> None:
    assert issubclass(PoolFullError, MemoryError)


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
        ("a tensor", f": {NO_LIST}"),
    ],
)
def test_tokens_that_are_no_ints_are_refused(tokens: Any, says: str) -> None:
    if isinstance(tokens, str) and tokens == "a tensor":
        tokens = pytest.importorskip("torch").arange(4)
    allocator = recorded()
    allocator.allocate("b", 5)
    before = state(allocator)
    calls: tuple[Any, ...] = (
        allocator.match,
        lambda tokens: allocator.allocate_matching("c", [*tokens, 1] if isinstance(tokens, list) else tokens),
        lambda tokens: allocator.record("b", tokens),
    )
    for call in calls:
        with pytest.raises(SpecError, match=re.escape(says) + "$"):
            call(tokens)
    assert state(allocator) == before


# Found prefixes


def test_reports_of_pages_that_are_found_and_of_those_that_are_cached() -> None:
    allocator = recorded(pages=4)
    assert allocator.prefix_report().hit_rate == 0
    assert allocator.allocate_matching("b", PROMPT) == 8
    assert allocator.prefix_report().hit_rate == 0.5
    allocator.free("b")
    allocator.free("a")
    assert str(allocator).count("|####| cached") == 2 and str(allocator).count("|....| free") == 2


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


def test_numpy_arrays_are_tokens() -> None:
    allocator = recorded(tokens=np.array(PROMPT, np.uint32))
    assert allocator.match(np.array(PROMPT)).tokens == 8 == allocator.match([np.int32(each) for each in PROMPT]).tokens
    assert all(type(token) is int for token in allocator.recorded("a"))
    assert allocator.match(range(7, 8)).tokens == 0
