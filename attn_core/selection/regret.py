"""The cost of automatic choice: its time over that of the fastest backend, case by case, from a sweep's raw times.

The raw times are the file of ``attn bench --json``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from attn_core import backends
from attn_core.call.spec import AttentionSpec
from attn_core.selection import preference
from attn_core.selection.preference import Case
from attn_core.selection.sweep import spec_of

AGREEMENT = {"bfloat16": 0.05, "float16": 0.02, "float32": 0.01, "float64": 1e-5}
"""The largest allowed difference from the first backend's results, relative to their largest value."""

GOALS = {"geometric mean": 1.03, "worst": 1.25}
"""Limits of the automatic choice's cost: its time over the best backend's."""


class Regret(NamedTuple):
    """The cost of automatic choice in a case: ``ratio`` is 1 at best, infinite if the chosen backend has no time."""

    case: str
    training: bool
    best: str
    chosen: str
    ratio: float


def right_times(record: dict[str, Any]) -> dict[str, float]:
    """Returns microseconds by backend, for the backends with right numbers."""
    wrong = broken(record)
    return {
        name: entry["median"] for name, entry in record["backends"].items() if "median" in entry and name not in wrong
    }


def broken(record: dict[str, Any]) -> list[str]:
    """Returns the backends that claim a case but raised, or whose numbers differ from the first backend's."""
    allowed = AGREEMENT[record["spec"]["dtype"]]
    return [
        name
        for name, entry in record["backends"].items()
        # "not <=" instead of ">", because a NaN difference must count as broken
        if "failed" in entry or not entry.get("difference", 0.0) <= allowed
    ]


def regrets(raw: dict[str, Any], cases: Sequence[Case], *, leave_out: bool = False) -> list[Regret]:
    """Returns the cost of choosing by a table's cases, for every case of a raw file.

    Args:
        cases: of the table; none means the static order.
        leave_out: look each case up among the other cases only, which estimates the cost for unseen calls.
    """
    usual = backends.PREFERENCE.get((raw["framework"], backends.kind_of(raw["device"])), ())
    result = []
    for record in raw["cases"]:
        times, spec = right_times(record), record_spec(record)
        # No backend had a right result, so there is no best time to compare with.
        if not times:
            continue
        known = [case for case in cases if not (leave_out and _is_of(case, record))]
        like = preference.nearest(preference.features(spec), preference.sizes(spec), known)
        ranked = usual if like is None else preference.ranking(like, usual)
        # A call never runs on a backend that was not measured here or that refuses it, so none of these is chosen.
        able = [name for name in ranked if name in record["backends"] and "refused" not in record["backends"][name]]
        chosen, best = able[0] if able else "", min(times, key=lambda name: times[name])
        ratio = times[chosen] / times[best] if chosen in times else math.inf
        result.append(Regret(record["name"], spec.needs_backward, best, chosen, ratio))
    return result


def summary(regrets: Iterable[Regret]) -> dict[str, dict[str, Any]]:
    """Returns per direction: the number of cases, the geometric mean of the regret, the worst and its case."""
    result, regrets = {}, list(regrets)
    for direction, training in (("forward", False), ("training", True)):
        these = [regret for regret in regrets if regret.training is training]
        if these:
            worst = max(these, key=lambda regret: regret.ratio)
            mean = math.exp(sum(math.log(regret.ratio) for regret in these) / len(these))
            result[direction] = {
                "cases": len(these),
                "geometric mean": mean,
                "worst": worst.ratio,
                "worst case": f"{worst.case}: {worst.chosen or 'none'} for {worst.best}",
            }
    return result


def record_spec(record: dict[str, Any]) -> AttentionSpec:
    """Returns the spec of a raw record, with a backward if the record is of training."""
    return replace(spec_of(record["spec"]), needs_backward=record["direction"] == "training")


def _is_of(case: Case, record: dict[str, Any]) -> bool:
    return case.name == record["name"] and case.features.training is (record["direction"] == "training")
