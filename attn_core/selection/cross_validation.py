"""Derives the table of a device from raw times, and estimates what its choice costs for calls that it has not seen.

In k-fold cross-validation the calls are dealt into folds. For the calls of each fold, models choose that were fitted to
the other folds only.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from attn_core import backends
from attn_core.selection.cost_model import Model, microseconds
from attn_core.selection.fit import NOISES, Sample, fit
from attn_core.selection.preference import caution, ranking
from attn_core.selection.regret import (
    Record,
    Regret,
    measured_records,
    regrets,
    right_times,
    summary,
)
from attn_core.selection.samples import counts, samples_of
from attn_core.selection.tables import DIRECTIONS, FORMAT, plain_model
from attn_core.selection.whole_file import names_file, write_whole

FOLDS = 10

TILE = {"cuda": 128, "cpu": 32}
"""Queries that the kernels of a kind of device work on at a time, about."""

PROCESSORS = {"sm80": 108, "sm90": 132, "sm100": 148, "cpu": 8}
"""Tiles that a device works on at a time; the models correct a wrong number."""

DOUBT = 2
"""A model's error counts as if this many more calls had been predicted, each wrong by a factor of 1.6."""

FEWEST, FEWEST_AFTER_START = 12, 3
"""A backend needs this many measured calls in a direction for a model; fewer if the fit starts from another model."""

ALONE = 60
"""With this many calls, the search for a backend's rates begins with what its own calls suggest."""

FAMILIES = (
    ("flash2", "sdpa_flash"),
    ("flash3", "flash4", "sdpa_cudnn"),
    ("sdpa_efficient", "flex"),
)
"""Backends whose kernels work alike, so that a fit to all of them is a good start for each."""

Models = Mapping[bool, Mapping[str, Model]]


class Fitting:
    """The models of a device, fitted to raw times, and their predictions for calls that they did not see.

    Attributes:
        raw: the content of the raw file.
        records: the usable records, in the order of the file.
        counted: the records of which the cost of a choice is known, see ``samples.counts``.
    """

    def __init__(self, raw: dict[str, Any], start: Models | None = None) -> None:
        """Takes the raw times; the fits run when their results are read.

        Args:
            start: models of a similar device, for few measurements; by default a fit starts from plain guesses.
        """
        self.raw, self.records, self._start = raw, measured_records(raw), start or {}
        self.kind = backends.kind_of(raw["device"])
        self.counted = [record for record in self.records if counts(record)]
        self.tile, self.processors = TILE[self.kind], PROCESSORS.get(raw["device"], 132)
        # Both directions of a call are in one fold.
        calls = {name: place for place, name in enumerate(dict.fromkeys(record["name"] for record in self.records))}
        self._folds = [calls[record["name"]] % FOLDS for record in self.records]

    @cached_property
    def unseen(self) -> list[dict[str, float]]:
        """For each record the microseconds by backend, predicted by models that did not see its call.

        A raw file may hold these predictions already, see ``with_predictions``.
        """
        if all(record.get("predicted") is not None for record in self.records):
            return [record["predicted"] for record in self.records]
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
                    first = self._first(training, name)
                    result[training, name] = fit(
                        samples, first or starts.get(name, common), own_rates=len(samples) >= ALONE
                    )
        return result

    def with_predictions(self) -> dict[str, Any]:
        """Returns the raw content with ``unseen`` in it, so that its page does not depend on the last bits of a fit."""
        predicted = {id(record): times for record, times in zip(self.records, self.unseen, strict=True)}
        cases = [record | {"predicted": predicted.get(id(record), {})} for record in self.raw["cases"]]
        return self.raw | {"cases": cases}

    def _first(self, training: bool, name: str) -> Model | None:
        return self._start.get(training, {}).get(name)

    @cached_property
    def _samples(self) -> dict[tuple[bool, str], dict[int, Sample]]:
        """By direction and backend the samples, each under the position of its record."""
        candidates = backends.usual_order(self.raw["framework"], self.kind)
        samples = samples_of(self.records, candidates, self.kind, self.tile, self.processors)
        return {key: each for key, each in samples.items() if len(each) >= self._fewest(*key)}

    def _fewest(self, training: bool, name: str) -> int:
        return FEWEST if self._first(training, name) is None else FEWEST_AFTER_START

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
        cautious = {name: time * caution(name, self._errors[training, name]) for name, time in times.items()}
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


def write_table(table: dict[str, Any], path: Path) -> None:
    """Writes a table as JSON with a line for each model, so that diffs of two files are readable.

    Raises:
        SpecError: if the file cannot be written. An earlier file is unchanged.
    """
    head = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in table.items() if name != "models"]
    directions = []
    for direction, models in table["models"].items():
        lines = ",\n".join(f"   {json.dumps(name)}: {json.dumps(model)}" for name, model in models.items())
        directions.append(f"  {json.dumps(direction)}: {{\n{lines}\n  }}")
    text = "".join(f" {line},\n" for line in head)
    with names_file(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(f'{{\n{text} "models": {{\n' + ",\n".join(directions) + "\n }\n}\n", path)
