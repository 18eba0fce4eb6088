"""Ctrl-C that arrives: Python drops a KeyboardInterrupt that rises in a callback, such as a weak reference's."""

from __future__ import annotations

import _thread
import sys
from threading import Timer
from typing import Any

LATER = 0.05
"""Seconds until Ctrl-C is repeated. By then the callback that swallowed it has ended."""


def repeat_swallowed_ctrl_c() -> None:
    """Makes this process interrupt itself again whenever Python has ignored a KeyboardInterrupt.

    Python prints and drops an exception that rises in a weak reference's callback, in ``__del__`` or in a callback of
    the garbage collector, because it cannot raise it anywhere. torch's compiler and JAX have such callbacks, and a
    command that runs for minutes would go on after Ctrl-C. Call it again: it changes nothing.
    """
    before = sys.unraisablehook
    if isinstance(before, _Repeats):
        return
    sys.unraisablehook = _Repeats(before)


class _Repeats:
    def __init__(self, before: Any) -> None:
        self._before = before

    def __call__(self, unraisable: Any) -> None:
        if not issubclass(unraisable.exc_type, KeyboardInterrupt):
            self._before(unraisable)
            return
        # Not here: an exception that rises in this hook is dropped, too.
        again = Timer(LATER, _thread.interrupt_main)
        again.daemon = True
        again.start()
