"""SwappedSequences: sequences whose pages are elsewhere for a while; ``PageAllocator`` inherits it."""

from __future__ import annotations

from collections.abc import Hashable

from attn_core.call.kinds import check_hashable
from attn_core.errors import SpecError, shown
from attn_core.paged.allocation.contents import Chain
from attn_core.paged.allocation.prefixes import PagesByContent


class SwappedSequences(PagesByContent):
    """A pool whose sequences may leave and return. Arguments and attributes are those of ``HeldPages``."""

    def swap_out(self, name: Hashable) -> tuple[int, ...]:
        """Frees the pages of a sequence that continues later. The caller has copied their content elsewhere.

        Returns:
            The pages, in the order of the tokens. They are free now.

        Raises:
            SpecError: if the sequence shares a page: it would not become free.
        """
        self.check_unshared(name)
        pages, length, salt = self.pages(name), self._lengths[name], self._chain(name).salt
        try:
            self.changes.note(name, "swapped out")  # first: a step must not take the pages for the sequence's own
            self._swapped[name] = (length, salt)
            del self._pages[name], self._lengths[name]
            self._chains.pop(name, None)
            for page in reversed(pages):
                self._release(page)
        except BaseException:
            if name in self._swapped:
                self._restore({name: None})
            raise
        return pages

    def check_unshared(self, name: Hashable) -> None:
        """Raises SpecError if a sequence shares pages with others, naming one of them."""
        shared = {page for page in self._pages[self._known(name)] if self._holders[page] > 1}
        if shared:
            other = next(each for each, pages in self._pages.items() if each != name and shared.intersection(pages))
            raise SpecError(
                f"name={shown(name)}: expected a sequence that shares no page, but {len(shared)} of its "
                f"{len(self._pages[name])} pages are shared, with {shown(other)} for one; free the others first"
            )

    def swap_in(self, name: Hashable) -> tuple[int, ...]:
        """Takes pages for a sequence that is swapped out, and returns them in the order of its tokens.

        The caller copies their content back, and then calls ``record`` if ``recorded`` had tokens before.

        Raises:
            SpecError: if no such sequence is swapped out. PoolFullError: if the pool has too few free pages.
        """
        self.check_swapped(name)
        length, salt = swapped = self._swapped[name]
        self._room_for(self._pages_for(length), name)
        try:
            self._pages[name] = [self._take() for _ in range(self._pages_for(length))]
            self._lengths[name], self._chains[name] = length, Chain(salt)
            self.changes.note(name, "swapped in")
            del self._swapped[name]
        except BaseException:
            self._restore({name: None})
            self._swapped[name] = swapped
            raise
        return self.pages(name)

    def check_swapped(self, name: Hashable) -> None:
        """Raises SpecError unless a sequence of this name is swapped out."""
        check_hashable("name", name)
        if name not in self._swapped:
            raise SpecError(f"name={shown(name)}: expected the name of a sequence that is swapped out")
