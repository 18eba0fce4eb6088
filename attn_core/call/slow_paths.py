"""SlowPathWarning: a loop of the caller that does the same slow step again and again, and its remedy."""

from __future__ import annotations

import warnings
from threading import Lock

from attn_core.call import counters, log
from attn_core.call.after_fork import free_in_children
from attn_core.call.log import Place

PAGE = "docs/how_to/observe.md"


class SlowPathWarning(UserWarning):
    """A loop takes a slow path, and another argument would avoid it. Warned once for each cause and line of the caller.

    ``warnings.filterwarnings("ignore", category=attn_core.SlowPathWarning)`` silences all of them.
    """


CAUSES = {
    "replans": "a-new-plan-in-every-call",
    "mask": "a-mask-that-an-option-describes",
    "bias": "a-bias-copied-in-every-call",
    "callback": "a-callback-in-a-hot-loop",
    "cudnn": "more-shapes-than-plans-of-cudnn",
}
"""The anchor of each cause on the page PAGE."""

_warned: set[tuple[str, Place]] = set()
"""Guarded by ``_lock``. Places are lines of programs, so there are few."""
_lock = free_in_children(Lock())


def warn_once(cause: str, place: Place | None, finding: str, remedy: str) -> bool:
    """Warns of a slow path at a line of the caller, unless it has; returns whether it warned now.

    Args:
        cause: a key of CAUSES. place: without one, nobody is told.
    """
    if place is None:
        return False
    with _lock:
        if (cause, place) in _warned:
            return False
        _warned.add((cause, place))
    counters.count("slow_path", cause)
    text = f"{finding}; {remedy} ({PAGE}#{CAUSES[cause]})"
    log.emit("slow_path", text, cause=cause, file=place.file, line=place.line, finding=finding, remedy=remedy)
    # The line of the caller, not ours. No registry, because ``_warned`` already tells once from again.
    warnings.warn_explicit(text, SlowPathWarning, place.file, place.line)
    return True
