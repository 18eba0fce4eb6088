"""HeldPages: the pages of a pool, the sequences that hold them, and the changes of both.

``PageAllocator`` has the requests that change it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import NamedTuple

from attn_core.call.kinds import check_hashable
from attn_core.call.seq_info import is_host_int
from attn_core.errors import SpecError, shown
from attn_core.paged.allocation.contents import Chain, PageContents
from attn_core.paged.allocation.report import Occupancy, PoolReport


class _Change(NamedTuple):
    """The last change of a sequence; ``started`` and ``at`` are times, counted in changes of the pool."""

    started: int
    at: int
    what: str


class Changes:
    """Counts the changes of a pool's sequences, so that a step can check that its tables are valid.

    Attributes:
        now: the number of changes so far.
    """

    def __init__(self) -> None:
        self.now = 0
        self._last: dict[Hashable, _Change] = {}

    def note(self, name: Hashable, what: str) -> None:
        """Records a change of a sequence; the first one is its start."""
        self.now += 1
        known = self._last.get(name)
        self._last[name] = _Change(self.now if known is None else known.started, self.now, what)

    def forget(self, name: Hashable) -> None:
        """Records that a sequence was freed. A sequence started later under its name is a different one."""
        self.now += 1  # so that ``since`` does not take its shortcut
        self._last.pop(name, None)

    def started(self, name: Hashable) -> int:
        """Returns the time when a sequence started; 0 for one that does not exist."""
        known = self._last.get(name)
        return 0 if known is None else known.started

    def undo_notes(self, names: Iterable[Hashable]) -> Callable[[], None]:
        """Returns a function that forgets whatever is noted of these sequences after now."""
        now, last = self.now, {name: self._last[name] for name in names}

        def undo() -> None:
            self._last.update(last)
            self.now = now

        return undo

    def since(self, time: int, names: Iterable[Hashable]) -> tuple[Hashable, str] | None:
        """Returns the first of these sequences that changed after ``time``, and how; None if none did."""
        if time == self.now:  # the usual case in a model: nothing changed between the layers of a step
            return None
        for name in names:
            change = self._last.get(name)
            if change is None or change.started > time:
                return name, "freed"
            if change.at > time:
                return name, change.what
        return None


MOST_PAGES = 2**31 - 1
"""Tables of pages, and positions in a page, are int32."""


class PoolFullError(MemoryError):
    """The pool has too few free pages for the request. The allocator is unchanged."""


class HeldPages:
    """The state of a pool: which pages each sequence has, and which are free.

    Args:
        num_pages: pages in the pool.
        page_size: tokens in a page.

    Attributes:
        changes: the last change of each sequence and its time.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        for name, value in (("num_pages", num_pages), ("page_size", page_size)):
            if not is_host_int(value) or value < 1:
                raise SpecError(f"{name}={shown(value)}: expected a number of 1 or more")
            if value > MOST_PAGES:
                raise SpecError(f"{name}={shown(value)}: expected at most {MOST_PAGES}, because tables are int32")
        self.num_pages, self.page_size = int(num_pages), int(page_size)
        self._free = list(range(self.num_pages))[::-1]  # a stack: the page freed last is assigned next
        self._idle: dict[int, None] = {}  # also free, but with known content; the page that is taken first comes first
        self._holders = [0] * self.num_pages  # by page, the number of sequences that have it
        self._pages: dict[Hashable, list[int]] = {}
        self._lengths: dict[Hashable, int] = {}
        self._contents = PageContents()
        self._chains: dict[Hashable, Chain] = {}  # what is recorded of each sequence, if anything is
        self._swapped: dict[
            Hashable, tuple[int, Hashable]
        ] = {}  # length and salt of sequences whose pages are elsewhere
        self._hits = self._misses = self._evictions = 0
        self._evicted: deque[int] = deque(maxlen=self.num_pages)
        self.changes = Changes()

    def __contains__(self, name: object) -> bool:
        return name in self._pages

    def __len__(self) -> int:
        """The number of sequences."""
        return len(self._pages)

    @property
    def sequences(self) -> tuple[Hashable, ...]:
        """The names of the sequences, oldest first."""
        return tuple(self._pages)

    @property
    def free_pages(self) -> int:
        """The number of pages of no sequence. Those that are still found by their content count, too."""
        return len(self._free) + len(self._idle)

    @property
    def swapped(self) -> tuple[Hashable, ...]:
        """The names of the sequences that are swapped out; ``sequences`` does not contain them."""
        return tuple(self._swapped)

    def length(self, name: Hashable) -> int:
        """Returns the number of tokens of a sequence."""
        return self._lengths[self._known(name)]

    def pages(self, name: Hashable) -> tuple[int, ...]:
        """Returns the pages of a sequence, in the order of its tokens."""
        return tuple(self._pages[self._known(name)])

    def __str__(self) -> str:
        """Draws the pool: a line for each page, # for each token, and the sequences that read the page."""
        return str(self._occupancy())

    def report(self) -> PoolReport:
        """Returns how full the pool is."""
        return self._occupancy().report()

    def _occupancy(self) -> Occupancy:
        sequences = {name: (pages, self._lengths[name]) for name, pages in self._pages.items()}
        return Occupancy(
            self.num_pages, self.page_size, sequences, [page for page in self._idle if page in self._contents]
        )

    def _restore(self, sequences: Mapping[Hashable, tuple[list[int], int] | None]) -> None:
        """Sets the pages and lengths of some sequences, None if there is no such sequence, and counts all pages anew.

        A change may have been interrupted anywhere. The pages of the sequences are right by then; their holders and the
        free pages follow from them.
        """
        for name, content in sequences.items():
            if content is None:
                self._pages.pop(name, None)
                self._lengths.pop(name, None)
                self._chains.pop(name, None)
            else:
                self._pages[name], self._lengths[name] = content
        holders = [0] * self.num_pages
        for page in (page for pages in self._pages.values() for page in pages):
            holders[page] += 1
        idle = {page: None for page in self._idle if not holders[page] and page in self._contents}
        free = [page for page in self._free if not holders[page] and page not in idle]
        lost = {page for page, count in enumerate(holders) if not count}.difference(free, idle)
        idle |= dict.fromkeys(sorted(page for page in lost if page in self._contents))
        free += sorted(lost.difference(idle), reverse=True)
        self._holders, self._free, self._idle = holders, free, idle

    def _check_new(self, name: Hashable) -> None:
        check_hashable("name", name)
        if name in self._pages or name in self._swapped:
            raise SpecError(f"name={shown(name)}: expected a new name, but a sequence has this one; free it first")

    def _known(self, name: Hashable) -> Hashable:
        check_hashable("name", name)
        if name in self._swapped:
            raise SpecError(
                f"name={shown(name)}: expected a sequence in the pool, but this one is swapped out; swap it in first"
            )
        if name not in self._pages:
            raise SpecError(f"name={shown(name)}: expected the name of a sequence of this allocator; add it first")
        return name

    def _take(self) -> int:
        page = self._free.pop() if self._free else self._evict()
        self._holders[page] = 1
        return page

    def _release(self, page: int) -> bool:
        self._holders[page] -= 1
        if self._holders[page]:
            return False
        if page in self._contents:
            self._idle[page] = None  # behind all others
        else:
            self._free.append(page)
        return True

    def _evict(self) -> int:
        """Takes the page that nobody has used for the longest time out of the idle ones."""
        page = next(iter(self._idle))
        if self._contents.forget(page):  # first: from now on it may get other content
            self._evictions += 1
            self._evicted.append(page)
        del self._idle[page]
        return page

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def _room_for(self, pages: int, name: Hashable) -> None:
        if pages > self.free_pages:
            raise PoolFullError(
                f"{name!r} needs {pages} more pages of {self.page_size} tokens, and {self.free_pages} of the pool's "
                f"{self.num_pages} are free; free a sequence, or make the pool larger"
            )
