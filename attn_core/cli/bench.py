"""``attn bench``: a sweep through every backend side by side, and the order of preference that follows from it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from attn_core.cli.bench_sweep import Record, Sweep, read, write
from attn_core.cli.bench_timing import DeviceLostError
from attn_core.cli.explain import target_of
from attn_core.cli.frameworks import devices_of
from attn_core.errors import SpecError
from attn_core.selection import preference
from attn_core.selection.preference import Case
from attn_core.selection.regret import GOALS, regrets, right_times, summary
from attn_core.selection.sweep import QUICK, SWEEP


def bench(
    device: Annotated[str | None, typer.Option(help="cpu, or a GPU that is here (sm90); the GPU if left out.")] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="Only cases whose name holds this text; repeat it for several.")
    ] = None,
    backend: Annotated[list[str] | None, typer.Option(help="Only this backend; repeat it for several.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A handful of tiny cases, to see that it works.")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each backend; the median counts.")] = 5,
    everything: Annotated[bool, typer.Option("--everything", help="FlexAttention in every case: it compiles.")] = False,
    seconds: Annotated[float | None, typer.Option(help="Start no further case after so long; see --resume.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write the raw times there, after every case.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the cases that --json does not hold yet.")
    ] = False,
) -> None:
    """Time every case of a sweep on every backend, forward and training, and judge the automatic choice.

    Exit code: 0 when done, 1 if a backend failed or gave wrong numbers or the time was up, 2 for options that make no
    sense here.
    """
    try:
        sweep = Sweep(_device(device), tuple(backend or ()), rounds, everything)
        if resume:
            if json is None:
                raise SpecError("--resume: expected --json, the file to go on with")
            if json.exists():
                sweep.resume(read(json))
        complete = _measure(sweep, quick, only or [], seconds, json)
    except SpecError as error:
        typer.echo(f"attn: {error}", err=True)
        raise typer.Exit(2) from None
    if not complete or any(_faulty(record) for record in sweep.raw["cases"]):
        raise typer.Exit(1)


def _device(requested: str | None) -> str:
    if find_spec("torch") is None:
        raise SpecError("attn bench measures torch's kernels: install torch")
    here = devices_of("torch")
    device = here[-1] if requested is None else requested
    target_of("torch", device, False)  # a device by a name that targets know
    if device not in here:
        raise SpecError(f"--device={device}: no such device here")
    return device


def _measure(sweep: Sweep, quick: bool, only: list[str], seconds: float | None, path: Path | None) -> bool:
    cases = [case for case in (QUICK if quick else SWEEP) if not only or any(text in case.name for text in only)]
    if not cases:
        raise SpecError(f"--only={', '.join(only)}: no case has that in its name")
    console = Console(stderr=True)

    def done(record: Record) -> None:
        console.print(_line(record), highlight=False)
        if path is not None:
            _replace(path, sweep.raw)

    try:
        complete = sweep.run(cases, seconds, done)
    except DeviceLostError as error:
        if path is not None:
            _replace(path, sweep.raw)
        raise SpecError(f"the device cannot be used any more after {error}; go on with --resume") from None
    typer.echo(regret_table(sweep.raw, preference.measured(sweep.target.device)))
    if path is not None:
        typer.echo(f"written to {path}")
    return complete


def _replace(path: Path, raw: dict[str, Any]) -> None:
    beside = path.with_name(path.name + ".part")
    write(raw, beside)
    os.replace(beside, path)  # a file that is cut off would lose what was measured before


def _line(record: Record) -> str:
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


def regret_table(raw: dict[str, Any], cases: Sequence[Case]) -> str:
    """The summary of three orders, as a Markdown table: the table's, the same for unseen cases, the static one."""
    kinds = {
        "measured order": regrets(raw, cases),
        "measured order, each case looked up among the others": regrets(raw, cases, leave_out=True),
        "static order": regrets(raw, ()),
    }
    lines = ["| order | direction | cases | geometric mean | worst | where |", "|---|---|---|---|---|---|"]
    for kind, chosen in kinds.items() if cases else [("static order", kinds["static order"])]:
        for direction, facts in summary(chosen).items():
            numbers = f"{facts['geometric mean']:.3f} | {facts['worst']:.2f}"
            lines.append(f"| {kind} | {direction} | {facts['cases']} | {numbers} | {facts['worst case']} |")
    goals = ", ".join(f"{name} at most {value}" for name, value in GOALS.items())
    return "\n".join([*lines, f"\nGoals of the first: {goals}.\n"])
