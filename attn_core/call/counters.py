"""counters: what this process planned, compiled and copied. Always on, because only rare or slow steps count."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count as counting
from threading import Lock
from time import perf_counter
from typing import Any, TypedDict

from attn_core.call import log
from attn_core.call.after_fork import free_in_children
from attn_core.call.options import check_flag


class Compiles(TypedDict):
    """Compilations of one kind: their number, and the seconds that all of them took."""

    number: int
    seconds: float


class Counters(TypedDict):
    """A snapshot by ``counters``: plain dicts and numbers. Keys of a later release may be more, never fewer.

    Attributes:
        plans: new plans by framework ("torch", "jax") and backend: calls that differed from all earlier ones.
        plan_hits: by framework, lookups that found a plan.
        evictions: plans and callbacks that a full cache dropped, by the cache's name.
        fallbacks: "backend": new plans that an installed or requested backend refused, although it was preferred to
            the chosen one; "lane": calls of JAX whose kernels XLA cannot launch itself; "triton": GPUs on which torch
            operations replace a Triton kernel.
        callback_calls: calls that JAX traced for the callback lane.
        compiles: by what compiled: "flash4", "flex", "triton", "compiled_lane", "xla".
        copies: "mask": bool masks converted to numbers; "bias": biases copied, because of their dtype or strides;
            "operand": q, k, v or their gradients copied, because a kernel cannot read their strides.
    """

    plans: dict[str, dict[str, int]]
    plan_hits: dict[str, int]
    evictions: dict[str, int]
    fallbacks: dict[str, int]
    callback_calls: int
    compiles: dict[str, Compiles]
    copies: dict[str, int]


FALLBACKS = ("backend", "lane", "triton")
COMPILES = ("flash4", "flex", "triton", "compiled_lane", "xla")
COPIES = ("mask", "bias", "operand")
FRAMEWORKS = ("torch", "jax")

_lock = free_in_children(Lock())
_numbers: Counter[tuple[str, ...]] = Counter()
"""By (group, name, ...); guarded by ``_lock``."""
_seconds: dict[str, float] = defaultdict(float)
"""Seconds of compilations by kind; guarded by ``_lock``."""

# Copies happen in every call of a slow path, so they are counted by one call of a C function, which needs no lock.
_copies = {kind: counting(1) for kind in COPIES}
mask_converted: Callable[[], int] = _copies["mask"].__next__
bias_copied: Callable[[], int] = _copies["bias"].__next__
operand_copied: Callable[[], int] = _copies["operand"].__next__

_caches: dict[str, list[Any]] = {framework: [] for framework in FRAMEWORKS}
"""The caches of plans that a frontend has; an lru_cache counts its hits itself."""
_base: Counter[tuple[str, ...]] = Counter()
"""What hits and copies had counted at the last reset; guarded by ``_lock``."""


def counters(*, reset: bool = False) -> Counters:
    """Returns a snapshot of this process's counters.

    Args:
        reset: start again from zero after this snapshot.
    """
    with _lock:
        running = {("hits", name): hits(name) for name in FRAMEWORKS}
        running |= {("copies", kind): _value(copies) for kind, copies in _copies.items()}
        result = _snapshot({key: value - _base[key] for key, value in running.items()})
        if check_flag("reset", reset):
            _numbers.clear()
            _seconds.clear()
            _base.update({key: value - _base[key] for key, value in running.items()})
    return result


def _snapshot(running: dict[tuple[str, ...], int]) -> Counters:
    def group(name: str, *always: str) -> dict[str, int]:
        found = {key[1]: number for key, number in _numbers.items() if key[0] == name}
        return dict.fromkeys(always, 0) | found

    plans: dict[str, dict[str, int]] = {framework: {} for framework in FRAMEWORKS}
    for (kind, *rest), number in _numbers.items():
        if kind == "plan":
            plans[rest[0]][rest[1]] = number
    compiles = group("compile", *COMPILES)
    return {
        "plans": plans,
        "plan_hits": {framework: max(0, running["hits", framework]) for framework in FRAMEWORKS},
        "evictions": group("eviction"),
        "fallbacks": group("fallback", *FALLBACKS),
        "callback_calls": _numbers["callback",],
        "compiles": {kind: {"number": compiles[kind], "seconds": _seconds[kind]} for kind in compiles},
        "copies": {kind: running["copies", kind] for kind in COPIES},
    }


def count(*key: str) -> int:
    """Adds 1 to a counter and returns it: ("plan", framework, backend), ("fallback", what), ("callback",), ..."""
    with _lock:
        _numbers[key] += 1
        return _numbers[key]


def watch(framework: str, *caches: Any) -> None:
    """Counts the hits of these ``lru_cache`` functions as hits of plans."""
    _caches[framework].extend(caches)


def hits(framework: str) -> int:
    """Returns the lookups that found a plan, since the process began."""
    return sum(cache.cache_info().hits for cache in _caches[framework])


def _value(copies: counting[int]) -> int:
    """Returns how often a counter was called. Its text is the only way to read it without a step: ``count(5)``."""
    return int(repr(copies)[len("count(") : -1]) - 1


@contextmanager
def timed(kind: str, name: str) -> Iterator[None]:
    """Times a block that compiles; a block that raises does not count.

    Args:
        kind: one of ``COMPILES``. name: the program or the kernel, for the record.
    """
    began = perf_counter()
    yield
    compiled(kind, name, perf_counter() - began)


def compiled(kind: str, name: str, seconds: float) -> None:
    """Counts a compilation of one of ``COMPILES`` that took these seconds, and writes a record of it."""
    with _lock:
        _numbers["compile", kind] += 1
        _seconds[kind] += seconds
    log.emit("compile", f"{kind} took {seconds:.3f} s for {name}", kind=kind, name=name, seconds=seconds)
