"""Tests PageAllocator against a small model over 50 000 random operations, with every invariant after every operation.

The driver is plain, so that it gets far: long-lived pools, chains of forks, and thousands of refusals.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from random import Random
from typing import Any

import numpy as np
import pytest
from page_steps import advance

from attn_core import SpecError
from attn_core.paged import allocator
from attn_core.paged.allocator import (
    UNUSED,
    Chain,
    Growth,
    PageAllocator,
    PageContents,
    PoolFullError,
    PoolReport,
    pages_of_tokens,
)

TOKENS = (0, 1, 2**61 - 1)
"""The first and the last have one hash, so pages of them collide."""

POOLS = (3, 17, 60)
"""Numbers of pages. The pools are full often, seldom and never."""
SMALL_POOLS = range(1, 13)

Text = tuple[int, ...]


class Model:
    """What an allocator must do: lists of pages, a count of the holders of each page, and the tokens in each page.

    The allocator chooses pages itself. The model takes over its choice after checking that the pages were free, and
    that cached pages were taken last, the oldest first.

    A place of the pool contains the salt and all tokens up to it, because the keys of a token depend on all of these.
    So a page that is found by mistake, or overwritten while others read it, shows as wrong content.
    """

    def __init__(self, random: Random, num_pages: int) -> None:
        self.random, self.started = random, 0
        self.num_pages, self.page_size = num_pages, random.choice((1, 2, 3, 4, 16))
        self.allocator = PageAllocator(self.num_pages, self.page_size)
        self.pages: dict[int, list[int]] = {}
        self.lengths: dict[int, int] = {}
        self.done: Counter[str] = Counter()
        self.texts: dict[int, Text] = {}
        self.salts: dict[int, Any] = {}
        self.past: list[tuple[Any, Text]] = [(None, ())]  # whose beginnings later prompts repeat
        self.pool: list[list[Any]] = [[None] * self.page_size for _ in range(self.num_pages)]
        self.contents: dict[
            int, tuple[Any, Text]
        ] = {}  # by page: what is recorded of it, from the beginning of the text
        self.recorded: dict[int, int] = {}  # by sequence, its full pages that are recorded
        self.idle: list[int] = []
        self.swapped: dict[int, tuple[Any, Text, int]] = {}
        self.gone: list[Any] = ["nobody"]  # names of no sequence
        self.hits = self.misses = 0
        self.evicted: list[int] = []

    def drawn_text(self, count: int) -> Text:
        return tuple(self.random.choice(TOKENS) for _ in range(count))

    def holders(self) -> Counter[int]:
        return Counter(page for pages in self.pages.values() for page in pages)

    def free_pages(self) -> set[int]:
        return set(range(self.num_pages)) - self.holders().keys()

    def count(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def any_name(self) -> Any:
        if self.swapped and self.random.random() < 0.05:
            return self.random.choice([*self.swapped])
        names = self.gone if self.random.random() < 0.05 or not self.pages else [*self.pages]
        return self.random.choice(names)

    def start(self, name: int, pages: list[int], text: Text, salt: Any, recorded: int) -> None:
        self.pages[name], self.texts[name], self.salts[name] = pages, text, salt
        self.lengths[name], self.recorded[name] = len(text), recorded

    def take(self, pages: list[int], free: set[int]) -> None:
        """Checks that free pages are taken before cached ones, and these in order; their content is gone then."""
        for page in pages:
            assert page in free, "a page of a sequence, or one that was taken twice"
            free.discard(page)
            if page in self.idle:
                assert not free - set(self.idle), "a cached page while others are free"
                assert self.idle.pop(0) == page, "not the cached page that is unused for the longest time"
                self.evict(page)

    def evict(self, page: int) -> None:
        if page in self.contents:
            self.evicted.append(page)
            self.forget(page)

    def forget(self, page: int) -> None:
        content = self.contents.pop(page, None)
        if content is not None and content not in self.contents.values():
            # What continues the page cannot be found without it.
            salt, text = content
            for other, (its, tokens) in list(self.contents.items()):
                if its == salt and tokens[: len(text)] == text:
                    del self.contents[other]

    def release(self, pages: list[int], holders: Counter[int]) -> set[int]:
        """The pages that nobody has any more; those with known content are cached, the last ones of a text first."""
        freed = [page for page in reversed(pages) if not holders[page]]
        self.idle += [page for page in freed if page in self.contents]
        return set(freed)

    def write(self, name: int, start: int) -> None:
        """Writes a sequence's tokens from ``start`` on."""
        for at in range(start, len(self.texts[name])):
            page, place = divmod(at, self.page_size)
            self.pool[self.pages[name][page]][place] = (self.salts[name], self.texts[name][: at + 1])

    def copy(self, copies: Any) -> None:
        assert not set(copies.source) & set(copies.target)
        for source, target in zip(*copies, strict=True):
            self.pool[target] = list(self.pool[source])

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
        pages = list(self.allocator.pages(self.started))
        self.take(pages, free)
        self.start(self.started, pages, self.drawn_text(tokens), None, 0)
        self.write(self.started, 0)
        self.done["allocated"] += 1

    def allocate_matching(self) -> None:
        """A prompt that may begin as an earlier text does."""
        salt, past = self.random.choice(self.past)
        prompt = past[: self.random.randint(0, len(past))] + self.drawn_text(self.random.randint(0, 5))
        salt = salt if self.random.random() < 0.9 else self.random.choice((None, "adapter"))
        self.started += 1
        full = 0
        while (salt, prompt[: (full + 1) * self.page_size]) in self.contents.values():
            full += 1
            if (full + 1) * self.page_size > len(prompt):
                break
        match = self.allocator.match(prompt, salt=salt)
        assert match.tokens == full * self.page_size and len(match.pages) == full
        assert match.cached == len(set(match.pages) & set(self.idle))
        most = max(len(prompt) - 1, 0) // self.page_size
        tokens = self.allocator.allocate_matching(self.started, prompt, salt=salt)
        pages = list(self.allocator.pages(self.started))
        assert pages == list(match.pages)[:most] and tokens == len(pages) * self.page_size
        self.idle = [page for page in self.idle if page not in pages]
        self.hits, self.misses = self.hits + len(pages), self.misses + most - len(pages)
        self.start(self.started, pages, prompt[:tokens], salt, len(pages))
        self.done["found"] += bool(pages)
        self.done["not found"] += not pages

    def record(self) -> None:
        name = self.any_name()
        if name not in self.pages:
            return self.refused(SpecError, self.allocator.record, name, [1])
        text, count = self.texts[name], self.random.randint(0, self.lengths[name] + 1)
        if count > len(text):
            return self.refused(SpecError, self.allocator.record, name, [*text, 1])
        self.allocator.record(name, text[:count])
        for at in range(self.recorded[name], count // self.page_size):
            self.contents[self.pages[name][at]] = (self.salts[name], text[: (at + 1) * self.page_size])
        self.recorded[name] = max(self.recorded[name], count // self.page_size)
        assert self.allocator.recorded(name) == text[: self.recorded[name] * self.page_size]
        self.past = [*self.past[-20:], (self.salts[name], text)]
        self.done["recorded"] += 1

    def swap_out(self) -> None:
        name, holders = self.any_name(), self.holders()
        if name not in self.pages or any(holders[page] > 1 for page in self.pages[name]):
            return self.refused(SpecError, self.allocator.swap_out, name)
        self.swapped[name] = (self.salts[name], self.texts[name], self.recorded[name])
        pages = self.pages.pop(name)
        assert list(self.allocator.swap_out(name)) == pages
        self.release(pages, self.holders())
        self.done["swapped out"] += 1

    def swap_in(self) -> None:
        if not self.swapped or self.random.random() < 0.1:
            return self.refused(SpecError, self.allocator.swap_in, self.random.choice([*self.pages, *self.gone]))
        name = self.random.choice([*self.swapped])
        salt, text, recorded = self.swapped[name]
        if self.count(len(text)) > len(self.free_pages()):
            return self.refused(PoolFullError, self.allocator.swap_in, name)
        free, pages = self.free_pages(), list(self.allocator.swap_in(name))
        del self.swapped[name]
        self.take(pages, free)
        self.start(name, pages, text, salt, 0)
        self.write(name, 0)
        assert self.allocator.recorded(name) == ()
        self.allocator.record(name, text[: recorded * self.page_size])
        for at in range(recorded):
            self.contents[pages[at]] = (salt, text[: (at + 1) * self.page_size])
        self.recorded[name] = recorded
        self.done["swapped in"] += 1

    def fork(self) -> None:
        """Also how a sequence is cut: a fork of its beginning, after which the whole one is freed."""
        parent, self.started = self.any_name(), self.started + 1
        tokens = self.random.randint(0, self.lengths.get(parent, 0) + 1)
        if parent not in self.pages or tokens > self.lengths[parent]:
            return self.refused(SpecError, self.allocator.fork, parent, self.started, tokens)
        self.allocator.fork(parent, self.started, None if tokens == self.lengths[parent] else tokens)
        pages, text = self.pages[parent][: self.count(tokens)], self.texts[parent][:tokens]
        recorded = min(self.recorded[parent], tokens // self.page_size)
        self.start(self.started, pages, text, self.salts[parent], recorded)
        self.done["forked"] += 1

    def extend(self) -> None:
        name, tokens = self.any_name(), self.random.choice((0, 1, 1, 2, self.random.randint(-2, 20)))
        if name not in self.pages or tokens < 0:
            return self.refused(SpecError, self.allocator.extend, name, tokens)
        needed = self.needed(self.holders(), name, tokens)
        assert self.allocator.needed({name: tokens}) == needed
        if needed > len(self.free_pages()):
            return self.refused(PoolFullError, self.allocator.extend, name, tokens)
        copies, shares = self.allocator.extend(name, tokens), self.writes_to_shared(self.holders(), name, tokens)
        self.overwritten(name, tokens, shares)
        self.grown(name, tokens, shares)
        self.copy(copies)
        self.write(name, self.lengths[name] - tokens)
        assert copies.source == (tuple(self.before[-1:]) if shares else ())
        assert copies.target == (tuple(self.pages[name][len(self.before) - 1 : len(self.before)]) if shares else ())
        self.done["extended"] += 1
        self.done["copied"] += shares

    def writes_to_shared(self, holders: Counter[int], name: int, tokens: int) -> bool:
        return bool(tokens and self.lengths[name] % self.page_size and holders[self.pages[name][-1]] > 1)

    def needed(self, holders: Counter[int], name: int, tokens: int) -> int:
        more = self.count(self.lengths[name] + tokens) - self.count(self.lengths[name])
        return more + self.writes_to_shared(holders, name, tokens)

    def overwritten(self, name: int, tokens: int, copied: bool) -> None:
        """Forgets the last page of a sequence that writes on it: it may be full, of a sequence that is gone."""
        if tokens and self.lengths[name] % self.page_size and not copied:
            self.forget(self.pages[name][-1])

    def grown(self, name: int, tokens: int, copied: bool) -> None:
        """Takes over the pages of an extended sequence: the old ones stay, but for a copied last one."""
        free, self.before = self.free_pages(), self.pages[name]
        after = list(self.allocator.pages(name))
        same = len(self.before) - copied
        assert after[:same] == self.before[:same]
        self.take(after[same:], free)
        self.pages[name], self.lengths[name] = after, self.lengths[name] + tokens
        self.texts[name] += self.drawn_text(tokens)

    def step(self) -> None:
        """A step of several sequences, as a cache takes it: all of them or none."""
        names = self.random.sample([*self.pages], self.random.randint(0, min(4, len(self.pages))))
        counts = [1] * len(names) if self.random.random() < 0.3 else [self.random.randint(0, 5) for _ in names]
        if names and self.random.random() < 0.1:
            return self.refused(SpecError, advance, self.allocator, [*names, names[0]], 1, None)
        holders, needed, copied = self.holders(), 0, []
        for name, tokens in zip(names, counts):
            copied.append(self.writes_to_shared(holders, name, tokens))
            needed += self.needed(holders, name, tokens)
            if copied[-1]:
                holders[self.pages[name][-1]] -= 1
        assert self.allocator.needed(dict(zip(names, counts))) == needed
        new: Any = 1 if set(counts) == {1} else counts
        width = max((self.count(self.lengths[name] + more) for name, more in zip(names, counts)), default=0)
        width += self.random.randint(0, 2)
        if needed > len(self.free_pages()):
            return self.refused(PoolFullError, advance, self.allocator, names, new, width)
        step, copies = advance(self.allocator, names, new, width)
        for page in copies.target:  # which are written first
            self.evict(page)
        for name, tokens, copies_last in zip(names, counts, copied):
            self.overwritten(name, tokens, copies_last)
        for name, tokens, copies_last in zip(names, counts, copied):
            self.grown(name, tokens, copies_last)
        self.copy(copies)
        for name, tokens in zip(names, counts):
            self.write(name, self.lengths[name] - tokens)
        assert len(copies.source) == sum(copied) == len(set(copies.target))
        self.check_tables(step, names, counts, width)
        self.done["stepped"] += 1

    def check_tables(self, step: Any, names: list[int], counts: list[int], width: int) -> None:
        """A step of one new token each needs no offsets."""
        rows = [self.pages[name] + [UNUSED] * (width - len(self.pages[name])) for name in names]
        assert step.block_table.shape == (len(names), width) and step.block_table.tolist() == rows
        assert step.seq_lens.tolist() == [self.lengths[name] for name in names]
        assert (step.cu_seqlens_q is None) == (set(counts) <= {1}) and step.max_len_q == max(counts, default=0)
        if step.cu_seqlens_q is not None:
            assert step.cu_seqlens_q.tolist() == [sum(counts[:at]) for at in range(len(counts) + 1)]
        assert all(table is None or table.dtype == np.int32 for table in step.tables.values())

    def free(self) -> None:
        name = self.any_name()
        if name in self.gone:
            return self.refused(SpecError, self.allocator.free, name)
        self.gone.append(name)
        if name in self.swapped:
            del self.swapped[name]
            assert self.allocator.free(name) == ()
            self.done["freed while swapped out"] += 1
            return None
        pages = self.pages.pop(name)
        assert set(self.allocator.free(name)) == self.release(pages, self.holders())
        self.done["freed"] += 1

    # Invariants

    def check(self) -> None:
        """Everything observable, and the free list itself."""
        allocator, holders = self.allocator, self.holders()
        assert allocator.sequences == tuple(self.pages) and len(allocator) == len(self.pages)
        filled = set()
        for name, pages in self.pages.items():
            assert allocator.pages(name) == tuple(pages) and allocator.length(name) == self.lengths[name]
            assert len(pages) == len(set(pages)) == self.count(self.lengths[name])
            salt, text = self.salts[name], self.texts[name]
            there = [content for page in pages for content in self.pool[page]][: len(text)]
            filled |= {(pages[at // self.page_size], at % self.page_size) for at in range(len(text))}
            assert there == [(salt, text[: at + 1]) for at in range(len(text))], "other keys than those of its tokens"
        shared = sum(count > 1 for count in holders.values())
        waste = len(holders) * self.page_size - len(filled)
        unused = self.num_pages - len(holders)
        assert allocator.report() == PoolReport(self.num_pages, unused, shared, len(filled), waste)
        assert allocator.free_pages == unused and waste <= (self.page_size - 1) * len(self.pages)
        free = [*allocator._free]
        assert sorted(free) == sorted(self.free_pages()), "each free page once, and no page of a sequence"
        assert free[len(free) - len(self.idle) :] == self.idle and allocator.swapped == tuple(self.swapped)
        known = {page: (chain.salt, chain.all_tokens()) for page, chain in allocator._contents._chain_of.items()}
        assert known == self.contents
        for page, (salt, text) in known.items():
            assert self.pool[page][-1] == (salt, text), "a page that is found, but has other content"
        salts = {salt for salt, _ in self.contents.values()}
        assert allocator._contents._beginnings.keys() == salts, "nothing is kept of salts that no page has"
        cached = sum(page in self.contents for page in self.idle)
        evicted = tuple(self.evicted[-self.num_pages :])
        assert allocator.prefix_report() == (cached, self.hits, self.misses, len(self.evicted), evicted)
        assert allocator._holders == [holders[page] for page in range(self.num_pages)]
        assert allocator._held.keys() == self.pages.keys(), "nothing is kept of a freed sequence"


OPERATIONS = (
    *("allocate", "allocate", "fork", "fork", "fork", "extend", "extend", "extend", "extend", "step", "step"),
    *("free", "free", "free", "allocate_matching", "record", "record", "swap_out", "swap_in"),
)


def run_operations(pools: Iterable[int], operations: int) -> Counter[str]:
    """How often each operation was made, on pools of so many pages."""
    random, done = Random(0), Counter[str]()
    for num_pages in pools:
        model = Model(random, num_pages)
        for _ in range(operations):
            getattr(model, random.choice(OPERATIONS))()
            model.check()
        done += model.done
        done["evicted"] += len(model.evicted)
        for name in list(model.pages):
            model.allocator.free(name)
        assert model.allocator.report() == PoolReport(model.num_pages, model.num_pages, 0, 0, 0)
        model.allocator.allocate("all", model.num_pages * model.page_size)
        assert sum(model.done.values()) >= operations
    return done


def test_operations_on_short_lived_pools_match_the_model() -> None:
    done = run_operations((*SMALL_POOLS, *POOLS) * 2, 200)
    assert all(done[what] > 20 for what in ("found", "copied", "evicted", "swapped in", "refused by PoolFullError")), (
        done
    )


@pytest.mark.slow
def test_fifty_thousand_operations_match_the_model() -> None:
    done = run_operations(POOLS * 13, 1_300)
    for what in ("allocated", "forked", "extended", "stepped", "freed", "recorded", "refused by PoolFullError"):
        assert done[what] > 1000, done
    for what in ("found", "copied", "evicted", "swapped out", "swapped in"):
        assert done[what] > 200, done


def _hashed(tokens: Any, *arguments: Any, **options: Any) -> list[Text]:
    """Contents of pages that are compared by their hashes."""
    return [tuple(map(hash, each)) for each in pages_of_tokens(tokens, *arguments, **options)]


def _the_newest_first(self: PageAllocator, page: int) -> bool:
    is_free = RELEASE(self, page)
    if is_free:
        self._free.move_to_end(page, last=False)
    return is_free


def _without_copies(self: PageAllocator, tokens: Any) -> Growth:
    holders, self._holders = self._holders, [min(count, 1) for count in self._holders]
    growth = GROW(self, tokens)
    self._holders = holders
    return growth


def _too_late(self: PageAllocator, pages: int, name: Any) -> list[int]:
    if pages > self.free_pages and self.free_pages:
        self._take(next(iter(self._free)))
    return ROOM_FOR(self, pages, name)


ROOM_FOR, GROW, FIND = PageAllocator._room_for, PageAllocator.grow, PageContents.find
RELEASE = PageAllocator._release
FAULTS: dict[str, tuple[Any, str, Any]] = {
    "a page that two sequences write": (PageAllocator, "_take", lambda self, page: None),
    "a lost page": (PageAllocator, "_release", lambda self, page: False),
    "a copy that is not made": (PageAllocator, "grow", _without_copies),
    "a refusal after a change": (PageAllocator, "_room_for", _too_late),
    "hashes that are not compared": (allocator, "pages_of_tokens", _hashed),
    "a salt that is left out": (PageContents, "find", lambda self, salt, contents: FIND(self, None, contents)),
    "content that is not forgotten": (PageContents, "forget", lambda self, page: page in self),
    "eviction of the newest page": (PageAllocator, "_release", _the_newest_first),
    "a swap of a shared page": (PageAllocator, "check_unshared", lambda self, name: self.length(name)),
    "a fork that keeps the content of pages it does not have": (Chain, "cut", lambda self, depth: self),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*FAULTS[fault])
    random = Random(0)
    # An empty list of pages is read, or nothing is raised that should be.
    with pytest.raises((AssertionError, IndexError, StopIteration, pytest.fail.Exception)):
        for num_pages in POOLS * 7:
            model = Model(random, num_pages)
            for _ in range(200):
                getattr(model, random.choice(OPERATIONS))()
                model.check()
