"""HeldPages: the pages of a pool and the sequences that hold them. ``PageAllocator`` changes them."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from attn_core.call.kinds import check_hashable
from attn_core.call.seq_info import is_host_int
from attn_core.errors import SpecError, shown
from attn_core.paged.changes import Changes
from attn_core.paged.report import Occupancy, PoolReport

MOST_PAGES = 2**31 - 1
"""Tables of pages, and positions in a page, are int32."""


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
        self._holders = [0] * self.num_pages  # by page, the number of sequences that have it
        self._pages: dict[Hashable, list[int]] = {}
        self._lengths: dict[Hashable, int] = {}
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
        """The number of pages of no sequence."""
        return len(self._free)

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
        return Occupancy(self.num_pages, self.page_size, sequences)

    def _restore(self, sequences: Mapping[Hashable, tuple[list[int], int] | None]) -> None:
        """Sets the pages and lengths of some sequences, None if there is no such sequence, and counts all pages anew.

        A change may have been interrupted anywhere. The pages of the sequences are right by then; their holders and the
        free pages follow from them.
        """
        for name, content in sequences.items():
            if content is None:
                self._pages.pop(name, None)
                self._lengths.pop(name, None)
            else:
                self._pages[name], self._lengths[name] = content
        holders = [0] * self.num_pages
        for page in (page for pages in self._pages.values() for page in pages):
            holders[page] += 1
        free = [page for page in self._free if not holders[page]]
        lost = {page for page, count in enumerate(holders) if not count}.difference(free)
        self._holders, self._free = holders, free + sorted(lost, reverse=True)

    def _known(self, name: Hashable) -> Hashable:
        check_hashable("name", name)
        if name not in self._pages:
            raise SpecError(f"name={shown(name)}: expected the name of a sequence of this allocator; add it first")
        return name

    def _take(self) -> int:
        page = self._free.pop()
        self._holders[page] = 1
        return page

    def _release(self, page: int) -> bool:
        self._holders[page] -= 1
        if self._holders[page]:
            return False
        self._free.append(page)
        return True
