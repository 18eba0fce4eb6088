"""Rings: which sequence of a cache has which ring of newest tokens, and from which position on the ring is good.

Plain Python and numpy; the caches have the rings themselves. A ring is assigned with the first step of a sequence. What
a ring says of a sequence is compared with the allocator whenever it is used, so a sequence that was freed, or grew
without a step of the cache, never reads another's tokens: it reads its pages.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import NamedTuple

import numpy as np

from attn_core.call.seq_info import is_host_int
from attn_core.paged.allocation.allocator import PageAllocator, PoolFullError


class Ring(NamedTuple):
    """The ring of a sequence.

    Attributes:
        row: its number.
        first, stop: the newest ``recent`` of the tokens at these positions are in the ring.
        started: when the sequence started, by the allocator's ``changes``: another one of its name is another one.
    """

    row: int
    first: int
    stop: int
    started: int


class Rings:
    """Assigns rings to sequences.

    Args:
        count: the rings of a cache.
        recent: tokens in a ring.
        allocator: of the same sequences.
    """

    def __init__(self, count: int, recent: int, allocator: PageAllocator) -> None:
        self.count, self.recent, self._allocator = count, recent, allocator
        self._rings: dict[Hashable, Ring] = {}

    def take(self, counts: Mapping[Hashable, int]) -> np.ndarray:
        """Assigns rings for new tokens that will be written. Returns ``recent_rows`` of the step, int32 ``[batch, 2]``.

        Args:
            counts: the new tokens of each sequence, by which the allocator does not yet extend it.

        Raises:
            PoolFullError: if too few rings are free. Nothing changes then.
        """
        known = {name: self.of(name) for name in counts}
        needed = sum(ring is None and counts[name] > 0 for name, ring in known.items())
        free = self._free(needed, "this step") if needed else []
        rows = np.full((len(counts), 2), (-1, 0), np.int32)
        for at, (name, count) in enumerate(counts.items()):
            length, ring = self._allocator.length(name), known[name]
            if ring is None and count == 0:
                continue
            if ring is None:
                ring = Ring(free.pop(), length, length, self._started(name))
            self._rings[name] = ring._replace(stop=length + count)
            rows[at] = ring.row, ring.first
        return rows

    def check_fork(self, parent: Hashable, tokens: int | None) -> None:
        """Raises PoolFullError if a fork of so many tokens, all if None, needs a ring and none is free.

        A wrong number is the allocator's to refuse.
        """
        length = self._allocator.length(parent)
        count = length if tokens is None else tokens
        if is_host_int(count) and count <= length and self._exact(parent, count) is not None:
            self._free(1, "a fork")

    def fork(self, parent: Hashable, name: Hashable) -> tuple[int, int] | None:
        """Assigns a ring to a sequence that the allocator has forked, for a copy of its parent's.

        Returns:
            (the ring to copy, its copy); None if no ring has a token of the new sequence.
        """
        count = self._allocator.length(name)
        ring = self._exact(parent, count)
        if ring is None:
            return None
        row = self._free(1, "a fork")[-1]
        self._rings[name] = Ring(row, ring.first, count, self._started(name))
        return ring.row, row

    def of(self, name: Hashable) -> Ring | None:
        """Returns the ring of a sequence; None if it has none."""
        ring = self._rings.get(name)
        if ring is None or ring.started != self._started(name):
            return None
        length = self._allocator.length(name)
        # Tokens that no step of the cache has written are in no ring.
        return ring if ring.stop == length else ring._replace(first=length, stop=length)

    def swap_in(self, name: Hashable, ring: Ring) -> int:
        """Assigns a ring to a sequence for the content of its old one. Returns the row.

        Raises:
            PoolFullError: if no ring is free.
        """
        row = self._free(1, "a sequence that is swapped in")[-1]
        self._rings[name] = ring._replace(row=row, started=self._started(name))
        return row

    def release(self, name: Hashable) -> None:
        """Frees the ring of a sequence, if it has one."""
        self._rings.pop(name, None)

    def undo(self) -> Callable[[], None]:
        """Returns a function that restores all rings as they are now."""
        before = dict(self._rings)

        def restore() -> None:
            self._rings = before

        return restore

    def _exact(self, name: Hashable, tokens: int) -> Ring | None:
        """Returns a sequence's ring with the first position that it is good for if only so many tokens are left.

        None if then no token is in the ring.
        """
        ring = self.of(name)
        if ring is None:
            return None
        first = max(ring.first, ring.stop - self.recent)  # newer tokens have overwritten what was before
        return ring._replace(first=first) if first < tokens else None

    def _free(self, needed: int, what: str) -> list[int]:
        """Returns the free rings, lowest last. Raises PoolFullError if there are fewer than needed."""
        alive = {name: ring for name, ring in self._rings.items() if ring.started == self._started(name)}
        free = sorted(set(range(self.count)).difference(ring.row for ring in alive.values()), reverse=True)
        if needed > len(free):
            raise PoolFullError(
                f"rings: {what} needs {needed} more, but {len(free)} of the cache's {self.count} are free; free a "
                "sequence, swap one out, or build the cache with more rings"
            )
        self._rings = alive
        return free

    def _started(self, name: Hashable) -> int:
        return self._allocator.changes.started(name)
