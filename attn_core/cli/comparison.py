"""Runs one spec on every backend in every installed framework and compares the results with the float64 reference."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import attn_core
from attn_core import backends
from attn_core.call.spec import AttentionSpec
from attn_core.cli import in_jax, in_torch
from attn_core.cli.frameworks import installed
from attn_core.cli.timing import Calls, Entry, measure
from attn_core.cli.trial import Arrays, Trial, differing, expectation, judge
from attn_core.correctness.accuracy import Accuracy, Expected
from attn_core.selection import Target

FRAMEWORKS: dict[str, Any] = {"torch": in_torch, "jax": in_jax}
"""The modules that run a trial; each also times it."""

ORACLE_LIMIT = 2**23
"""The most softmax weights for the float64 reference, which allocates about twenty arrays of that size."""


@dataclass(frozen=True)
class Row:
    """One backend in one framework: its results and accuracy, or the reasons why there are none.

    Attributes:
        backend, framework: the backend and the framework that called it.
        reasons: why it did not run, or how it failed; empty if it ran.
        results: by name, or None.
        accuracy: its comparison with the reference; None if it did not run or the call is too large for the reference.
        failed: whether it was selected and raised. This is a defect; a refusal is not.
        device: the requested device.
        approximate: whether the backend is less precise than its dtypes. If so, an error above the bound is no defect.
    """

    backend: str
    framework: str
    reasons: tuple[str, ...] = ()
    results: Arrays | None = None
    accuracy: Accuracy | None = None
    failed: bool = False
    device: str = "cpu"
    approximate: bool = False

    @property
    def wrong(self) -> bool:
        """Whether the backend raised or a number is outside its bound. A NaN is wrong even if it is approximate."""
        if self.failed or self.accuracy is None:
            return self.failed
        return self.accuracy.worst == float("inf") if self.approximate else not self.accuracy.ok

    def as_json(self) -> dict[str, Any]:
        """Returns the row as plain data."""
        result: dict[str, Any] = {"backend": self.backend, "framework": self.framework, "reasons": list(self.reasons)}
        if self.accuracy is not None:
            result |= {"ok": self.accuracy.ok, "worst_use_of_bound": self.accuracy.worst}
            result["quantities"] = {q.name: {"use": q.use, "error": q.error} for q in self.accuracy.quantities}
        return result | {"failed": self.failed}


def rows_of(
    trial: Trial, device: str, names: tuple[str, ...] | None = None, frameworks: tuple[str, ...] | None = None
) -> Iterator[Row]:
    """Yields a row for every backend in every installed framework, or for ``names`` and in ``frameworks`` alone."""
    expected = expectation(trial) if fits_oracle(trial) else None
    for name in names or backends.names():
        for framework in frameworks or installed():
            yield _row(trial, expected, name, framework, device)


def fits_oracle(trial: Trial) -> bool:
    """Returns whether the call is small enough for the float64 reference."""
    spec = trial.spec
    return spec.batch * spec.num_heads * spec.q_len * spec.kv_len <= ORACLE_LIMIT


def bit_equality(rows: list[Row]) -> dict[str, bool]:
    """Returns, for every backend that ran in two frameworks, whether all results are equal bit for bit."""
    ran: dict[str, list[Arrays]] = {}
    for row in rows:
        if row.results is not None:
            ran.setdefault(row.backend, []).append(row.results)
    pairs = {name: results for name, results in ran.items() if len(results) == 2}
    return {name: one.keys() == other.keys() and not differing(one, other) for name, (one, other) in pairs.items()}


def _row(trial: Trial, expected: Expected | None, name: str, framework: str, device: str) -> Row:
    where = Target.here(framework, device)
    # Asked first, because running the call would turn a refusal into an exception.
    reasons = attn_core.explain(trial.spec, where, name).reasons(name)
    if reasons:
        return Row(name, framework, reasons, device=device)
    approximate = where.claims(name)[0].approximate
    try:
        results = FRAMEWORKS[framework].run(trial, name, device)
    except Exception as error:  # an error of a backend is a row of the table, not the end of the command
        failure = (f"raised {type(error).__name__}: {error}",)
        return Row(name, framework, failure, failed=True, device=device, approximate=approximate)
    accuracy = judge(expected, results) if expected is not None else None
    return Row(name, framework, (), results, accuracy, device=device, approximate=approximate)


@dataclass(frozen=True)
class TimedRow:
    """The times of one backend, or of a framework's own function, in one framework.

    Attributes:
        backend, framework: what was timed.
        selected: whether automatic choice would take it, by direction.
        entries: what ``timing.measure`` says of it, by direction.
        approximate: whether the backend is less precise than its dtypes.
    """

    backend: str
    framework: str
    selected: dict[str, bool]
    entries: dict[str, Entry]
    approximate: bool = False


def timed_rows(trial: Trial, device: str, rounds: int, framework: str) -> list[TimedRow]:
    """Times a call, forward and training, on every backend of a framework that can run it. The backends take turns."""
    entries: dict[str, dict[str, Entry]] = {}
    chosen: dict[str, str | None] = {}
    target = Target.here(framework, device)
    for direction in ("forward", "training"):
        each = trial._replace(spec=replace(trial.spec, needs_backward=direction == "training"))
        chosen[direction] = attn_core.explain(each.spec, target).backend
        for name, entry in timed(each, framework, device, able(each.spec, target, chosen[direction]), rounds).items():
            entries.setdefault(name, {})[direction] = entry
    return [
        TimedRow(
            name,
            framework,
            {direction: name == best for direction, best in chosen.items()},
            known,
            name in backends.names() and target.claims(name)[0].approximate,
        )
        for name, known in entries.items()
    ]


def able(spec: AttentionSpec, target: Target, first: str | None = None) -> list[str]:
    """Returns the backends that can run a call on a target, ``first`` before the others."""
    names = [name for name in backends.names() if not attn_core.explain(spec, target, name).reasons(name)]
    return sorted(names, key=lambda name: name != first)


def timed(
    trial: Trial, framework: str, device: str, names: list[str], rounds: int, beside: bool = True
) -> dict[str, Entry]:
    """Times a trial on backends by name as ``timing.measure`` says; ``beside``: also the framework's own functions."""
    module = FRAMEWORKS[framework]
    names = [*names, *(module.own_functions(trial.spec, device) if beside else ())]
    calls: AbstractContextManager[Calls] = module.timed_calls(trial, device)
    with calls as call:
        return measure(call, names, rounds)
