"""Counts and records new plans, fallbacks and evictions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attn_core.call import observe
from attn_core.call.observe import words_of
from attn_core.call.spec import AttentionSpec
from attn_core.selection.choice import Selection
from attn_core.selection.target import Target

Names = tuple[str, ...] | None


def planned(spec: AttentionSpec, target: Target, requested: Names, backend: str, fell_back: bool) -> None:
    """Counts a new plan and a fallback, and writes their records.

    Args:
        requested: the backends that the caller named, or None for automatic choice.
        fell_back: see ``is_fallback``.
    """
    observe.count("plan", target.framework, backend)
    if fell_back:
        observe.count("fallback", "backend")
    if observe.log_enabled():
        _record(spec, target, requested, backend, fell_back)


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
    observe.count("eviction", name)
    observe.emit("eviction", f"{name} is full with {size} entries and drops the oldest", cache=name, size=size)


def _order_of(selection: Selection) -> str:
    """Returns what the order of automatic choice is derived from, in two words."""
    if selection.published is not None:
        return "published figures"
    return "static order" if selection.source is None else "cost model"


def _record(spec: AttentionSpec, target: Target, requested: Names, backend: str, fell_back: bool) -> None:
    """Tells the observers which backend a new plan has, by what it was chosen, and which ones before it refused."""
    selection = Selection(spec, target, requested, backend)
    names = selection.considered
    refused = {name: list(selection.reasons(name)) for name in names[: names.index(backend)]}
    chosen_by = "name" if requested else _order_of(selection)
    call, where = words_of(spec), f"{target.framework} on {target.device}"
    common: dict[str, Any] = {"backend": backend, "framework": target.framework, "device": target.device, "call": call}
    behind = f", behind {', '.join(refused)}" if refused else ""
    predicted = None if requested else selection.predicted.get(backend)
    fields_of_plan = {"chosen_by": chosen_by, "predicted_us": predicted, "refused": refused}
    observe.emit("plan", f"{backend} in {where}, by {chosen_by}{behind}: {call}", **common, **fields_of_plan)
    if fell_back:
        reasons = "; ".join(f"{name}: {why[0]}" for name, why in refused.items() if why)
        observe.emit("fallback", f"{backend} in {where}, because {reasons}", what="backend", **common, refused=refused)
