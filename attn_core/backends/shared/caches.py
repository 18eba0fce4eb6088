"""Caches: of functions that run once, of what follows from the backends' records, and of tensors that nobody changes.

A caller may change a tensor at any time, also in ways that torch does not count. So a backend keeps what it made from a
tensor only if the tensor is our own copy of values on the host.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import _lru_cache_wrapper, cache, lru_cache, wraps
from threading import RLock
from typing import TYPE_CHECKING, Any, TypeVar

from attn_core.call.after_fork import after_fork

if TYPE_CHECKING:
    import torch
    from torch import Tensor

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
    def waiting(*arguments: Hashable, **named: Hashable) -> Result:
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


_caches: list[Any] = []


def from_records(
    maxsize: int | None = None, typed: bool = False
) -> Callable[[Callable[..., Result]], _lru_cache_wrapper[Result]]:
    """An ``lru_cache`` for results that depend on which backends there are, or on what their records say."""

    def cached(function: Callable[..., Result]) -> _lru_cache_wrapper[Result]:
        _caches.append(lru_cache(maxsize, typed)(function))
        return _caches[-1]

    return cached


def forget() -> None:
    """Empties all of them. A call that another thread plans at this moment may keep its earlier choice."""
    for each in _caches:
        each.cache_clear()


MOST_RESULTS = 8
"""The most results that are kept for a tensor, and for none. Beyond it all of them are dropped."""
_results: dict[int, dict[Hashable, Any]] = {}
"""By the address of a constant tensor, what was made from it."""


def declare(tensor: Tensor) -> Tensor:
    """Declares that nothing writes to a tensor, as long as the object exists; returns the tensor."""
    address = tensor.data_ptr()
    _results[address] = {}
    weakref.finalize(tensor, _results.pop, address, None)
    return tensor


_of_no_tensor: dict[Hashable, Any] = {}
"""What was made from no tensor, but from the call alone."""
_keeps = ContextVar("keeps", default=True)


@contextmanager
def keeping_nothing() -> Iterator[None]:
    """In the block ``made_from`` keeps and reuses nothing. For the body of an op: while the CUDA graph of a compiled
    program warms up, new memory belongs to the graph."""
    token = _keeps.set(False)
    try:
        yield
    finally:
        _keeps.reset(token)


def made_from(tensor: Tensor | None, key: Hashable, make: Callable[[], Result], device: torch.device) -> Result:
    """Returns the result of ``make``, kept by ``key`` and torch's current stream if the tensor is a constant, or None.

    While a CUDA graph is captured nothing is kept or reused: the graph has its own memory.
    """
    import torch

    kept = _of_no_tensor if tensor is None else _results.get(tensor.data_ptr())
    if kept is None or not _keeps.get() or torch.cuda.is_current_stream_capturing():
        return make()
    place = key, device.index, torch._C._cuda_getCurrentRawStream(device.index)
    result = kept.get(place)
    if result is None:
        if len(kept) >= MOST_RESULTS:
            kept.clear()
        result = kept[place] = make()
    return result
