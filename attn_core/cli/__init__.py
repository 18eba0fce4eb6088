"""The command line ``attn``. Only this package imports typer and rich, and only when a command runs."""

from __future__ import annotations

import _thread
import errno
import signal
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

from attn_core.errors import MissingExtraError, needs_extra


def main() -> None:
    """Runs ``attn``. If typer or rich is missing, exits with one line that says what to install."""
    try:
        with needs_extra("the command line", "cli", "typer", "rich"):
            from attn_core.cli.app import app
    except MissingExtraError as error:
        sys.exit(f"attn: {error}")
    try:
        with insistent_ctrl_c():
            app(prog_name="attn")
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            raise
        sys.exit(f"attn: the output cannot be written: {error.strerror}")


# Ctrl-C that arrives: other code may drop a KeyboardInterrupt, and a command would then run on for minutes.

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
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    raised: list[weakref.ref[_CtrlC]] = []
    ended = threading.Event()

    def interrupt(*_: object) -> None:
        error = _CtrlC()
        raised.append(weakref.ref(error))
        if len(raised) == 1:
            watched = (raised, ended, threading.get_ident())
            threading.Thread(target=_watch, args=watched, name="attn ctrl-c", daemon=True).start()
        try:
            raise error
        finally:
            del error  # or this frame, which the error's traceback has, would keep it alive

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        ended.set()
        signal.signal(signal.SIGINT, signal.default_int_handler)


class _CtrlC(KeyboardInterrupt):
    """A KeyboardInterrupt that weak references can watch."""


def _watch(raised: list[weakref.ref[_CtrlC]], ended: threading.Event, main: int) -> None:
    """Interrupts the main thread again while its last interrupt is gone, until the block has ended."""
    gone = 0
    while not ended.wait(EVERY):
        if raised[-1]() is not None:
            continue
        # Twice, because a bridge to JAX drops it and interrupts the main thread itself right afterwards.
        if gone == len(raised) and not ended.is_set():
            if hasattr(signal, "pthread_kill"):
                signal.pthread_kill(main, signal.SIGINT)  # ends a system call, too
            else:  # Windows
                _thread.interrupt_main()
        gone = len(raised)
