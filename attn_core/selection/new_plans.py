"""Counts and records new plans, and warns if a loop needs a new one in every call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from itertools import count
from threading import Lock
from typing import Any

from attn_core.call import counters, log
from attn_core.call.after_fork import free_in_children
from attn_core.call.ranges import words_of
from attn_core.call.slow_paths import warn_once
from attn_core.call.spec import AttentionSpec
from attn_core.selection.choice import Selection
from attn_core.selection.target import Target

Names = tuple[str, ...] | None


def planned(spec: AttentionSpec, target: Target, requested: Names, backend: str, fell_back: bool) -> None:
    """Counts a new plan and a fallback, writes their records, and watches for loops of new plans.

    Args:
        requested: the backends that the caller named, or None for automatic choice.
        fell_back: see ``is_fallback``.
    """
    counters.count("plan", target.framework, backend)
    if fell_back:
        counters.count("fallback", "backend")
    if log.enabled():
        _record(spec, target, requested, backend, fell_back)
    _loops[target.framework].step(spec)


def selected(selection: Selection) -> None:
    """``planned`` for the Selection of a call that a backend can run."""
    assert selection.backend is not None
    names = selection.requested or selection.automatic
    fell_back = is_fallback(names, selection.backend, selection.target, selection.requested)
    planned(selection.spec, selection.target, selection.requested, selection.backend, fell_back)


def is_fallback(names: Sequence[str], chosen: str, target: Target, requested: Names) -> bool:
    """Returns whether a backend in front of the chosen one could have run other calls here.

    Args:
        names: the candidates, best first. A backend that is not installed counts only if the caller named it.
    """
    if names[0] == chosen:  # nearly always, and a decoding loop asks with every token
        return False
    missing = () if requested else [name for name, _ in target.unavailable]
    return any(name not in missing for name in names[: names.index(chosen)])


def evicted(cache: Any) -> None:
    """Counts and records that a cache is full, so that its new entry drops the oldest. Call it in a miss."""
    info = cache.cache_info()
    if info.maxsize is not None and info.currsize >= info.maxsize:
        dropped(cache.__name__.strip("_"), info.maxsize)


def dropped(name: str, size: int) -> None:
    """Counts and records that a full cache dropped an entry."""
    counters.count("eviction", name)
    log.emit("eviction", f"{name} is full with {size} entries and drops the oldest", cache=name, size=size)


def _record(spec: AttentionSpec, target: Target, requested: Names, backend: str, fell_back: bool) -> None:
    selection = Selection(spec, target, requested, backend)
    names = selection.considered
    refused = {name: list(selection.reasons(name)) for name in names[: names.index(backend)]}
    source = None if requested else selection.source
    chosen_by = "name" if requested else "static order" if source is None else "cost model"
    call, where = words_of(spec), f"{target.framework} on {target.device}"
    common: dict[str, Any] = {"backend": backend, "framework": target.framework, "device": target.device, "call": call}
    behind = f", behind {', '.join(refused)}" if refused else ""
    predicted = None if requested else selection.predicted.get(backend)
    fields_of_plan = {"chosen_by": chosen_by, "predicted_us": predicted, "refused": refused}
    log.emit("plan", f"{backend} in {where}, by {chosen_by}{behind}: {call}", **common, **fields_of_plan)
    if fell_back:
        reasons = "; ".join(f"{name}: {why[0]}" for name, why in refused.items() if why)
        log.emit("fallback", f"{backend} in {where}, because {reasons}", what="backend", **common, refused=refused)


WINDOW = 64
"""How many new plans in a row are one observation."""
MOST_LOOKUPS = {"torch": 100, "jax": 200}
"""The most lookups of plans during WINDOW new ones that still look like a loop. JAX looks up each call twice."""

REMEDIES = {
    "q_len": "pad rows to a few lengths, for example multiples of 128",
    "kv_len": "decode from a cache of fixed length with a mask, or from pages (paged_attention)",
    "batch": "pad the batch to a few sizes",
    "max_len_q": "round the longest document up, SeqInfo(..., max_len_q=), to a multiple of 128",
    "max_len_k": "round the longest document up, SeqInfo(..., max_len_k=), to a multiple of 128",
    "documents": "pad the offsets to a fixed number of documents; empty ones are allowed",
    "scale": "keep scale fixed: it is part of the plan",
    "softcap": "keep softcap fixed: it is part of the plan",
}
"""What to do by the field of the spec that is new in every plan; the first that differs is named."""


class _Loop:
    """Watches one framework for a line of the caller that needs new plans again and again.

    Every WINDOW-th new plan compares the number of lookups since the one before. Two such windows in a row, which end
    at the same line, are a loop: a program that starts has new plans at many lines, and stops having them.
    """

    def __init__(self, framework: str) -> None:
        self._framework, self._lock = framework, free_in_children(Lock())
        self._number = count(1).__next__  # one call of a C function, which needs no lock
        self._hits = 0
        self._before: AttentionSpec | None = None
        self._suspect: log.Place | None = None

    def step(self, spec: AttentionSpec) -> None:
        """Counts a new plan; warns if a loop needs one in every call."""
        number = self._number() % WINDOW
        if number:
            self._before = spec
            return
        with self._lock:
            before = self._before
            hits = counters.hits(self._framework)
            found, self._hits = hits - self._hits, hits
            # Fewer hits than before: a cache was cleared and counts from zero, so this window tells nothing.
            looks_new = found >= 0 and WINDOW + found <= MOST_LOOKUPS[self._framework]
            place = log.place() if looks_new else None
            is_loop, self._suspect = place is not None and place == self._suspect, place
        if is_loop and before is not None:
            self._warn(before, spec, place, found)

    def _warn(self, before: AttentionSpec, spec: AttentionSpec, place: log.Place | None, found: int) -> None:
        changed = [field.name for field in fields(spec) if getattr(spec, field.name) != getattr(before, field.name)]
        names = [name for name in REMEDIES if name in changed] or changed
        values = ", ".join(f"{name}={getattr(spec, name)!r} after {getattr(before, name)!r}" for name in names[:2])
        finding = f"{self._framework}: {WINDOW} of the last {WINDOW + found} lookups made a new plan ({values})"
        warn_once("replans", place, finding, REMEDIES.get(names[0], "keep it fixed") if names else "keep it fixed")


_loops = {framework: _Loop(framework) for framework in counters.FRAMEWORKS}
