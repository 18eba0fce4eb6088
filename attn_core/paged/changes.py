"""Changes: what was done to the sequences of a pool, and when. A step asks whether its tables still hold."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import NamedTuple


class _Change(NamedTuple):
    """The last change of a sequence; ``started`` and ``at`` are times, counted in changes of the pool."""

    started: int
    at: int
    what: str


class Changes:
    """Counts the changes of a pool's sequences.

    Attributes:
        now: how many there were. It only grows.
    """

    def __init__(self) -> None:
        self.now = 0
        self._last: dict[Hashable, _Change] = {}

    def note(self, name: Hashable, what: str) -> None:
        """Notes what was done to a sequence; the first note is its start."""
        self.now += 1
        known = self._last.get(name)
        self._last[name] = _Change(self.now if known is None else known.started, self.now, what)

    def forget(self, name: Hashable) -> None:
        """Notes that a sequence was freed; one that is started later under its name is another."""
        self.now += 1
        del self._last[name]

    def since(self, time: int, names: Iterable[Hashable]) -> tuple[Hashable, str] | None:
        """The first of these sequences that changed after ``time``, and how; None where none did."""
        if time == self.now:
            return None
        for name in names:
            found = self._last.get(name)
            if found is None or found.started > time:
                return name, "freed"
            if found.at > time:
                return name, found.what
        return None
