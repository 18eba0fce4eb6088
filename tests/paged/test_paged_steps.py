"""Tests steps of a paged cache: a stale step is refused before it writes, and a failed step changes nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from frameworks import ALL, Framework, as_numpy
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from interruptions import count_lines, interrupted_at
from page_steps import advance

from attn_core import SpecError
from attn_core.paged import step as book
from attn_core.paged.allocator import PageAllocator, PoolFullError

FRAMEWORKS = [each for each in ALL if each.device == "cpu"]
NAMES = "abcd"


def cache_of(framework: Framework, pages: int = 6, page_size: int = 2) -> Any:
    return framework.frontend.PagedKVCache(
        num_layers=1, num_pages=pages, page_size=page_size, kv_heads=1, head_dim=1, value_dim=1
    )


def state_of(cache: Any) -> Any:
    """All state that a failed step must not change."""
    allocator = cache.allocator
    names = [(name, allocator.length(name), allocator.pages(name)) for name in allocator.sequences]
    return names, list(allocator._free), list(allocator._holders), as_numpy(cache.k_pages[0]).tolist()


def write(framework: Framework, cache: Any, step: Any, ids: list[int]) -> None:
    k = framework.array(np.array(ids, np.float32).reshape(-1, 1, 1))
    cache.update(0, k, k, step)


class Steps(RuleBasedStateMachine):
    """A cache, and lists of the token ids that each sequence must hold.

    A step is open until one of its sequences is freed, forked or stepped again. An open step writes. A stale step
    raises, and the pool keeps its bits. Tokens that no update wrote are None: nothing is expected of them.
    """

    framework: Framework

    @initialize(page_size=st.integers(1, 3))
    def start(self, page_size: int) -> None:
        self.cache = cache_of(self.framework, page_size=page_size)
        self.tokens: dict[str, list[int | None]] = {}
        self.steps: list[tuple[Any, dict[str, tuple[int, int]]]] = []
        self.stale: dict[int, tuple[str, str]] = {}
        self.written = 0

    def changed(self, name: str, how: str) -> None:
        for at, (_, places) in enumerate(self.steps):
            if name in places:
                self.stale.setdefault(at, (name, how))

    @rule(name=st.sampled_from(NAMES))
    def add(self, name: str) -> None:
        if name in self.tokens:
            with pytest.raises(SpecError, match="expected a new name"):
                self.cache.add(name)
        else:
            self.cache.add(name)
            self.tokens[name] = []

    @rule(parent=st.sampled_from(NAMES), name=st.sampled_from(NAMES), part=st.floats(0, 1))
    def fork(self, parent: str, name: str, part: float) -> None:
        if parent not in self.tokens or name in self.tokens:
            return
        count = round(part * len(self.tokens[parent]))
        self.cache.fork(parent, name, count)
        self.tokens[name] = self.tokens[parent][:count]
        self.changed(parent, "forked")

    @rule(name=st.sampled_from(NAMES))
    def free(self, name: str) -> None:
        if name in self.tokens:
            self.cache.free(name)
            del self.tokens[name]
            self.changed(name, "freed")

    @rule(names=st.lists(st.sampled_from(NAMES), min_size=1, unique=True), data=st.data(), update=st.booleans())
    def step(self, names: list[str], data: Any, update: bool) -> None:
        counts = [data.draw(st.integers(0, 3)) for _ in names]
        bad = data.draw(st.sampled_from([None, None, None, 2.0, "3", True, -1, 10**12]))
        before = state_of(self.cache)
        try:
            made = self.cache.step(names, counts, width=bad)
        except (SpecError, PoolFullError):
            assert state_of(self.cache) == before
            return
        assert bad is None and all(name in self.tokens for name in names)
        for name in names:
            self.changed(name, "stepped again")
        places = {}
        for name, count in zip(names, counts, strict=True):
            places[name] = (len(self.tokens[name]), count)
            self.tokens[name] += [None] * count
        self.steps.append((made, places))
        if update:
            self.update(len(self.steps) - 1)

    @rule(at=st.integers(0, 30))
    def update_some(self, at: int) -> None:
        if self.steps:
            self.update(at % len(self.steps))

    def update(self, at: int) -> None:
        made, places = self.steps[at]
        ids = [self.written + i + 1 for i in range(sum(count for _, count in places.values()))]
        if at in self.stale:
            before = state_of(self.cache)
            for use in (lambda: write(self.framework, self.cache, made, ids), lambda: self.cache.attend(0, None, made)):
                with pytest.raises(SpecError, match=r"^step: sequence '[abcd]' was (freed|forked|stepped again) after"):
                    use()
            assert state_of(self.cache) == before
            return
        write(self.framework, self.cache, made, ids)
        for name, (start, count) in places.items():
            self.tokens[name][start : start + count] = [self.written + i + 1 for i in range(count)]
            self.written += count

    @invariant()
    def every_written_token_is_in_its_place(self) -> None:
        if not hasattr(self, "cache"):
            return
        pool = as_numpy(self.cache.k_pages[0])
        for name, ids in self.tokens.items():
            held = pool[list(self.cache.allocator.pages(name))].ravel()[: len(ids)].tolist()
            assert [actual for actual, expected in zip(held, ids, strict=True) if expected is not None] == [
                expected for expected in ids if expected is not None
            ], name


class InTorch(Steps):
    framework = FRAMEWORKS[0]


class InJax(Steps):
    framework = FRAMEWORKS[1]


TestTorch, TestJax = InTorch.TestCase, InJax.TestCase
TestTorch.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestJax.settings = settings(max_examples=8, stateful_step_count=15, deadline=None)


CHANGES: dict[str, Any] = {
    "freed": lambda c: c.free("a"),
    "freed and added again": lambda c: (c.free("a"), c.add("a"), c.step(["a"], 2)),
    "forked": lambda c: c.fork("a", "c"),
    "stepped again": lambda c: c.step(["b", "a"]),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("framework", FRAMEWORKS, ids=str)
def test_a_stale_step_names_the_sequence_and_what_changed_it(framework: Framework, change: str) -> None:
    cache = cache_of(framework)
    cache.add("a")
    cache.add("b")
    step = cache.step(["a"], 3)
    cache.step(["b"], 1)  # a step of another sequence changes nothing for this one
    write(framework, cache, step, [1, 2, 3])
    CHANGES[change](cache)
    before = state_of(cache)
    for use in (lambda: write(framework, cache, step, [7, 8, 9]), lambda: cache.check(step)):
        with pytest.raises(SpecError, match=rf"^step: sequence 'a' was {change.split(' and')[0]} after this step"):
            use()
    assert state_of(cache) == before


@pytest.mark.parametrize("framework", FRAMEWORKS, ids=str)
def test_a_step_of_another_cache_is_refused(framework: Framework) -> None:
    one, other = cache_of(framework), cache_of(framework)
    one.add("a")
    other.add("a")
    step = one.step(["a"])
    other.step(["a"])
    with pytest.raises(SpecError, match=r"^step: expected a step of this cache"):
        write(framework, other, step, [1])
    with pytest.raises(SpecError, match=r"^step: expected a result of cache\.step"):
        write(framework, one, ("a",), [1])  # type: ignore[arg-type]


LIST, COUNTS = (
    "expected a list of names, in .* order .*, got builtins",
    "expected a number of tokens, or a list of one for each",
)
BAD_STEPS: dict[str, tuple[Any, Any, Any, str]] = {
    "a width of 2.0": (["a"], 1, 2.0, "^width=2.0: expected "),
    "a width of 10**12": (["a"], 1, 10**12, "^width=1000000000000: expected at most 1073741823 columns"),
    "a width of -1": (["a"], 1, -1, "^width=-1: expected "),
    "a width of True": (["a"], 1, True, "^width=True: expected "),
    "a narrow width": (["b", "a"], [1, 3], 2, "^width=2: expected at least the 3 pages of the longest sequence$"),
    "a negative width": (["a"], 1, -1, r"^width=-1: expected at least the \d pages of the longest sequence$"),
    "a fraction as width": (
        ["a"],
        1,
        3.5,
        r"^width=3\.5: expected at least the \d pages of the .* sequence, as an int$",
    ),
    "a huge width": (["a"], 1, 2**31, r"^width=2147483648: expected at most \d+ columns, because"),
    "out of pages": (["b", "a"], [2, 9], None, "^names: this step needs 5 more pages of 2 tokens, but only 3"),
    "more tokens than int32 counts": (["b", "a"], 10**12, None, "^tokens=1000000000000: expected at most 2147483647$"),
    "counts of a wrong type": (["b", "a"], [1, 1.0], None, "^tokens=1.0: expected at least 0, as an int$"),
    "a negative count": (["b", "a"], [1, -1], None, "^tokens=-1: expected at least 0, as an int$"),
    "a count of 1.0": (["a"], 1.0, None, f"^new=1.0: {COUNTS}, got builtins.float$"),
    "a count of a word": (["a"], "1", None, f"^new='1': {COUNTS}, got builtins.str$"),
    "counts in a set": (["a", "b"], {1, 2}, None, rf"^new=\{{1, 2\}}: {COUNTS}, got builtins.set$"),
    "too few counts": (["a", "b"], [1], None, r"^names, new: expected a count for each of 2 sequences, .*, got \[1\]$"),
    "names that are one word": ("ab", 1, None, f"^names='ab': {LIST}.str$"),
    "names that are a number": (5, 1, None, f"^names=5: {LIST}.int$"),
    "names in a set": ({"a"}, 1, None, rf"^names=\{{'a'\}}: {LIST}.set$"),
    "names in a dict": ({"a": 1, "b": 2}, 1, None, rf"^names=\{{.*\}}: {LIST}.dict$"),
    "a name twice": (["a", "a"], 1, None, "each named once"),
    "a name that cannot be hashed": (
        [["a"]],
        1,
        None,
        r"^names=\['a'\]: expected a hashable value, got builtins.list$",
    ),
    "an unknown name behind a known one": (["a", "x"], 1, None, "^name='x': expected the name of a sequence of this"),
}


@pytest.mark.parametrize("case", BAD_STEPS)
@pytest.mark.parametrize("framework", FRAMEWORKS, ids=str)
def test_a_failed_step_changes_nothing(framework: Framework, case: str) -> None:
    cache = cache_of(framework)
    for name in "ab":
        cache.add(name)
    kept = cache.step(["a", "b"], [3, 1])
    names, new, width, says = BAD_STEPS[case]
    before = state_of(cache)
    with pytest.raises(PoolFullError if case == "out of pages" else SpecError, match=says):
        cache.step(names, new, width=width)
    assert state_of(cache) == before
    cache.check(kept)  # and the step before it is still open


@pytest.mark.parametrize("fails", ["copy", "there"])
def test_a_step_that_fails_on_the_device_is_undone(fails: str) -> None:
    allocator = PageAllocator(6, 2)
    allocator.allocate("a", 3)
    allocator.fork("a", "b")
    allocator.fork("a", "c")

    def state() -> Any:
        names = [(name, allocator.length(name), allocator.pages(name)) for name in allocator.sequences]
        return names, list(allocator._free), list(allocator._holders)

    def fail(_: Any) -> Any:
        raise MemoryError("the device is full")

    before = state()
    with pytest.raises(MemoryError, match="the device is full"):
        book.take_step(
            allocator,
            ["c", "a", "b"],
            [1, 2, 1],
            None,
            *((fail, lambda t: t) if fails == "copy" else (lambda _: None, fail)),
        )
    assert state() == before


def test_a_step_interrupted_anywhere_is_complete_or_undone() -> None:
    """Also between the changes of its two sequences, and in the middle of the books of pages."""

    def pool() -> PageAllocator:
        allocator = PageAllocator(8, 4)
        for name in "ab":
            allocator.allocate(name, 3)
        allocator.fork("a", "c")
        return allocator

    def step(allocator: PageAllocator) -> None:
        advance(allocator, ["a", "b"], [6, 5], None)

    def state(allocator: PageAllocator) -> Any:
        names = [(name, allocator.length(name), allocator.pages(name)) for name in allocator.sequences]
        return names, sorted(allocator._free), list(allocator._holders)

    before, done = state(pool()), pool()
    step(done)
    for at in range(1, count_lines(lambda: step(pool())) + 1):
        allocator = pool()
        with interrupted_at(at):
            step(allocator)
        assert state(allocator) in (before, state(done)), at
