"""The cost of automatic choice: its time over that of the fastest backend, call by call, from a sweep's raw times.

The raw times are the file of ``attn bench --json``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from attn_core import backends
from attn_core.call.spec import AttentionSpec
from attn_core.selection.sweep import spec_of

AGREEMENT = {"bfloat16": 0.05, "float16": 0.02, "float32": 0.01, "float64": 1e-5}
"""The largest allowed difference from the first backend's results, relative to their largest value."""

GOALS = {
    "cuda": {"geometric mean": 1.03, "99th percentile": 1.20, "worst": 1.35},
    "cpu": {"geometric mean": 1.05, "worst": 1.4},
}
"""Limits of the automatic choice's cost for calls that were not measured, by the kind of device."""

TORCH_ALONE = ("sdpa_cudnn", "sdpa_flash", "sdpa_efficient", "flex", "math")
"""The backends of a GPU that need no package but torch."""

Record = dict[str, Any]


class Regret(NamedTuple):
    """The cost of automatic choice in a case: ``ratio`` is 1 at best, infinite if the chosen backend has no time."""

    case: str
    training: bool
    best: str
    chosen: str
    ratio: float


def fastest_round(entry: dict[str, Any]) -> float:
    """Returns the microseconds of an entry's fastest round: what interferes with a round only makes it slower."""
    rounds = entry.get("microseconds")
    return min(rounds) if rounds else entry["median"]  # type: ignore[no-any-return]


def right_times(record: Record) -> dict[str, float]:
    """Returns microseconds by backend, for the backends with right numbers."""
    wrong = broken(record)
    return {
        name: fastest_round(entry)
        for name, entry in record["backends"].items()
        if "median" in entry and name not in wrong
    }


def broken(record: Record) -> list[str]:
    """Returns the backends that claim a case but raised, or whose numbers differ from the first backend's."""
    allowed = AGREEMENT[record["spec"]["dtype"]]
    return [
        name
        for name, entry in record["backends"].items()
        # "not <=" instead of ">", because a NaN difference must count as broken
        if "failed" in entry or not entry.get("difference", 0.0) <= allowed
    ]


def measured_records(raw: dict[str, Any]) -> list[Record]:
    """Returns the records in which a result is known to be right.

    If more than half of the backends disagree with the first one, the right result is unknown.
    """
    return [
        record
        for record in raw["cases"]
        if (times := right_times(record))
        and len([name for name in broken(record) if "median" in record["backends"][name]]) <= len(times)
    ]


def regrets(
    records: Iterable[Record], ranked: Callable[[Record], Sequence[str]], only: Sequence[str] | None = None
) -> list[Regret]:
    """Returns the cost of a choice for every record.

    Args:
        ranked: the candidates of a record, best first.
        only: the installed backends; None for all that were measured.
    """
    result = []
    for record in records:
        times = {name: time for name, time in right_times(record).items() if only is None or name in only}
        # No installed backend had a right result, so there is no best time to compare with.
        if not times:
            continue
        # A call never runs on a backend that was not measured here or that refuses it, so none of these is chosen.
        able = [name for name in ranked(record) if name in times or _failed(record, name, only)]
        chosen, best = able[0] if able else "", min(times, key=lambda name: times[name])
        ratio = times[chosen] / times[best] if chosen in times else math.inf
        result.append(Regret(record["name"], record["direction"] == "training", best, chosen, ratio))
    return result


def _failed(record: Record, name: str, only: Sequence[str] | None) -> bool:
    return (only is None or name in only) and name in broken(record)


def static_order(raw: dict[str, Any]) -> Callable[[Record], Sequence[str]]:
    """Returns the ranking that ignores all measurements."""
    usual = backends.usual_order(raw["framework"], backends.kind_of(raw["device"]))
    return lambda record: usual


def summary(regrets: Iterable[Regret]) -> dict[str, dict[str, Any]]:
    """Returns per direction: the number of cases, the regret's geometric mean, 99th percentile and worst with its case.

    The 99th percentile is the smallest regret that at least 99 of 100 cases do not exceed.
    """
    result, regrets = {}, list(regrets)
    for direction, training in (("forward", False), ("training", True)):
        these = sorted((regret for regret in regrets if regret.training is training), key=lambda regret: regret.ratio)
        if these:
            worst = these[-1]
            mean = math.exp(sum(math.log(regret.ratio) for regret in these) / len(these))
            result[direction] = {
                "cases": len(these),
                "geometric mean": mean,
                "99th percentile": these[math.ceil(0.99 * len(these)) - 1].ratio,
                "worst": worst.ratio,
                "worst case": f"{worst.case}: {worst.chosen or 'none'} for {worst.best}",
            }
    return result


def record_spec(record: Record) -> AttentionSpec:
    """Returns the spec of a raw record, with a backward if the record is of training."""
    return replace(spec_of(record["spec"]), needs_backward=record["direction"] == "training")
