"""A replacement in another library that lasts as long as someone needs it, in blocks and for the whole process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from attn_core.call.after_fork import free_in_children


class Replacement:
    """Replaces something when the first holder needs it, and restores it after the last one.

    There should be one for the process, because what it replaces is one for the process.

    Args:
        apply: replaces, and returns a function that restores. If it raises, nothing is held. If that function raises,
            the next release calls it again.
        is_in_place: whether the replacement is there now, for a place that others can change in between.
    """

    def __init__(self, apply: Callable[[], Callable[[], None]], is_in_place: Callable[[], bool] | None = None) -> None:
        self._apply, self._is_in_place = apply, is_in_place
        self._restore: Callable[[], None] | None = None
        self._holders: set[object] = set()
        self._lock = free_in_children(threading.Lock())

    def is_installed(self) -> bool:
        """Returns whether our attention is in the host's place now."""
        return bool(self._holders) if self._is_in_place is None else self._is_in_place()

    def install(self) -> None:
        """Puts our attention in the host's place until ``uninstall``. Idempotent. Raises as ``installed``."""
        self._hold(self)

    def uninstall(self) -> None:
        """Undoes all calls of ``install``. Running blocks of ``installed`` keep our attention until their end.

        Raises:
            RuntimeError: if another library's function has replaced ours. That function stays.
        """
        self._release(self)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Puts our attention in the host's place in a block, in every thread.

        Blocks nest and overlap, in one thread or several. The end of the last one restores what was there before, also
        after an exception.

        Raises:
            ImportError, RuntimeError: if the host is missing, or its place is not as expected: the message says how.
        """
        holder = object()
        try:  # around the change as well, because Ctrl-C may raise right after it
            self._hold(holder)
            yield
        finally:
            self._release(holder)

    def _hold(self, holder: object) -> None:
        with self._lock:
            if self._restore is None or not self.is_installed():
                self._restore = self._apply()
            self._holders.add(holder)

    def _release(self, holder: object) -> None:
        with self._lock:
            self._holders.discard(holder)
            if not self._holders and self._restore is not None:
                self._restore()
                self._restore = None
