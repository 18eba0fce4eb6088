"""PageAllocator: assigns the pages of a pool to sequences. Pure Python; it never touches the pool itself.

Sequences share a page as long as none of them writes to it: a fork shares all pages of its parent. A sequence that is
about to write to a shared page gets a copy of it (copy-on-write). ``extend`` returns the pages to copy, and the caller,
who has the pool, copies them before it writes the new tokens.

A sequence that ends leaves its recorded pages in the pool. They count as free, and are taken last: those that nobody
used for the longest time first. Until then, a prompt that begins with the same tokens finds them, with their keys and
values.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from attn_core.call.kinds import check_hashable, check_kind, check_names
from attn_core.call.seq_info import is_host_int
from attn_core.errors import SpecError, shown
from attn_core.paged.allocation.contents import Chain, check_is_tokens, pages_of_tokens
from attn_core.paged.allocation.held_pages import HeldPages
from attn_core.paged.allocation.held_pages import PoolFullError as PoolFullError
from attn_core.paged.allocation.report import PrefixReport

MOST_TOKENS = 2**31 - 1
"""The longest sequence: lengths are int32."""

UNUSED = -1
"""The entry of a block table after a sequence's last page."""


class Copies(NamedTuple):
    """Pages to copy, ``source[i]`` to ``target[i]``, before new tokens are written to the extended sequence."""

    source: tuple[int, ...] = ()
    target: tuple[int, ...] = ()


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


class PageAllocator(HeldPages):
    """Assigns the pages of a pool to sequences.

    Args:
        num_pages: pages in the pool.
        page_size: tokens in a page.

    Attributes:
        changes: the last change of each sequence and its time.

    Any hashable value can name a sequence. Not thread-safe. A change that Ctrl-C interrupts is undone; ``free`` is
    completed.
    """

    def allocate(self, name: Hashable, tokens: int = 0) -> None:
        """Starts a sequence of ``tokens`` tokens on pages that no other sequence has.

        Raises:
            SpecError: if a sequence of that name exists. PoolFullError: if the pool has too few free pages.
        """
        self._check_new(name)
        count = self._count(tokens)
        self._room_for(self._pages_for(count), name)
        try:
            self._pages[name] = [self._take() for _ in range(self._pages_for(count))]
            self._lengths[name] = count
            self.changes.note(name, "started")
        except BaseException:
            self._restore({name: None})
            raise

    def fork(self, parent: Hashable, name: Hashable, tokens: int | None = None) -> None:
        """Starts a sequence that shares the parent's first ``tokens`` (all if None), without a copy.

        Raises:
            SpecError: for a name that a sequence already has, or more tokens than the parent has.
        """
        self._check_new(name)
        length = self.length(parent)
        count = length if tokens is None else self._count(tokens)
        if count > length:
            raise SpecError(f"tokens={tokens}: expected at most the {length} that {parent!r} has")
        try:
            self._pages[name] = self._pages[parent][: self._pages_for(count)]
            for page in self._pages[name]:
                self._holders[page] += 1
            self._lengths[name] = count
            if parent in self._chains:
                self._chains[name] = self._chains[parent].cut(count // self.page_size)
            self.changes.note(name, "started")
            self.changes.note(parent, "forked")
        except BaseException:
            self._restore({name: None})
            raise

    def extend(self, name: Hashable, tokens: int = 1) -> Copies:
        """Makes room for ``tokens`` more tokens at the end of a sequence.

        Returns:
            The pages to copy before the tokens are written: the last page, if it has room and other sequences share it.

        Raises:
            PoolFullError: if the pool has too few free pages. The sequence is unchanged then.
        """
        length, count, pages = self.length(name), self._count(tokens), self._pages[name]
        copies, more = self._growth(name, count)
        self._room_for(more + copies, name)
        held, last = len(pages), tuple(pages[-1:])
        target: tuple[int, ...] = ()
        try:
            if count and length % self.page_size and not copies:
                self._contents.forget(last[0])  # of a longer sequence that is gone, and is overwritten now
            if copies:
                self._release(last[0])  # frees nothing: other sequences still share the page
                pages[-1] = self._take()
                target = (pages[-1],)
            pages += [self._take() for _ in range(more)]
            self._lengths[name] = length + count
            self.changes.note(name, "stepped again")
        except BaseException:
            self._restore({name: ([*pages[: held - 1], *last] if held else [], length)})
            raise
        return Copies(last if copies else (), target)

    def undo_extend(self, tokens: Mapping[Hashable, int]) -> Callable[[], None]:
        """Returns a function that restores these sequences after ``extend`` of all of them, or of the first few.

        It must work for the first few, because an interrupt can stop a step after any of its sequences.
        """
        untouched = max(len(self._free) - self.needed(tokens), 0)
        taken = self._free[untouched:]  # the end of the stack
        before = {name: (list(self._pages[name]), self._lengths[name]) for name in tokens}
        undo_notes = self.changes.undo_notes(tokens)

        def undo() -> None:
            self._restore(before)
            evicted = [page for page in self._free[untouched:] if page not in taken]  # their content may be overwritten
            self._free[untouched:] = [*evicted, *taken]  # in their order
            undo_notes()  # so that the step before this one stays valid

        return undo

    def needed(self, tokens: Mapping[Hashable, int]) -> int:
        """Returns how many free pages it would take to extend each sequence by its number of tokens."""
        check_kind("tokens", tokens, Mapping, "a dict of tokens by sequence")
        pages, readers = 0, dict[int, int]()
        for name, count in tokens.items():
            copies, more = self._growth(name, self._count(count))
            pages += more + copies
            if copies:
                last = self._pages[name][-1]
                readers[last] = readers.get(last, 0) + 1
        # When all other sequences have copied a shared page, its last one writes to the page itself.
        return pages - sum(count == self._holders[page] for page, count in readers.items())

    def _growth(self, name: Hashable, count: int) -> tuple[bool, int]:
        """Returns whether the last page must be copied before appending ``count`` tokens, and how many pages follow."""
        length, pages = self.length(name), self._pages[name]
        copies = bool(count and length % self.page_size and self._holders[pages[-1]] > 1)
        return copies, self._pages_for(length + count) - len(pages)

    def free(self, name: Hashable) -> tuple[int, ...]:
        """Ends a sequence and returns the pages that are free now, because no other sequence shares them.

        Pages that are recorded keep their content until they are taken. A sequence may be swapped out.
        """
        check_hashable("name", name)
        if name in self._swapped:
            self.changes.forget(name)
            del self._swapped[name]
            return ()
        pages = self._pages[self._known(name)]
        try:
            self.changes.forget(name)  # first: a step must never take a freed sequence for a living one
            del self._pages[name], self._lengths[name]
            self._chains.pop(name, None)
            return tuple(page for page in reversed(pages) if self._release(page))  # so the next one gets them in order
        except BaseException:
            self._restore({name: None})
            raise

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

    def block_table(self, names: Sequence[Hashable], width: int | None = None) -> np.ndarray:
        """Returns int32 ``[len(names), width]``: each sequence's pages in order, then ``UNUSED``.

        Args:
            width: columns; the pages of the longest sequence if None. A fixed width keeps shapes equal in every step.

        Raises:
            SpecError: if a sequence has more pages than columns.
        """
        names = check_names("names", names)
        rows = [self._pages[self._known(name)] for name in names]
        longest = self.check_width(width, (self._lengths[name] for name in names))
        table = np.full((len(rows), longest if width is None else width), UNUSED, np.int32)
        for row, pages in zip(table, rows, strict=True):
            row[: len(pages)] = pages
        return table

    def check_width(self, width: int | None, lengths: Iterable[int]) -> int:
        """Returns the pages of the longest of these lengths (tokens). Raises SpecError if a table has fewer columns."""
        longest, most = self._pages_for(max(lengths, default=0)), MOST_TOKENS // self.page_size
        if width is not None and not (is_host_int(width) and 0 <= width <= most):
            raise SpecError(
                f"width={shown(width)}: expected at most {most} columns, because kernels count tokens in int32"
            )
        if width is not None and width < longest:
            raise SpecError(f"width={width}: expected at least the {longest} pages of the longest sequence")
        return longest

    def seq_lens(self, names: Sequence[Hashable]) -> np.ndarray:
        """Returns int32 ``[len(names)]``: the tokens of each sequence."""
        return np.array([self.length(name) for name in check_names("names", names)], np.int32)

    def _count(self, tokens: int) -> int:
        if not is_host_int(tokens) or tokens < 0:
            raise SpecError(f"tokens={shown(tokens)}: expected a number of 0 or more")
        return int(tokens)
