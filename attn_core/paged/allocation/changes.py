"""Changes: records the last change of each sequence of a pool, so that a step can check that its tables are valid."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import NamedTuple


class _Change(NamedTuple):
    """The last change of a sequence; ``started`` and ``at`` are times, counted in changes of the pool."""

    started: int
    at: int
    what: str


class Changes:
    """Counts the changes of a pool's sequences.

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
