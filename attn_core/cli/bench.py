"""``attn bench``: times a sweep of calls on every backend and shows what the automatic choice costs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from statistics import geometric_mean
from time import perf_counter
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from attn_core import backends
from attn_core.cli.bench_sweep import Record, Sweep, read, write
from attn_core.cli.bench_timing import DeviceLostError
from attn_core.cli.bench_torch import SDPA
from attn_core.cli.complaint import complain
from attn_core.cli.devices import device_named
from attn_core.cli.frameworks import check_framework, devices_of
from attn_core.cli.plots import empty_figure, save, sweep_figure
from attn_core.cli.progress import Stages
from attn_core.errors import SpecError
from attn_core.selection.cross_validation import Fitting
from attn_core.selection.random_calls import LIMITS, random_calls
from attn_core.selection.regret import GOALS, TORCH_ALONE, fastest_round, regrets, right_times, static_order, summary
from attn_core.selection.sweep import QUICK, SweepCase
from attn_core.selection.sweeps import regrets_of_new_sweeps, regrets_of_package
from attn_core.selection.whole_file import check_place

WRITE_EVERY = 5.0
"""Seconds between two writes of the raw file; a run that is killed loses the cases since the last write."""

MEASURING = "measuring calls"
"""The stage of which ``attn bench`` and ``attn tune`` show the progress."""


def bench(
    device: Annotated[str | None, typer.Option(help="cpu, or cuda (the GPU here). Default: the GPU, else cpu.")] = None,
    framework: Annotated[str, typer.Option(help="torch or jax.")] = "torch",
    calls: Annotated[int, typer.Option(min=1, help="How many random calls to run, in both directions.")] = 350,
    seed: Annotated[int, typer.Option(help="Of the random calls.")] = 0,
    only: Annotated[
        list[str] | None, typer.Option(help="Run only cases whose name contains this text. Repeatable.")
    ] = None,
    backend: Annotated[list[str] | None, typer.Option(help="Time only this backend. Repeatable.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Run a few tiny cases, as a test of the command.")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Timed rounds of each backend; the median counts.")] = 5,
    everything: Annotated[
        bool, typer.Option("--everything", help="Time FlexAttention in every case, which often compiles.")
    ] = False,
    seconds: Annotated[
        float | None, typer.Option(help="Start no new case after this many seconds; see --resume.")
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write the raw times to this file, every few seconds.")] = None,
    plot: Annotated[
        Path | None,
        typer.Option(help="Write a plot of the speeds and the choice's cost to this file (needs matplotlib)."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Run only the cases that the --json file does not have yet.")
    ] = False,
) -> None:
    """Time a sweep of calls on every backend and show what the automatic choice costs.

    Exit code: 0 on success; 1 if a backend failed or was wrong, or time ran out; 2 for invalid options.
    """
    try:
        if plot is not None:
            empty_figure(1, 1)  # fails before minutes of measuring if matplotlib is missing
        for file in (json, plot):
            if file is not None:
                check_place(file)
        sweep = Sweep(device_of(device, framework), tuple(backend or ()), rounds, everything, framework)
        if resume:
            if json is None:
                raise SpecError("--resume: expected --json with the file to continue")
            if json.exists():
                sweep.resume(read(json))
        cases = QUICK if quick else islice(random_calls(seed, sweep.target.kind), calls)
        complete = _measure(sweep, [case for case in cases if _wanted(case, only)], seconds, json, plot)
    except SpecError as error:
        complain(error)
        raise typer.Exit(2) from None
    if not complete or any(_faulty(record) for record in sweep.raw["cases"]):
        raise typer.Exit(1)


def device_of(requested: str | None, framework: str) -> str:
    """Returns the device to measure: the requested one, else the GPU of this machine, else "cpu".

    Raises:
        SpecError: if this machine or the framework's timing does not have the device.
    """
    check_framework(framework)
    # Tensors of torch compare the results, also those of JAX.
    for package in dict.fromkeys(("torch", framework)):
        if find_spec(package) is None:
            raise SpecError(f"timing needs {package}, which is not installed; install {package}")
    # Calls are drawn, and kernels timed, for CPUs and NVIDIA's GPUs alone.
    here = [device for device in devices_of(framework) if backends.kind_of(device) in LIMITS]
    # devices_of lists the CPU first, so the last device is a GPU if there is one.
    device = here[-1] if requested is None else device_named(requested, framework)
    if device not in here:
        raise SpecError(f"--device={device}: expected a device of this machine that can be timed: {', '.join(here)}")
    return device


def _wanted(case: SweepCase, only: list[str] | None) -> bool:
    return not only or any(text in case.name for text in only)


def _measure(
    sweep: Sweep, cases: Sequence[SweepCase], seconds: float | None, path: Path | None, plot: Path | None
) -> bool:
    if not cases:
        raise SpecError("--only: expected a part of a case's name; no case contains it")
    # Progress goes to stderr, so that stdout has only the result.
    stages, written = Stages(Console(stderr=True)), perf_counter()

    def done(record: Record) -> None:
        nonlocal written
        stages.log(line_of(record))
        advance()
        # Not after every case, because a long file takes as long to write as a short case to measure.
        if path is not None and perf_counter() - written > WRITE_EVERY:
            write(sweep.raw, path)
            written = perf_counter()

    try:
        total = sum(1 for _ in sweep.remaining(cases))
        with stages, stages.stage(MEASURING, total, seconds) as advance:
            complete = sweep.run(cases, seconds, done)
    except DeviceLostError as error:
        # A lost device fails every later call of this process, so the sweep cannot go on.
        raise SpecError(f"the device failed and cannot be used again: {error}; run again with --resume") from None
    finally:
        if path is not None:
            write(sweep.raw, path)
    fitting = Fitting(sweep.raw)
    typer.echo(regret_table(fitting))
    if plot is not None:
        draw_sweep(fitting, plot)
    for written_file in (path, plot):
        if written_file is not None:
            typer.echo(f"wrote {written_file}")
    return complete


def draw_sweep(fitting: Fitting, path: Path) -> None:
    """Writes the plot of a sweep. Raises a SpecError if no call can be drawn, or matplotlib is not installed."""
    if not fitting.counted:
        raise SpecError(f"--plot={path}: nothing to draw, because no backend ran a call with right numbers")
    # The package's order is what a user of this machine has.
    chosen = regrets_of_package(fitting) or fitting.regrets()
    save(sweep_figure(fitting, speeds_beside(fitting)[0], chosen), path)


def line_of(record: Record) -> str:
    """Returns the outcome of one record as a line for rich: the fastest backend, all times, and what went wrong."""
    times = right_times(record)
    best = min(times, key=lambda name: times[name]) if times else "nothing ran"
    rest = sorted((time, name) for name, time in times.items())
    shown = ", ".join(f"{name} {time:.0f}" for time, name in rest)
    faults = "; ".join(f"[red]{name} {escape(why)}[/red]" for name, why in _faulty(record).items())
    head = f"{escape(record['name'])} ({record['direction']}, {record['seconds']:.1f} s): "
    return head + f"[bold]{best}[/bold], µs: {shown}" + (f"; {faults}" if faults else "")


def _faulty(record: Record) -> dict[str, str]:
    right = right_times(record)
    faults = {name: f"failed: {entry['failed']}" for name, entry in record["backends"].items() if "failed" in entry}
    for name, entry in record["backends"].items():
        if "median" in entry and name not in right:
            faults[name] = f"differs by {entry['difference']:.2g} from {record['reference']}"
    return faults


def regret_table(fitting: Fitting) -> str:
    """Returns the cost of automatic choice for unseen calls, and of the static order, as a Markdown table."""
    raw, kinds = fitting.raw, {"predicted order, unseen calls": fitting.regrets()}
    if backends.kind_of(raw["device"]) == "cuda":
        kinds["predicted order, unseen calls, torch alone"] = fitting.regrets(TORCH_ALONE)
    # Several sweeps: models that saw no call of a sweep choose for it.
    for alone, only in {"": None, ", torch alone": TORCH_ALONE}.items():
        if (chosen := regrets_of_package(fitting, only)) and (not alone or backends.kind_of(raw["device"]) == "cuda"):
            kinds[f"the package's order, {raw['package']}{alone}"] = chosen
        for date, chosen in regrets_of_new_sweeps(fitting, only).items():
            kinds[f"predicted order, sweep of {date} unseen{alone}"] = chosen
    kinds["static order"] = regrets(fitting.counted, static_order(raw))
    lines = ["| order | direction | calls | geometric mean | 99th percentile | worst | where |", "|---" * 7 + "|"]
    for kind, chosen in kinds.items():
        for direction, facts in summary(chosen).items():
            numbers = f"{facts['geometric mean']:.3f} | {facts['99th percentile']:.2f} | {facts['worst']:.2f}"
            lines.append(f"| {kind} | {direction} | {facts['cases']} | {numbers} | {facts['worst case']} |")
    goals = ", ".join(f"{name} at most {value}" for name, value in GOALS[backends.kind_of(raw["device"])].items())
    lines.append(f"\nGoals for unseen calls: {goals}.\n")
    beside = _beside(fitting)
    return "\n".join([*lines, *beside, ""] if beside else lines)


def _beside(fitting: Fitting) -> list[str]:
    """Returns a table of the speed of automatic choice for unseen calls over the framework's own function."""
    ratios, left_out = speeds_beside(fitting)
    if not ratios:
        return []
    lines = [
        *speed_table(ratios),
        "\nTimes as fast as the framework's own function, for the calls that it can express.",
    ]
    if left_out:
        why = f"{SDPA} may run cuDNN, whose gradient is wrong there, so sdpa_cudnn refuses them."
        lines.append(f"{left_out} training calls are left out: {why}")
    return lines


def speed_table(ratios: Mapping[tuple[str, str], Sequence[tuple[float, str]]]) -> list[str]:
    """Returns a Markdown table of what ``speeds_beside`` returns: (times as fast, call) by function and direction."""
    lines = ["| beside | direction | calls | geometric mean | below 0.95 | lowest | where |", "|---" * 7 + "|"]
    for (name, direction), pairs in ratios.items():
        mean = geometric_mean(ratio for ratio, _ in pairs)
        slower, (lowest, where) = sum(ratio < 0.95 for ratio, _ in pairs), min(pairs)
        lines.append(f"| {name} | {direction} | {len(pairs)} | {mean:.3f} | {slower} | {lowest:.2f} | {where} |")
    return lines


def speeds_beside(fitting: Fitting) -> tuple[dict[tuple[str, str], list[tuple[float, str]]], int]:
    """Returns how many times as fast automatic choice is as the framework's own functions, for unseen calls.

    Returns:
        By function and direction (times as fast, call); and the number of calls that are left out, because the function
        may be wrong there.
    """
    ratios: dict[tuple[str, str], list[tuple[float, str]]] = {}
    left_out = 0
    # The package's order is what a user of this machine has.
    for record, regret in zip(fitting.counted, regrets_of_package(fitting) or fitting.regrets(), strict=True):
        if _may_be_wrong(record):
            left_out += SDPA in record.get("beside", {})
            continue
        for name, entry in record.get("beside", {}).items():
            if "median" in entry and math.isfinite(regret.ratio):
                time = right_times(record)[regret.chosen]
                ratios.setdefault((name, record["direction"]), []).append((fastest_round(entry) / time, record["name"]))
    return ratios, left_out


def _may_be_wrong(record: Record) -> bool:
    """Returns whether torch's own function may run a kernel that is known to be wrong for the call."""
    reasons = record["backends"].get("sdpa_cudnn", {}).get("refused", ())
    return any("NaN in" in reason for reason in reasons)
