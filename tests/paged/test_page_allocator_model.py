"""Tests PageAllocator against a small model over 50 000 random operations, with every invariant after every operation.

``test_page_allocator`` has a state machine that shrinks; this driver is plain, so that it gets far: long-lived pools,
chains of forks, and thousands of refusals.
"""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import pytest

from attn_core import SpecError
from attn_core.paged.allocator import PageAllocator, PoolFullError
from attn_core.paged.step import advance

STEPS = 50_000
NEW_POOL = 2_000
"""Operations on one pool. Pools of several sizes are full often, seldom and never."""


class Model:
    """What an allocator must do: lists of pages, and a count of the holders of each page.

    The allocator chooses free pages itself; the model takes over its choice after checking that the pages were free.
    """

    def __init__(self, random: Random) -> None:
        self.random, self.started = random, 0
        self.num_pages, self.page_size = random.choice((3, 17, 60)), random.choice((1, 3, 4, 16))
        self.allocator = PageAllocator(self.num_pages, self.page_size)
        self.pages: dict[int, list[int]] = {}
        self.lengths: dict[int, int] = {}
        self.done: Counter[str] = Counter()

    def holders(self) -> Counter[int]:
        return Counter(page for pages in self.pages.values() for page in pages)

    def free_pages(self) -> set[int]:
        return set(range(self.num_pages)) - self.holders().keys()

    def count(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def any_name(self) -> Any:
        return "nobody" if self.random.random() < 0.05 or not self.pages else self.random.choice([*self.pages])

    def refused(self, error: type[Exception], call: Any, *arguments: Any) -> None:
        """Checks that a call raises; ``check`` then shows that nothing has changed."""
        with pytest.raises(error):
            call(*arguments)
        self.done[f"refused by {error.__name__}"] += 1

    # Operations

    def allocate(self) -> None:
        tokens = self.random.choice((0, 1, self.page_size, self.random.randint(0, 40)))
        self.started += 1
        if self.pages and self.random.random() < 0.1:
            return self.refused(SpecError, self.allocator.allocate, next(iter(self.pages)), tokens)
        if self.count(tokens) > len(self.free_pages()):
            return self.refused(PoolFullError, self.allocator.allocate, self.started, tokens)
        free = self.free_pages()
        self.allocator.allocate(self.started, tokens)
        self.pages[self.started] = list(self.allocator.pages(self.started))
        self.lengths[self.started] = tokens
        assert set(self.pages[self.started]) <= free
        self.done["allocated"] += 1

    def fork(self) -> None:
        """Also how a sequence is cut: a fork of its beginning, after which the whole one is freed."""
        parent, self.started = self.any_name(), self.started + 1
        tokens = self.random.randint(0, self.lengths.get(parent, 0) + 1)
        if parent == "nobody" or tokens > self.lengths[parent]:
            return self.refused(SpecError, self.allocator.fork, parent, self.started, tokens)
        self.allocator.fork(parent, self.started, tokens)
        self.pages[self.started] = self.pages[parent][: self.count(tokens)]
        self.lengths[self.started] = tokens
        self.done["forked"] += 1

    def extend(self) -> None:
        name, tokens = self.any_name(), self.random.choice((0, 1, 1, 2, self.random.randint(-2, 20)))
        if name == "nobody" or tokens < 0:
            return self.refused(SpecError, self.allocator.extend, name, tokens)
        needed = self.needed(self.holders(), name, tokens)
        if needed > len(self.free_pages()):
            return self.refused(PoolFullError, self.allocator.extend, name, tokens)
        copies, shares = self.allocator.extend(name, tokens), self.writes_to_shared(self.holders(), name, tokens)
        self.grown(name, tokens, shares)
        assert copies.source == (tuple(self.before[-1:]) if shares else ())
        assert copies.target == (tuple(self.pages[name][len(self.before) - 1 : len(self.before)]) if shares else ())
        self.done["extended"] += 1
        self.done["copied"] += shares

    def writes_to_shared(self, holders: Counter[int], name: int, tokens: int) -> bool:
        return bool(tokens and self.lengths[name] % self.page_size and holders[self.pages[name][-1]] > 1)

    def needed(self, holders: Counter[int], name: int, tokens: int) -> int:
        more = self.count(self.lengths[name] + tokens) - self.count(self.lengths[name])
        return more + self.writes_to_shared(holders, name, tokens)

    def grown(self, name: int, tokens: int, copied: bool) -> None:
        """Takes over the pages of an extended sequence: the old ones stay, but for a copied last one."""
        free, self.before = self.free_pages(), self.pages[name]
        after = list(self.allocator.pages(name))
        kept = len(self.before) - copied
        assert after[:kept] == self.before[:kept] and set(after[kept:]) <= free
        self.pages[name], self.lengths[name] = after, self.lengths[name] + tokens

    def step(self) -> None:
        """A step of several sequences, as a cache takes it: all of them or none."""
        names = self.random.sample([*self.pages], self.random.randint(0, min(4, len(self.pages))))
        counts = [self.random.randint(0, 5) for _ in names]
        if names and self.random.random() < 0.1:
            return self.refused(SpecError, advance, self.allocator, [*names, names[0]], 1, None)
        holders, needed, copied = self.holders(), 0, []
        for name, tokens in zip(names, counts):
            copied.append(self.writes_to_shared(holders, name, tokens))
            needed += self.needed(holders, name, tokens)
            if copied[-1]:
                holders[self.pages[name][-1]] -= 1
        if needed > len(self.free_pages()):
            return self.refused(PoolFullError, advance, self.allocator, names, counts, None)
        step, copies = advance(self.allocator, names, counts, None)
        for name, tokens, copies_last in zip(names, counts, copied):
            self.grown(name, tokens, copies_last)
        assert len(copies.source) == sum(copied) == len(set(copies.target))
        assert step.seq_lens.tolist() == [self.lengths[name] for name in names]
        assert [[page for page in row if page >= 0] for row in step.block_table.tolist()] == [
            self.pages[name] for name in names
        ]
        self.done["stepped"] += 1

    def free(self) -> None:
        name = self.any_name()
        if name == "nobody":
            return self.refused(SpecError, self.allocator.free, name)
        held = set(self.pages.pop(name))
        del self.lengths[name]
        assert set(self.allocator.free(name)) == held - self.holders().keys()
        self.done["freed"] += 1

    # Invariants

    def check(self) -> None:
        """Everything observable, and the free list itself."""
        allocator, holders = self.allocator, self.holders()
        assert allocator.sequences == tuple(self.pages) and len(allocator) == len(self.pages)
        for name, pages in self.pages.items():
            assert allocator.pages(name) == tuple(pages) and allocator.length(name) == self.lengths[name]
            assert len(pages) == len(set(pages)) == self.count(self.lengths[name])
        assert allocator.free_pages == self.num_pages - len(holders)
        assert sorted(allocator._free) == sorted(self.free_pages()), "each free page once, and no page of a sequence"
        assert allocator._holders == [holders[page] for page in range(self.num_pages)]
        assert allocator.changes._last.keys() == self.pages.keys(), "nothing is kept of a freed sequence"


OPERATIONS = ("allocate", "fork", "extend", "extend", "step", "fork", "free", "free")


def test_fifty_thousand_operations_match_the_model() -> None:
    random, done = Random(0), Counter[str]()
    for start in range(0, STEPS, NEW_POOL):
        model = Model(random)
        for _ in range(start, start + NEW_POOL):
            getattr(model, random.choice(OPERATIONS))()
            model.check()
        done += model.done
        for name in list(model.pages):
            model.allocator.free(name)
        assert model.allocator.report().free == model.num_pages
    assert sum(done.values()) >= STEPS
    for what in ("allocated", "forked", "extended", "stepped", "freed", "refused by PoolFullError"):
        assert done[what] > 1000, done
    assert done["copied"] > 300, done


@pytest.mark.parametrize(
    "fault",
    ["a page that two sequences write", "a lost page", "a copy that is not made", "a refusal after a change"],
)
def test_a_planted_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if fault == "a page that two sequences write":
        monkeypatch.setattr(PageAllocator, "_take", lambda self: self._free[-1])
    elif fault == "a lost page":
        monkeypatch.setattr(PageAllocator, "_release", lambda self, page: False)
    elif fault == "a copy that is not made":
        growth = PageAllocator._growth
        monkeypatch.setattr(PageAllocator, "_growth", lambda *arguments: (False, growth(*arguments)[1]))
    else:
        room_for = PageAllocator._room_for

        def too_late(self: PageAllocator, pages: int, name: Any) -> None:
            if pages > self.free_pages and self._free:
                self._take()
            room_for(self, pages, name)

        monkeypatch.setattr(PageAllocator, "_room_for", too_late)
    random = Random(0)
    with pytest.raises((AssertionError, IndexError)):  # an empty free list is popped
        for _ in range(20):
            model = Model(random)
            for _ in range(200):
                getattr(model, random.choice(OPERATIONS))()
                model.check()
