"""Derives the table of a device from raw times, and estimates what its choice costs for calls that it has not seen.

In k-fold cross-validation the calls are dealt into folds. For the calls of each fold, models choose that were fitted to
the other folds only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from statistics import geometric_mean
from typing import Any

from attn_core import backends
from attn_core.cli.timing import fastest_round
from attn_core.selection import preference
from attn_core.selection.cost_model import Model, kind_of_call, microseconds, sizes_of_call
from attn_core.selection.preference import caution, ranking
from attn_core.selection.tables import DIRECTIONS, FORMAT, plain_model, shipped_table
from benchmarks.fit.models import NOISES, Sample, fit
from benchmarks.fit.records import (
    GOALS,
    TORCH_ALONE,
    Record,
    Regret,
    counts,
    measured_records,
    record_spec,
    regrets,
    right_times,
    samples_of,
    static_order,
    summary,
)
from benchmarks.tables import lines_of

FOLDS = 10

TILE = {"cuda": 128, "cpu": 32}
"""Queries that the kernels of a kind of device work on at a time, about."""

PROCESSORS = {"sm80": 108, "sm90": 132, "sm100": 148, "cpu": 8}
"""Tiles that a device works on at a time; the models correct a wrong number."""

DOUBT = 2
"""A model's error counts as if this many more calls had been predicted, each wrong by a factor of 1.6."""

FEWEST = 12
"""A backend needs this many measured calls in a direction for a model."""

ALONE = 60
"""With this many calls, the search for a backend's rates begins with what its own calls suggest."""

FAMILIES = (
    ("flash2", "sdpa_flash"),
    ("flash3", "flash4", "sdpa_cudnn"),
    ("sdpa_efficient", "flex"),
)
"""Backends whose kernels work alike, so that a fit to all of them is a good start for each."""


class Fitting:
    """The models of a device, fitted to raw times, and their predictions for calls that they did not see.

    Attributes:
        raw: the content of the raw file.
        records: the usable records, in the order of the file.
        counted: the records of which the cost of a choice is known, see ``records.counts``.
    """

    def __init__(self, raw: dict[str, Any]) -> None:
        """Takes the raw times; the fits run when their results are read."""
        self.raw, self.records = raw, measured_records(raw)
        self.kind = backends.kind_of(raw["device"])
        self.counted = [record for record in self.records if counts(record)]
        self.tile, self.processors = TILE[self.kind], PROCESSORS.get(raw["device"], 132)
        # Both directions of a call are in one fold.
        calls = {name: place for place, name in enumerate(dict.fromkeys(record["name"] for record in self.records))}
        self._folds = [calls[record["name"]] % FOLDS for record in self.records]

    @cached_property
    def unseen(self) -> list[dict[str, float]]:
        """For each record the microseconds by backend, predicted by models that did not see its call."""
        result: list[dict[str, float]] = [{} for _ in self.records]
        for fold in range(FOLDS):
            for (training, name), model in self._fits(without=fold).items():
                for place, sample in self._samples[training, name].items():
                    if self._folds[place] == fold:
                        result[place][name] = round(microseconds(model, sample.kind, sample.sizes), 2)
        return result

    @cached_property
    def models(self) -> dict[bool, dict[str, Model]]:
        """The models by direction and backend, fitted to all calls, each with its error over unseen calls."""
        result: dict[bool, dict[str, Model]] = {False: {}, True: {}}
        for (training, name), model in self._fits().items():
            result[training][name] = model._replace(error=self._errors.get((training, name), 1.0))
        return result

    def _fits(self, without: int | None = None) -> dict[tuple[bool, str], Model]:
        """Returns the models fitted to all calls, or to the calls that are not in one of the folds.

        A fit starts from a fit to its family, and that from a fit to all backends together: what a property of calls
        costs one backend, it likely costs another, so that backends with few calls learn from the others.
        """
        result: dict[tuple[bool, str], Model] = {}
        for training in (False, True):
            known = {
                name: [sample for place, sample in samples.items() if sample.weight and self._folds[place] != without]
                for (direction, name), samples in self._samples.items()
                if direction is training
            }
            together = [sample for samples in known.values() for sample in samples]
            common = fit(together, noises=NOISES[:1]) if together else None
            starts: dict[str, Model] = {}
            for family in FAMILIES:
                if relatives := [sample for name in family for sample in known.get(name, ())]:
                    starts |= dict.fromkeys(family, fit(relatives, common, NOISES[:2]))
            for name, samples in known.items():
                if samples:
                    result[training, name] = fit(samples, starts.get(name, common), own_rates=len(samples) >= ALONE)
        return result

    @cached_property
    def _samples(self) -> dict[tuple[bool, str], dict[int, Sample]]:
        """By direction and backend the samples, each under the position of its record."""
        candidates = backends.usual_order(self.raw["framework"], self.kind)
        samples = samples_of(self.records, candidates, self.kind, self.tile, self.processors)
        return {key: each for key, each in samples.items() if len(each) >= FEWEST}

    @cached_property
    def _errors(self) -> dict[tuple[bool, str], float]:
        squares: dict[tuple[bool, str], list[float]] = {}
        for record in self.counted:
            times, predicted = right_times(record), self.unseen[self._place[id(record)]]
            for name, time in predicted.items():
                square = min(1.0, math.log(time / times[name]) ** 2)
                squares.setdefault((record["direction"] == "training", name), []).append(square)
        doubt = DOUBT * math.log(1.6) ** 2
        return {key: math.sqrt((sum(each) + doubt) / (len(each) + DOUBT)) for key, each in squares.items()}

    def ranked(self, record: Record) -> tuple[str, ...]:
        """Returns the candidates of a record, best first, as choice would rank them if it had not seen the call."""
        times, training = self.unseen[self._place[id(record)]], record["direction"] == "training"
        cautious = {name: time * caution(name, self.kind, self._errors[training, name]) for name, time in times.items()}
        usual = backends.usual_order(self.raw["framework"], self.kind)
        return ranking(cautious, usual)

    @cached_property
    def _place(self) -> dict[int, int]:
        return {id(record): place for place, record in enumerate(self.records)}

    def regrets(self, only: Sequence[str] | None = None) -> list[Regret]:
        """Returns the cost of automatic choice for calls that it has not seen.

        Args:
            only: the installed backends; None for all that were measured.
        """
        return regrets(self.counted, self.ranked, only)

    def table(self) -> dict[str, Any]:
        """Returns the table of the device, as the content of its file."""
        names = ("date", "device", "device_name", "framework", "versions")
        models = {
            direction: {name: plain_model(model) for name, model in self.models[training].items()}
            for direction, training in DIRECTIONS.items()
        }
        sizes = {
            "tile": self.tile,
            "processors": self.processors,
            "calls": len({record["name"] for record in self.records}),
        }
        held_out = {"held_out": summary(self.regrets())}
        return {"format": FORMAT} | {name: self.raw.get(name) for name in names} | sizes | held_out | {"models": models}


def package_order(raw: dict[str, Any]) -> tuple[str, Callable[[Record], Sequence[str]]]:
    """Returns where the package's order for a sweep's device comes from, and its ranking of a record's backends.

    Without a table of the device, that is the order of ``preference``.
    """
    framework, device = raw["framework"], raw["device"]
    table = shipped_table(framework, device)
    if table is None:
        return "without a table", lambda record: preference.order(record_spec(record), framework, device)
    usual = backends.usual_order(framework, backends.kind_of(device))

    def ranked(record: Record) -> Sequence[str]:
        # Not ``preference.order``, which knows that new lengths cost more than calls that repeat, as these do.
        spec, right = record_spec(record), right_times(record)
        kind, sizes = kind_of_call(spec), sizes_of_call(spec, table.tile, table.processors)
        models = table.models[spec.needs_backward].items()
        weight = preference.weight_of_host(table, framework, backends.kind_of(device))
        times = {
            name: caution(name, backends.kind_of(device), model.error) * microseconds(model, kind, sizes, weight)
            for name, model in models
            if name in right and backends.load(name, backends.kind_of(device)).modelled(spec)
        }
        return ranking(times, usual)

    return f"fitted to {table.source}", ranked


def report(fitting: Fitting, judge: bool = False) -> str:
    """Returns Markdown: the cost of automatic choice, its goals, and its speed beside the framework's own function.

    Args:
        judge: whether the package's order is judged, whose table saw none of the calls; else a fit to the others.
    """
    raw = fitting.raw
    source, ranked = package_order(raw) if judge else ("predicted, unseen calls", fitting.ranked)
    kinds = {source: regrets(fitting.counted, ranked)}
    if fitting.kind == "cuda":
        kinds[f"{source}, torch alone"] = regrets(fitting.counted, ranked, TORCH_ALONE)
    kinds["static order"] = regrets(fitting.counted, static_order(raw))
    rows = []
    for kind, chosen in kinds.items():
        for direction, facts in summary(chosen).items():
            numbers = f"{facts['geometric mean']:.3f}", f"{facts['99th percentile']:.2f}", f"{facts['worst']:.2f}"
            rows.append([kind, direction, str(facts["cases"]), *numbers, facts["worst case"]])
    lines = [lines_of(["order", "direction", "calls", "geometric mean", "99th percentile", "worst", "where"], rows)]
    goals = ", ".join(f"{name} at most {value}" for name, value in GOALS[fitting.kind].items())
    lines.append(f"\nGoals for unseen calls: {goals}.\n")
    if ratios := speeds_beside(fitting.counted, kinds[source]):
        lines.append(speed_table(ratios))
        lines.append("\nTimes as fast as the framework's own function, for the calls that it can express.\n")
    return "\n".join(lines)


def speed_table(ratios: Mapping[tuple[str, str], Sequence[tuple[float, str]]]) -> str:
    """Returns a Markdown table of what ``speeds_beside`` returns: (times as fast, call) by function and direction."""
    rows = []
    for (name, direction), pairs in ratios.items():
        mean = geometric_mean(ratio for ratio, _ in pairs)
        slower, (lowest, where) = sum(ratio < 0.95 for ratio, _ in pairs), min(pairs)
        rows.append([name, direction, str(len(pairs)), f"{mean:.3f}", str(slower), f"{lowest:.2f}", where])
    return lines_of(["beside", "direction", "calls", "geometric mean", "below 0.95", "lowest", "where"], rows)


def speeds_beside(
    records: Sequence[Record], chosen: Sequence[Regret]
) -> dict[tuple[str, str], list[tuple[float, str]]]:
    """Returns how many times as fast a choice is as the framework's own functions: by function and direction.

    Left out are the calls for which torch's own function may run a kernel that is known to be wrong: cuDNN with NaN.
    """
    ratios: dict[tuple[str, str], list[tuple[float, str]]] = {}
    for record, regret in zip(records, chosen, strict=True):
        reasons = record["backends"].get("sdpa_cudnn", {}).get("refused", ())
        if any("NaN in" in reason for reason in reasons):
            continue
        for name, entry in record.get("beside", {}).items():
            if "median" in entry and math.isfinite(regret.ratio):
                time = right_times(record)[regret.chosen]
                ratios.setdefault((name, record["direction"]), []).append((fastest_round(entry) / time, record["name"]))
    return ratios
