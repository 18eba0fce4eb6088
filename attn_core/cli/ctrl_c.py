"""Ctrl-C that arrives: other code may drop a KeyboardInterrupt, and a command would then run on for minutes."""

from __future__ import annotations

import _thread
import signal
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from time import sleep
from typing import Any

EVERY = 0.1
"""Seconds between two looks at the last KeyboardInterrupt."""


@contextmanager
def insistent_ctrl_c() -> Iterator[None]:
    """Interrupts its block again if the KeyboardInterrupt of a Ctrl-C is dropped before it leaves the block.

    Python drops an exception that rises in a weak reference's callback, in ``__del__`` or in a callback of the garbage
    collector; JAX has such callbacks. torch's compiler drops every exception that rises in a guard. A KeyboardInterrupt
    that is still on its way is left alone, however long the ``finally`` blocks on the way take.

    It does nothing outside the main thread, or if somebody else handles or ignores Ctrl-C.
    """
    main_thread = threading.current_thread() is threading.main_thread()
    if not main_thread or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    watch = _Watch()
    signal.signal(signal.SIGINT, watch.interrupt)
    try:
        yield
    finally:
        watch.ended = True
        signal.signal(signal.SIGINT, signal.default_int_handler)


class _CtrlC(KeyboardInterrupt):
    """A KeyboardInterrupt that weak references can watch."""


class _Watch:
    """Raises KeyboardInterrupt, and raises another one if it is gone before the block has ended."""

    def __init__(self) -> None:
        self.ended = False
        self._thread: threading.Thread | None = None
        self._last: Any = None
        self._main = threading.get_ident()

    def interrupt(self, *_: Any) -> None:
        """Handles SIGINT: raises KeyboardInterrupt in the main thread."""
        error = _CtrlC()
        self._last = weakref.ref(error)
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="attn ctrl-c", daemon=True)
            self._thread.start()
        try:
            raise error
        finally:
            del error  # or this frame, which the error's traceback has, would keep it alive

    def _watch(self) -> None:
        gone = None
        while not self.ended:
            sleep(EVERY)
            last = self._last
            if last() is not None:
                continue
            # Twice, because a bridge to JAX drops it and interrupts the main thread itself right afterwards.
            if gone is last and not self.ended:
                self._repeat()
            gone = last

    def _repeat(self) -> None:
        if hasattr(signal, "pthread_kill"):
            signal.pthread_kill(self._main, signal.SIGINT)  # ends a system call, too
        else:  # Windows
            _thread.interrupt_main()
