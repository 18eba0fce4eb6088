"""cached_once: ``functools.cache`` for what must happen once in a process, whichever threads ask for it first."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import _lru_cache_wrapper, cache, wraps
from threading import RLock
from typing import Any, TypeVar

Result = TypeVar("Result")


def cached_once(function: Callable[..., Result]) -> _lru_cache_wrapper[Result]:
    """Keeps a function's results by its arguments, and runs the function once for each, also where threads meet.

    ``functools.cache`` alone runs it in every thread that asks before the first result is there: two registrations, two
    libraries loaded, two locks. Here the other threads wait, each for its own arguments only. An error is raised and
    not kept: the next thread tries again. The function may call itself. Reading a kept result takes as long as with
    ``functools.cache``.
    """
    locks: dict[Hashable, Any] = {}
    first = cache(function)

    @wraps(function)
    def waiting(*arguments: Any, **named: Any) -> Result:
        with locks.setdefault((arguments, *named.items()), RLock()):
            return first(*arguments, **named)

    once = cache(waiting)
    forget = once.cache_clear

    def cache_clear() -> None:
        first.cache_clear()
        forget()

    once.cache_clear = cache_clear  # type: ignore[method-assign]
    once.__wrapped__ = function  # which torch's compiler traces
    return once
