"""cached_once: a ``functools.cache`` that runs the function once even if several threads call it at the same time."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import _lru_cache_wrapper, cache, wraps
from threading import RLock
from typing import Any, TypeVar

from attn_core.call.after_fork import after_fork

Result = TypeVar("Result")


def cached_once(function: Callable[..., Result]) -> _lru_cache_wrapper[Result]:
    """Caches a function's results by its arguments, and runs the function once per arguments in the whole process.

    ``functools.cache`` alone runs it in every thread that calls before the first result exists: two registrations, two
    libraries loaded. Here the other threads wait, each for its own arguments only. An error is raised and not cached:
    the next thread tries again. The function may call itself. Reading a cached result takes as long as with
    ``functools.cache``.
    """
    locks: dict[Hashable, Any] = {}
    after_fork(locks.clear)  # the thread that holds one does not exist in a child
    # Two caches: the inner one makes the second waiter find the first one's result, the outer one answers later calls
    # in C, without a lock. The locks are reentrant, so the function may call itself.
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
    once.__wrapped__ = function  # torch's compiler traces __wrapped__, and must not see the locks
    return once
