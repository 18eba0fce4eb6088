"""Tests PageAllocator and the steps of a cache: exact refusals, and a state machine over a pool of tokens."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule
from page_steps import advance

from attn_core import SpecError
from attn_core.paged.allocation.allocator import UNUSED, Copies, PageAllocator, PoolFullError, PoolReport


def holding(**tokens: int) -> PageAllocator:
    """Eight pages of four tokens, and sequences with the given numbers of tokens."""
    allocator = PageAllocator(8, 4)
    for name, count in tokens.items():
        allocator.allocate(name, count)
    return allocator


def state(allocator: PageAllocator) -> Any:
    """All observable state of an allocator."""
    names = allocator.sequences
    return [(name, allocator.length(name), allocator.pages(name)) for name in names], allocator.report()


# Single operations


@pytest.mark.parametrize("name", ["num_pages", "page_size"])
@pytest.mark.parametrize("value", [0, -1, 2.0, True, None, "8"])
def test_sizes_below_1_are_refused(name: str, value: Any) -> None:
    with pytest.raises(SpecError, match=f"^{re.escape(f'{name}={value!r}')}: expected at least 1, as an int$"):
        PageAllocator(**{"num_pages": 8, "page_size": 4, name: value})


def test_numpy_sizes_are_accepted() -> None:
    allocator = PageAllocator(np.int64(8), np.int32(4))
    assert (allocator.num_pages, allocator.page_size) == (8, 4)
    assert type(allocator.num_pages) is int


def test_a_sequence_has_as_many_pages_as_its_tokens_need() -> None:
    allocator = holding(none=0, one=1, full=4, more=5)
    assert [len(allocator.pages(name)) for name in ("none", "one", "full", "more")] == [0, 1, 1, 2]
    assert allocator.sequences == ("none", "one", "full", "more")
    assert "one" in allocator and "two" not in allocator and len(allocator) == 4
    assert allocator.report() == PoolReport(num_pages=8, free=4, shared=0, tokens=10, waste=6)


def test_names_may_be_any_hashable_value() -> None:
    allocator = PageAllocator(8, 4)
    for name in (0, ("user", 3), None, "text"):
        allocator.allocate(name, 1)
        assert allocator.length(name) == 1


def test_extending_takes_a_page_only_if_the_last_one_is_full() -> None:
    allocator = holding(a=3)
    first = allocator.pages("a")
    assert allocator.extend("a") == Copies()
    assert allocator.pages("a") == first
    assert allocator.extend("a", 5) == Copies()
    assert allocator.pages("a")[:1] == first and len(allocator.pages("a")) == 3
    assert allocator.extend("a", 0) == Copies()
    assert allocator.length("a") == 9


def test_a_fork_shares_pages_and_copies_them_on_write() -> None:
    allocator = holding(a=6)
    allocator.fork("a", "b")
    assert allocator.pages("b") == allocator.pages("a")
    assert allocator.report() == PoolReport(8, 6, 2, 6, 2)
    shared = allocator.pages("a")
    copies = allocator.extend("b")
    assert copies == Copies((shared[1],), allocator.pages("b")[1:])
    assert allocator.pages("b")[0] == shared[0] and allocator.pages("b")[1] not in shared
    assert allocator.extend("a") == Copies(), "the page is its own by now"
    assert allocator.pages("a") == shared


def test_a_fork_of_a_prefix_that_fills_its_pages_is_not_copied() -> None:
    allocator = holding(a=8)
    allocator.fork("a", "b", 4)
    assert allocator.extend("b", 2) == Copies()
    assert allocator.pages("b")[0] == allocator.pages("a")[0] and len(allocator.pages("b")) == 2


def test_a_shorter_fork_that_outlives_its_parent_keeps_no_more_than_its_pages() -> None:
    allocator = holding(a=11)
    allocator.fork("a", "b", 5)
    pages = allocator.pages("a")
    assert allocator.free("a") == pages[2:]
    assert allocator.extend("b") == Copies(), "nobody else holds the page"
    assert allocator.report() == PoolReport(8, 6, 0, 6, 2)
    assert sorted(allocator.free("b")) == sorted(pages[:2])
    assert allocator.report() == PoolReport(8, 8, 0, 0, 0)


def test_the_page_freed_last_is_reused_first() -> None:
    allocator = holding(a=4, b=4)
    (page,) = allocator.free("a")
    allocator.allocate("c", 1)
    assert allocator.pages("c") == (page,)


FULL = "free a sequence, or make the pool larger$"
REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "a name twice": (lambda a: a.allocate("a"), SpecError, "^name='a': expected a new name, .*; free it first$"),
    "a fork's name twice": (lambda a: a.fork("a", "b"), SpecError, "^name='b': expected a new name, .*free it first$"),
    "an unknown parent": (
        lambda a: a.fork("x", "c"),
        SpecError,
        "^name='x': expected the name of a sequence of this allocator",
    ),
    "an unknown name": (lambda a: a.extend("x"), SpecError, "^name='x': expected the name of a sequence of"),
    "a length of nobody": (lambda a: a.length("x"), SpecError, "^name='x': "),
    "pages of nobody": (lambda a: a.pages("x"), SpecError, "^name='x': "),
    "freed twice": (lambda a: (a.free("c"), a.free("c")), SpecError, "^name='c': expected the name of a sequence"),
    "a table of nobody": (lambda a: a.block_table(["a", "x"]), SpecError, "^name='x': "),
    "lengths of nobody": (lambda a: a.seq_lens(["x"]), SpecError, "^name='x': "),
    "a fork beyond its parent": (
        lambda a: a.fork("a", "c", 7),
        SpecError,
        "^tokens=7: expected at most the 6 that",
    ),
    **{
        f"{tokens!r} tokens": (
            lambda a, tokens=tokens: a.extend("a", tokens),
            SpecError,
            f"^tokens={tokens!r}: expected at least 0, as an int$",
        )
        for tokens in (-1, 1.0, True, None)
    },
    "a fork of -1 tokens": (lambda a: a.fork("a", "c", -1), SpecError, "^tokens=-1: expected at least 0, as an int$"),
    "a narrow table": (
        lambda a: a.block_table(["a", "b"], 1),
        SpecError,
        "^width=1: expected at least the 2 pages of the longest sequence$",
    ),
    "an allocation that does not fit": (
        lambda a: a.allocate("c", 17),
        PoolFullError,
        "^'c' needs 5 more pages of 4 tokens, and 4 of the pool's 8 are free; " + FULL,
    ),
    "an extension that does not fit": (
        lambda a: a.extend("a", 19),
        PoolFullError,
        "^'a' needs 5 more pages of 4 tokens, and 4 of the pool's 8 are free; " + FULL,
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_change_nothing(name: str) -> None:
    call, error, says = REFUSED[name]
    allocator = holding(a=6, b=8)
    if name == "freed twice":
        allocator.allocate("c", 3)
    before = state(allocator)
    with pytest.raises(error, match=says):
        call(allocator)
    if name != "freed twice":
        assert state(allocator) == before
    allocator.allocate("later", 16)  # a freed name is free again


def test_a_full_pool_raises_a_memory_error() -> None:
    assert issubclass(PoolFullError, MemoryError)


def test_a_copy_counts_as_a_page() -> None:
    allocator = PageAllocator(2, 4)
    allocator.allocate("a", 6)
    allocator.fork("a", "b")
    before = state(allocator)
    with pytest.raises(PoolFullError, match=r"^'b' needs 1 more pages of 4 tokens, and 0 of the pool's 2 are free"):
        allocator.extend("b")
    assert state(allocator) == before
    assert allocator.extend("b", 0) == Copies(), "nothing is written, so nothing is copied"


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


# Steps of several sequences


def test_a_step_of_one_token_each_has_no_offsets() -> None:
    allocator = holding(a=4, b=2)
    step, copies = advance(allocator, ["b", "a"], 1, None)
    assert copies == Copies()
    assert step.seq_lens.tolist() == [3, 5] and step.cu_seqlens_q is None and step.max_len_q == 1
    assert step.block_table.tolist() == allocator.block_table(["b", "a"]).tolist()
    assert set(step.tables) == {"block_table", "seq_lens", "cu_seqlens_q"}


def test_a_step_of_several_tokens_has_offsets() -> None:
    allocator = holding(a=4, b=2, c=0)
    step, _ = advance(allocator, ["a", "b", "c"], [5, 0, 3], 6)
    assert step.cu_seqlens_q.tolist() == [0, 5, 5, 8] and step.cu_seqlens_q.dtype == np.int32
    assert step.seq_lens.tolist() == [9, 2, 3] and step.max_len_q == 5 and step.block_table.shape == (3, 6)
    step, _ = advance(allocator, ["a"], np.int64(2), None)
    assert step.cu_seqlens_q.tolist() == [0, 2]


def test_all_but_one_of_the_sequences_that_share_a_page_get_a_copy() -> None:
    allocator = PageAllocator(3, 4)
    allocator.allocate("a", 3)
    allocator.fork("a", "b")
    allocator.fork("a", "c")
    (page,) = allocator.pages("a")
    assert allocator.needed({"a": 1, "b": 1, "c": 1}) == 2
    _, copies = advance(allocator, ["a", "b", "c"], 1, None)
    assert copies.source == (page, page) and len({*copies.target, page}) == 3
    assert allocator.report() == PoolReport(3, 0, 0, 12, 0)


@pytest.mark.parametrize(
    ("names", "new", "width", "error", "says"),
    [
        ({"a"}, 1, None, SpecError, r"^names=\{.*\}: expected a list of names, in .* order .*, got builtins.set$"),
        ({"a": 1, "b": 2}, 1, None, SpecError, r"^names=\{.*\}: expected a list of names, .*, got builtins.dict$"),
        (
            ["a", "b"],
            {1, 2},
            None,
            SpecError,
            r"^new=\{1, 2\}: expected a number of tokens, or a list of one for each, got builtins.set$",
        ),
        (["a", "b"], [1], None, SpecError, r"^names, new: expected a count for each of 2 sequences, .*, got \[1\]$"),
        (["a", "a"], 1, None, SpecError, "each named once"),
        (["a", "x"], 1, None, SpecError, "^name='x': "),
        (["a", "b"], [1, -1], None, SpecError, "^tokens=-1: "),
        (["b", "a"], [4, 17], None, PoolFullError, "^names: this step needs 5 more pages of 4 tokens, but only 4"),
        (["b", "a"], [1, 3], 2, SpecError, "^width=2: expected at least the 3 pages of the longest sequence$"),
    ],
)
def test_refused_steps_change_nothing(names: Any, new: Any, width: Any, error: Any, says: str) -> None:
    allocator = holding(a=6, b=8)
    before = state(allocator)
    with pytest.raises(error, match=says):
        advance(allocator, names, new, width)
    assert state(allocator) == before


# Any order of operations

FREED = -1
"""The content of a page that nobody holds."""


class Pool(RuleBasedStateMachine):
    """An allocator, a pool of token ids that is written and copied as the allocator says, and lists of the expected
    ids.

    Every token has its own id. A leaked page, a page with two owners of whom one writes, or a missing copy shows as a
    wrong id. A free page holds no id.
    """

    names = Bundle("names")

    @initialize(num_pages=st.integers(1, 12), page_size=st.sampled_from([1, 2, 3, 4]))
    def start(self, num_pages: int, page_size: int) -> None:
        self.allocator = PageAllocator(num_pages, page_size)
        self.pool = np.full((num_pages, page_size), FREED)
        self.tokens: dict[int, list[int]] = {}
        self.started = self.written = 0

    def write(self, name: int, count: int) -> None:
        """Writes new tokens at the end of a sequence, in the places that its pages name."""
        ids = list(range(self.written, self.written + count))
        self.written += count
        pages, length = self.allocator.pages(name), len(self.tokens[name])
        for position, token in enumerate(ids, start=length):
            page, offset = divmod(position, self.allocator.page_size)
            self.pool[pages[page], offset] = token
        self.tokens[name] += ids

    def copy(self, copies: Copies) -> None:
        assert not set(copies.target) & set(copies.source)
        assert len(set(copies.target)) == len(copies.target)
        self.pool[list(copies.target)] = self.pool[list(copies.source)]

    def free_pages(self) -> int:
        held = {page for name in self.tokens for page in self.allocator.pages(name)}
        return self.allocator.num_pages - len(held)

    def in_last_page(self, name: int) -> int:
        return len(self.tokens[name]) % self.allocator.page_size

    def pages_needed(self, counts: dict[int, int]) -> int:
        """The free pages that a step takes, counted sequence by sequence."""
        holders: dict[int, int] = {}
        for name in self.tokens:
            for page in self.allocator.pages(name):
                holders[page] = holders.get(page, 0) + 1
        pages_needed = 0
        for name, count in counts.items():
            pages = self.allocator.pages(name)
            pages_needed += -(-(len(self.tokens[name]) + count) // self.allocator.page_size) - len(pages)
            if count and self.in_last_page(name) and holders[pages[-1]] > 1:
                holders[pages[-1]] -= 1
                pages_needed += 1
        return pages_needed

    @rule(target=names, tokens=st.integers(0, 9))
    def allocate(self, tokens: int) -> Any:
        name = self.started
        self.started += 1
        before = state(self.allocator)
        if -(-tokens // self.allocator.page_size) > self.free_pages():
            with pytest.raises(PoolFullError):
                self.allocator.allocate(name, tokens)
            assert state(self.allocator) == before
            return multiple()
        self.allocator.allocate(name, tokens)
        assert (self.pool[list(self.allocator.pages(name))] == FREED).all(), "a page that somebody holds"
        self.tokens[name] = []
        self.write(name, tokens)
        return name

    @rule(target=names, parent=names, part=st.floats(0, 1))
    def fork(self, parent: int, part: float) -> int:
        name = self.started
        self.started += 1
        count = round(part * len(self.tokens[parent]))
        self.allocator.fork(parent, name, None if part == 1 else count)
        self.tokens[name] = self.tokens[parent][:count]
        return name

    @rule(name=names, tokens=st.integers(0, 7))
    def extend(self, name: int, tokens: int) -> None:
        before, fits = state(self.allocator), self.pages_needed({name: tokens}) <= self.free_pages()
        assert (self.allocator.needed({name: tokens}) <= self.free_pages()) is fits
        if not fits:
            with pytest.raises(PoolFullError):
                self.allocator.extend(name, tokens)
            assert state(self.allocator) == before
            return
        self.copy(self.allocator.extend(name, tokens))
        self.write(name, tokens)

    @rule(data=st.data(), one_each=st.booleans(), more_columns=st.integers(0, 2))
    def step(self, data: Any, one_each: bool, more_columns: int) -> None:
        """One step of several sequences in any order, as a cache does it."""
        named = data.draw(st.lists(st.sampled_from(sorted(self.tokens)), unique=True) if self.tokens else st.just([]))
        counts = [1 if one_each else data.draw(st.integers(0, 5)) for _ in named]
        pages_needed = self.pages_needed(dict(zip(named, counts)))
        assert self.allocator.needed(dict(zip(named, counts))) == pages_needed
        after = [len(self.tokens[name]) + count for name, count in zip(named, counts)]
        width = -(-max(after, default=0) // self.allocator.page_size)
        width, before = width + more_columns, state(self.allocator)
        if pages_needed > self.free_pages():
            with pytest.raises(PoolFullError):
                advance(self.allocator, named, counts, width)
            assert state(self.allocator) == before
            return
        made, copies = advance(self.allocator, named, 1 if one_each else counts, width)
        self.copy(copies)
        for name, count in zip(named, counts):
            self.write(name, count)
        assert made.block_table.shape == (len(named), width)
        assert made.seq_lens.tolist() == [len(self.tokens[name]) for name in named]
        for row, name in zip(made.block_table.tolist(), named):
            pages = list(self.allocator.pages(name))
            assert row == pages + [UNUSED] * (width - len(pages))
        offsets = list(range(len(named) + 1)) if made.cu_seqlens_q is None else made.cu_seqlens_q.tolist()
        assert np.diff(offsets).tolist() == counts and offsets[0] == 0
        assert made.max_len_q == max(counts, default=0)

    @rule(name=consumes(names))
    def free(self, name: int) -> None:
        held = set(self.allocator.pages(name))
        del self.tokens[name]
        others = {page for other in self.tokens for page in self.allocator.pages(other)}
        freed = self.allocator.free(name)
        assert sorted(freed) == sorted(held - others)
        self.pool[list(freed)] = FREED

    @invariant()
    def every_token_is_in_its_place(self) -> None:
        for name, ids in self.tokens.items():
            pages = self.allocator.pages(name)
            assert len(pages) == -(-len(ids) // self.allocator.page_size) and self.allocator.length(name) == len(ids)
            assert self.pool[list(pages)].ravel()[: len(ids)].tolist() == ids, name

    @invariant()
    def the_report_is_correct(self) -> None:
        actual, page_size = self.allocator.report(), self.allocator.page_size
        pages = [page for name in self.tokens for page in self.allocator.pages(name)]
        held = set(pages)
        filled = {
            (page, offset)
            for name, ids in self.tokens.items()
            for at, page in enumerate(self.allocator.pages(name))
            for offset in range(min(page_size, len(ids) - at * page_size))
        }
        shared = sum(pages.count(page) > 1 for page in held)
        waste = len(held) * page_size - len(filled)
        free = self.allocator.num_pages - len(held)
        assert actual == PoolReport(self.allocator.num_pages, free, shared, len(filled), waste)
        assert actual.waste <= (page_size - 1) * len(self.tokens), "less than a page for each sequence"
        assert actual.free + len(held) == actual.num_pages

    def teardown(self) -> None:
        if hasattr(self, "allocator"):  # a run may stop before it starts
            for name in list(self.tokens):
                self.free(name)
            assert self.allocator.report() == PoolReport(self.allocator.num_pages, self.allocator.num_pages, 0, 0, 0)
            assert len(self.allocator) == 0
            self.allocator.allocate("all", self.allocator.num_pages * self.allocator.page_size)


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=100, stateful_step_count=40)
