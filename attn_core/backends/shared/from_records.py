"""Caches of what follows from the backends' records, which a new record empties."""

from __future__ import annotations

from collections.abc import Callable
from functools import _lru_cache_wrapper, lru_cache
from typing import Any, TypeVar

Result = TypeVar("Result")

_caches: list[Any] = []


def from_records(
    maxsize: int | None = None, typed: bool = False
) -> Callable[[Callable[..., Result]], _lru_cache_wrapper[Result]]:
    """An ``lru_cache`` for results that depend on which backends there are, or on what their records say."""

    def cached(function: Callable[..., Result]) -> _lru_cache_wrapper[Result]:
        _caches.append(lru_cache(maxsize, typed)(function))
        return _caches[-1]  # type: ignore[no-any-return]

    return cached


def forget() -> None:
    """Empties all of them. A call that another thread plans at this moment may keep its earlier choice."""
    for cache in _caches:
        cache.cache_clear()
