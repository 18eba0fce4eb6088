"""``attn compare``: runs one call on every backend in both frameworks, and compares errors and bits, or times."""

from __future__ import annotations

import json as json_text
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from math import inf
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from attn_core import backends
from attn_core.call.spec import AttentionSpec
from attn_core.cli import in_jax, in_torch
from attn_core.cli.devices import devices_here, devices_of, installed
from attn_core.cli.spec_options import ON_CPU, SpecOptions, defaults_on, takes_spec
from attn_core.cli.timing import Calls, Entry, broken, measure
from attn_core.cli.trial import Arrays, Trial, differing, draw, expectation, judge
from attn_core.correctness.accuracy import Accuracy, Expected
from attn_core.errors import SpecError
from attn_core.selection import Target, explain, refusals
from attn_core.selection.choice import wrapped

MODULES: dict[str, Any] = {"torch": in_torch, "jax": in_jax}
"""The modules that run a trial and time it, by framework."""

ORACLE_LIMIT = 2**23
"""The most softmax weights for the float64 reference, which allocates about twenty arrays of that size."""


@takes_spec
def compare(
    options: SpecOptions,
    device: Annotated[str, typer.Option(help="cpu, or cuda (the GPU here).")] = "cpu",
    time: Annotated[
        bool, typer.Option("--time", help="Time the backends in turns, forward and training, instead of errors.")
    ] = False,
    repeats: Annotated[int, typer.Option(min=1, help="Timed rounds of each backend; the median is shown.")] = 5,
    seed: Annotated[int, typer.Option(help="Seed of the random tensors.")] = 0,
    everything: Annotated[bool, typer.Option("--all", help="Show why the others cannot run the call.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Run one call on every backend in torch and JAX, and compare errors and bits; --backward: those of gradients, too.

    Errors are measured against a float64 reference. "of the bound" is the largest error over the allowed error. "bits"
    says whether torch and JAX have equal results.

    --time measures instead how long each backend takes, forward and training, beside the framework's own function. The
    backends take turns, a GPU's time is that of its events, and the median counts. "ratio" is the time over that of the
    fastest in the same framework, and * marks automatic choice. On a GPU the call is then as long as in `attn explain`.

    Exit code: 0 if every backend that ran is right; 1 if one is wrong or none ran; 2 for invalid options.
    """
    device = next(iter(devices_here(device).values()))
    trial = _trial(options, device, seed, time)
    right = _compare_times(trial, device, repeats, json) if time else _compare_results(trial, device, everything, json)
    if not right:
        raise typer.Exit(1)


def _trial(options: SpecOptions, device: str, seed: int, time: bool) -> Trial:
    """Returns the call of the options with random inputs."""
    if options.dropout:
        raise SpecError(
            f"--dropout={options.dropout}: expected 0, because each framework draws its own seed and results differ"
        )
    usual = defaults_on(device)
    # The float64 reference runs on the CPU.
    options = options.filled(usual if time else usual._replace(length=ON_CPU.length))
    trial = draw(options.spec(device, needs_backward=time), options.seq_info(), seed)
    return trial._replace(inputs=trial.inputs._replace(key_ranges=options.ranges()))


# Errors and bits


def _compare_results(trial: Trial, device: str, everything: bool, json: bool) -> bool:
    """Prints the errors and the bits of each backend. Returns whether all that ran are right, and one ran."""
    rows = []
    with Console(stderr=True, quiet=json).status("the float64 reference") as status:
        for row in rows_of(trial, device):
            rows.append(row)
            status.update(f"{row.backend} in {row.framework}: done")
    # Compared per backend: two different kernels never promise equal bits.
    equal = bit_equality(rows)
    if json:
        plain = {"spec": str(trial.spec), "rows": [row.as_json() for row in rows], "bit_equal": equal}
        typer.echo(json_text.dumps(plain, indent=2))
    else:
        _show(trial, rows, equal, everything)
    return any(row.results for row in rows) and not any(row.wrong for row in rows)


@dataclass(frozen=True)
class Row:
    """One backend in one framework: its results and accuracy, or the reasons why there are none."""

    backend: str
    framework: str
    reasons: tuple[str, ...] = ()  # why it did not run, or how it failed; empty if it ran
    results: Arrays | None = None  # by name, or None
    # its comparison with the reference; None if it did not run or the call is too large for the reference
    accuracy: Accuracy | None = None
    failed: bool = False  # whether it was selected and raised. This is a defect; a refusal is not.
    device: str = "cpu"  # the requested device
    # whether the backend is less precise than its dtypes. If so, an error above the bound is no defect.
    approximate: bool = False

    @property
    def wrong(self) -> bool:
        """Whether the backend raised or a number is outside its bound. A NaN is wrong even if it is approximate."""
        if self.failed or self.accuracy is None:
            return self.failed
        return self.accuracy.worst == float("inf") if self.approximate else not self.accuracy.ok

    def as_json(self) -> dict[str, object]:
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
    """Runs the call on one backend, and returns what it gave or why it could not."""
    where = Target.here(framework, device)
    # Asked first, because running the call would turn a refusal into an exception.
    if reasons := refusals(name, trial.spec, where):
        return Row(name, framework, reasons, device=device)
    approximate = where.claims(name)[0].approximate
    try:
        results = MODULES[framework].run(trial, name, device)
    except Exception as error:  # an error of a backend is a row of the table, not the end of the command
        failure = (f"raised {type(error).__name__}: {error}",)
        return Row(name, framework, failure, failed=True, device=device, approximate=approximate)
    accuracy = judge(expected, results) if expected is not None else None
    return Row(name, framework, (), results, accuracy, device=device, approximate=approximate)


def _show(trial: Trial, rows: list[Row], equal: dict[str, bool], everything: bool) -> None:
    """Prints the call, what failed, how many backends refuse it, and a row of figures for each backend that ran."""
    console = Console()
    console.print(Text(wrapped(str(trial.spec))))
    # Before the table, which they would scroll off the screen.
    for line in _failure_lines([row for row in rows if row.failed or everything]):
        console.print(Text(wrapped(line, "", "  ")))
    ran = {row.backend for row in rows if not row.reasons or row.failed}
    refused = {row.backend for row in rows} - ran
    if refused and not everything:
        verb = "backend cannot" if len(refused) == 1 else "backends cannot"
        console.print(Text(f"{len(refused)} {verb} run it on {rows[0].device}; every reason: --all", "dim"))
    console.print()
    table = Table(box=None, pad_edge=False)
    for title in ("backend", "in", "of the bound", "max error", "worst in", "bits"):
        table.add_column(title, justify="left" if title in ("backend", "in", "worst in") else "right")
    for row in (row for row in rows if row.results is not None):
        table.add_row(*_cells(row, equal))
    console.print(table)
    if not fits_oracle(trial):
        console.print(f"errors not measured: the call has more than {ORACLE_LIMIT} softmax weights")


def _failure_lines(rows: list[Row]) -> list[str]:
    """Returns a line for each backend that did not run; one line for both frameworks if the reasons are the same."""
    frameworks: dict[tuple[str, str], list[str]] = {}
    for row in (row for row in rows if row.reasons):
        verdict = ("FAILED: " if row.failed else "refused: ") + "; ".join(row.reasons)
        frameworks.setdefault((row.backend, verdict), []).append(row.framework)
    return [f"{name} in {' and '.join(names)}: {verdict}" for (name, verdict), names in frameworks.items()]


def _cells(row: Row, equal: dict[str, bool]) -> list[str]:
    bits = {True: "equal", False: "differ"}.get(equal.get(row.backend), "")  # type: ignore[arg-type]
    if row.accuracy is None:
        return [row.backend, row.framework, "", "", "", bits]
    worst = max(row.accuracy.quantities, key=lambda quantity: quantity.use)
    error = max(quantity.error for quantity in row.accuracy.quantities)
    use = f"{worst.use:.2f}" + ("" if row.accuracy.ok else " WRONG")
    return [row.backend, row.framework, use, f"{error:.1e}", worst.name, bits]


# Times


def _compare_times(trial: Trial, device: str, rounds: int, json: bool) -> bool:
    """Prints the times of each backend. Returns whether all have right numbers, and one ran."""
    rows = []
    with Console(stderr=True, quiet=json).status("timing") as status:
        for framework in installed():
            if device in devices_of(framework):
                rows += timed_rows(trial, device, rounds, framework)
                status.update(f"{framework}: done")
    if json:
        typer.echo(json_text.dumps({"spec": str(trial.spec), "rows": [asdict(row) for row in rows]}, indent=2))
    else:
        _show_times(trial, rows)
    return bool(rows) and not any(_faults(row, trial.spec.dtype) for row in rows)


@dataclass(frozen=True)
class TimedRow:
    """The times of one backend, or of a framework's own function, in one framework."""

    backend: str
    framework: str
    selected: dict[str, bool]  # whether automatic choice would take it, by direction
    entries: dict[str, Entry]  # what ``timing.measure`` says of it, by direction
    approximate: bool = False  # whether the backend is less precise than its dtypes


def timed_rows(trial: Trial, device: str, rounds: int, framework: str) -> list[TimedRow]:
    """Times a call, forward and training, on every backend of a framework that can run it. The backends take turns."""
    entries: dict[str, dict[str, Entry]] = {}
    chosen: dict[str, str | None] = {}
    target = Target.here(framework, device)
    for direction in ("forward", "training"):
        each = trial._replace(spec=replace(trial.spec, needs_backward=direction == "training"))
        chosen[direction] = explain(each.spec, target).backend
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
    names = [name for name in backends.names() if not refusals(name, spec, target)]
    return sorted(names, key=lambda name: name != first)


def timed(
    trial: Trial, framework: str, device: str, names: list[str], rounds: int, beside: bool = True
) -> dict[str, Entry]:
    """Times a trial on backends by name as ``timing.measure`` says; ``beside``: also the framework's own functions."""
    module = MODULES[framework]
    names = [*names, *(module.own_functions(trial.spec, device) if beside else ())]
    calls: AbstractContextManager[Calls] = module.timed_calls(trial, device)
    with calls as call:
        return measure(call, names, rounds)


def _show_times(trial: Trial, rows: list[TimedRow]) -> None:
    """Prints the call, what failed or is wrong, and the times; their ratios are to the best time of the framework."""
    console = Console()
    console.print(Text(wrapped(str(replace(trial.spec, needs_backward=False)))))
    for row in rows:
        for direction, fault in _faults(row, trial.spec.dtype).items():
            console.print(Text(wrapped(f"{row.backend} in {row.framework}, {direction}: {fault}", "", "  ")))
    console.print()
    table = Table(box=None, pad_edge=False)
    for title in ("backend", "in", "forward", "ratio", "training", "ratio"):
        table.add_column(title, justify="left" if title in ("backend", "in") else "right")
    best: dict[tuple[str, str], float] = {}
    for row in rows:
        for direction, entry in row.entries.items():
            if "median" in entry:
                place = row.framework, direction
                best[place] = min(best.get(place, entry["median"]), entry["median"])
    for row in sorted(rows, key=lambda row: (row.framework, row.entries.get("forward", {}).get("median", inf))):
        cells = []
        for direction in ("forward", "training"):
            time = row.entries.get(direction, {}).get("median")
            mark = "*" if row.selected[direction] else ""
            ratio = "" if time is None else f"{time / best[row.framework, direction]:.2f}"
            cells += ["" if time is None else f"{mark}{_shown(time)}", ratio]
        table.add_row(row.backend, row.framework, *cells)
    console.print(table)


def _shown(microseconds: float) -> str:
    return f"{microseconds:.1f} µs" if microseconds < 1000 else f"{microseconds / 1000:.2f} ms"


def _faults(row: TimedRow, dtype: str) -> dict[str, str]:
    """Returns by direction how a backend failed, or by how much its numbers differ from those of the first one."""
    faults = {}
    for direction, entry in row.entries.items():
        if "failed" in entry:
            faults[direction] = f"FAILED: {entry['failed']}"
        elif not row.approximate and broken({row.backend: entry}, dtype):
            faults[direction] = f"WRONG: it differs by {entry['difference']:.2g}"
    return faults
