"""PagesByContent: pages of a pool that are found by their content; ``PageAllocator`` inherits it.

A sequence that ends leaves its recorded pages in the pool. They count as free, and are taken last: those that nobody
used for the longest time first. Until then, a prompt that begins with the same tokens finds them, with their keys and
values.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

from attn_core.call.kinds import check_hashable
from attn_core.errors import SpecError, shown
from attn_core.paged.allocation.contents import Chain, check_is_tokens, pages_of_tokens
from attn_core.paged.allocation.held_pages import HeldPages
from attn_core.paged.allocation.report import PrefixReport


class Match(NamedTuple):
    """Pages with the beginning of a prompt.

    Attributes:
        tokens: the number of tokens in them, a multiple of the page size.
        pages: the pages, in the order of the tokens.
        cached: how many of them no sequence has. A sequence that starts on them takes that many of the free pages.
    """

    tokens: int
    pages: tuple[int, ...]
    cached: int


class PagesByContent(HeldPages):
    """A pool whose full pages are found by the tokens in them. Arguments and attributes are those of ``HeldPages``."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        super().__init__(num_pages, page_size)
        self._hits = self._misses = self._evictions = 0
        self._evicted: deque[int] = deque(maxlen=self.num_pages)

    def match(self, tokens: Sequence[int], *, salt: Hashable = None) -> Match:
        """Returns the pages that contain the beginning of these tokens. Changes nothing.

        Args:
            tokens: token ids, from the beginning of the text.
            salt: stands for everything else that changes keys and values, such as the name of an adapter, or an image.
                Only pages with an equal salt are found.

        Raises:
            SpecError: for a token that is no int, or a salt that is not hashable.
        """
        _, pages = self._find(tokens, salt, check_is_tokens(tokens) // self.page_size)
        cached = sum(not self._holders[page] for page in pages)
        return Match(len(pages) * self.page_size, tuple(pages), cached)

    def allocate_matching(self, name: Hashable, tokens: Sequence[int], *, salt: Hashable = None) -> int:
        """Starts a sequence on the pages that ``match`` finds, which it then shares, and returns their tokens.

        The caller computes the other tokens of the prompt, at least the last one, because its logits choose the next
        token. The sequence needs no free page for its beginning.

        Args:
            tokens, salt: as in ``match``. What ``record`` says of the sequence later has the same salt.

        Raises:
            SpecError: as ``match`` does, and if a sequence of that name exists.
        """
        self._check_new(name)
        most = max(check_is_tokens(tokens) - 1, 0) // self.page_size
        chain, pages = self._find(tokens, salt, most)
        try:
            self._pages[name] = pages
            for page in pages:
                self._idle.pop(page, None)
                self._holders[page] += 1
            self._lengths[name], self._chains[name] = len(pages) * self.page_size, chain
            self.changes.note(name, "started")
        except BaseException:
            self._restore({name: None})
            raise
        self._hits += len(pages)
        self._misses += most - len(pages)
        return self._lengths[name]

    def record(self, name: Hashable, tokens: Sequence[int]) -> None:
        """Says which tokens a sequence contains, so that ``match`` finds its full pages.

        Call it after the keys and values of these tokens are written in every layer, and before ``free``.

        Args:
            tokens: token ids from the beginning of the sequence, as far as they are written. Pages that are recorded
                already are not read again, so a long list costs no more than its new part.

        Raises:
            SpecError: for more tokens than the sequence has, for a token that is no int, or for other tokens than those
                that are recorded for a shared page.
        """
        length = self.length(name)
        if (count := check_is_tokens(tokens)) > length:
            raise SpecError(f"tokens: expected at most the {length} that {shown(name)} has, got {count}")
        chain, pages = self._chain(name), self._pages[name]
        contents = pages_of_tokens(tokens, self.page_size, chain.depth)
        for page, content in zip(pages[chain.depth :], contents, strict=False):
            chain = self._contents.add(chain, content, page)
        self._chains[name] = chain  # last: a change that was interrupted can run again

    def recorded(self, name: Hashable) -> tuple[int, ...]:
        """Returns the tokens that ``record`` keeps of a sequence: those of its first full pages."""
        return self._chain(self._known(name)).all_tokens()

    def prefix_report(self) -> PrefixReport:
        """Returns how many pages were found by their content, and which ones were evicted."""
        cached = sum(page in self._contents for page in self._idle)
        return PrefixReport(cached, self._hits, self._misses, self._evictions, tuple(self._evicted))

    def _find(self, tokens: Any, salt: Hashable, most: int) -> tuple[Chain, list[int]]:
        check_hashable("salt", salt)
        return self._contents.find(salt, pages_of_tokens(tokens, self.page_size, stop=most))

    def _chain(self, name: Hashable) -> Chain:
        return self._chains.get(name) or Chain(None)

    def _evict(self) -> int:
        """Takes the page that nobody has used for the longest time out of the idle ones."""
        page = next(iter(self._idle))
        if self._contents.forget(page):  # first: from now on it may get other content
            self._evictions += 1
            self._evicted.append(page)
        del self._idle[page]
        return page
