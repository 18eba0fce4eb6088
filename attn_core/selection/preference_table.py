"""From a sweep's raw times to the table that ``preference.py`` looks calls up in, and what the choice costs.

Both are plain data: the raw file of ``attn bench --json`` and ``attn_core/selection/measured/<device>.json``.
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

TIE = 1.02
"""Times within two per cent are noise; the usual order decides between them."""

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


def derive(raw: dict[str, Any]) -> dict[str, Any]:
    """Derives the table of a raw file: per case its features, sizes, relative times in order of preference, best time.

    Leaves out cases without measurements, and cases whose right result is unknown: more than half of the backends
    disagree with the first.
    """
    usual = backends.PREFERENCE.get((raw["framework"], backends.kind_of(raw["device"])), ())
    cases = [case for record in raw["cases"] if (case := _case(record, usual))]
    header = ("date", "device", "device_name", "framework", "versions")
    return {name: raw.get(name) for name in header} | {"cases": cases}


def _case(record: dict[str, Any], usual: tuple[str, ...]) -> dict[str, Any] | None:
    times, failed = right_times(record), broken(record)
    if not times or len([name for name in failed if "median" in record["backends"][name]]) > len(times):
        return None
    spec = record_spec(record)
    best = min(times.values())
    return {
        "name": record["name"],
        "features": preference.features(spec)._asdict(),
        "sizes": list(preference.sizes(spec)),
        "times": {name: round(times[name] / best, 3) for name in stable_order(times, usual)},
        "microseconds": round(best, 1),
    } | ({"failed": failed} if failed else {})


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
        if "failed" in entry or not entry.get("difference", 0.0) <= allowed  # a NaN difference also counts as broken
    ]


def stable_order(times: dict[str, float], usual: tuple[str, ...]) -> list[str]:
    """Returns names by time, fastest first; names within TIE of the fastest remaining one follow the usual order."""
    left, ranked = dict(times), []
    while left:
        tied = [name for name in left if left[name] <= TIE * min(left.values())]
        ranked.append(min(tied, key=lambda name: (usual.index(name) if name in usual else len(usual), left[name])))
        del left[ranked[-1]]
    return ranked


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
        if not times:
            continue
        known = [case for case in cases if not (leave_out and _is_of(case, record))]
        like = preference.nearest(preference.features(spec), preference.sizes(spec), known)
        ranked = usual if like is None else preference.ranking(like, usual)
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
    """The spec of a raw record, with its direction."""
    return replace(spec_of(record["spec"]), needs_backward=record["direction"] == "training")


def _is_of(case: Case, record: dict[str, Any]) -> bool:
    return case.name == record["name"] and case.features.training is (record["direction"] == "training")
