"""PageAllocator: assigns the pages of a pool to sequences. Pure Python; it never touches the pool itself.

Sequences share a page as long as none of them writes to it: a fork shares all pages of its parent. A sequence that is
about to write to a shared page gets a copy of it (copy-on-write). ``extend`` returns the pages to copy, and the caller,
who has the pool, copies them before it writes the new tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from attn_core.call.kinds import check_hashable, check_kind, check_names
from attn_core.call.seq_info import is_host_int
from attn_core.errors import SpecError, shown
from attn_core.paged.allocation.held_pages import PoolFullError as PoolFullError
from attn_core.paged.allocation.swapping import SwappedSequences

MOST_TOKENS = 2**31 - 1
"""The longest sequence: lengths are int32."""

UNUSED = -1
"""The entry of a block table after a sequence's last page."""


class Copies(NamedTuple):
    """Pages to copy, ``source[i]`` to ``target[i]``, before new tokens are written to the extended sequence."""

    source: tuple[int, ...] = ()
    target: tuple[int, ...] = ()


class PageAllocator(SwappedSequences):
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
