"""``attn campaign`` and ``attn replay``."""

from __future__ import annotations

import math
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer
from rich.console import Console

from attn_core import backends
from attn_core.cli.campaign import coverage
from attn_core.cli.campaign.campaign import Campaign
from attn_core.cli.campaign.case import case_of
from attn_core.cli.campaign.entries import left_out
from attn_core.cli.campaign.expressible import holes
from attn_core.cli.campaign.judge import Verdict, verdict_of
from attn_core.cli.campaign.processes import run_in_processes
from attn_core.cli.complaint import complain
from attn_core.cli.devices import device_named
from attn_core.cli.frameworks import devices_of, installed
from attn_core.cli.progress import Stages
from attn_core.errors import SpecError
from attn_core.selection.whole_file import check_place

RUNNING = "running calls"


def campaign(
    minutes: Annotated[float, typer.Option(min=0.01, help="How long to run.")] = 3.0,
    calls: Annotated[int | None, typer.Option(min=1, help="Stop after so many calls. Not with --processes.")] = None,
    seed: Annotated[int, typer.Option(help="Of the calls: another seed draws others.")] = 0,
    device: Annotated[str | None, typer.Option(help="cpu, or cuda (the GPU here). Default: the GPU, else cpu.")] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="Run only entries whose name contains this text. Repeatable.")
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Keep counts and faults in this file.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue with the --json file.")] = False,
    processes: Annotated[int, typer.Option(min=1, max=256, help="How many to run side by side.")] = 1,
) -> None:
    """Run random calls through every entry point, and compare each with the float64 reference.

    Exit code: 0 if every call was right; 1 if one was not; 2 for invalid options.
    """
    try:
        if calls is not None and processes > 1:
            raise SpecError(f"--calls={calls}: expected one process, got --processes={processes}")
        run = Campaign(seed, _devices(device), tuple(only or ()))
        if json is not None:
            check_place(json)
        if resume and json is None:
            raise SpecError("--resume: expected --json with the file to continue")
        if resume and processes == 1 and json is not None and json.exists():
            run.resume(json)
        typer.echo(f"seed {seed}, {run.state['device_name']}")
        for framework in run.devices:
            for name, reason in left_out(framework).items():
                typer.echo(f"left out: {name}: {reason}")
        if processes == 1:
            _run(run, 60 * minutes, math.inf if calls is None else calls, json)
        else:
            _run_several(run, processes, 60 * minutes, json, resume)
    except SpecError as error:
        complain(error)
        raise typer.Exit(2) from None
    typer.echo(report(run))
    if run.state["faults"]:
        raise typer.Exit(1)


def replay(case: Annotated[str, typer.Argument(help="The JSON that attn campaign printed for a fault.")]) -> None:
    """Run one call of a campaign again.

    Exit code: 0 if it is right; 1 if it is not; 2 if it cannot run here.
    """
    try:
        parsed = case_of(case)
        verdict = verdict_of(parsed, _devices(None)[parsed.entry.partition(" ")[0]])
    except (SpecError, KeyError) as error:
        complain(error if isinstance(error, SpecError) else SpecError(f"entry: {error} is not installed"))
        raise typer.Exit(2) from None
    typer.echo(str(parsed.spec))
    if verdict.skipped is not None:
        typer.echo(f"cannot run here: {verdict.skipped}")
        raise typer.Exit(2)
    typer.echo(verdict.fault or f"right: the largest error is {verdict.use:.2f} of its bound")
    if verdict.fault is not None:
        raise typer.Exit(1)


def _devices(requested: str | None) -> dict[str, str]:
    """Returns the device of each installed framework."""
    result = {}
    for framework in installed():
        here = devices_of(framework)
        device = here[-1] if requested is None else device_named(requested, framework)
        if device in here:
            result[framework] = device
    if not result:
        raise SpecError(f"--device={requested}: expected a device of this machine, with torch or jax installed")
    # One kind for all, because the sizes of the calls depend on it.
    kinds = {backends.kind_of(device) for device in result.values()}
    return result if len(kinds) == 1 else {name: device for name, device in result.items() if device != "cpu"}


def _run(run: Campaign, seconds: float, most_calls: float, json: Path | None) -> None:
    stages = Stages(Console(stderr=True))
    faults = len(run.state["faults"])

    def done(verdict: Verdict) -> None:
        nonlocal faults
        if len(run.state["faults"]) > faults:
            faults += 1
            stages.log(f"[red]fault[/red]: {run.state['faults'][-1]['fault']}")
        advance()

    with stages, stages.stage(RUNNING, None, seconds) as advance:
        run.run(seconds, json, done, most_calls)


def _run_several(run: Campaign, processes: int, seconds: float, json: Path | None, resume: bool) -> None:
    stages = Stages(Console(stderr=True))
    with TemporaryDirectory() as folder, stages, stages.stage(RUNNING, None, seconds) as advance:
        run_in_processes(run, processes, seconds, json or Path(folder) / "campaign.json", resume, advance)


def report(run: Campaign) -> str:
    """Returns the outcome of a campaign as Markdown."""
    state, kind = run.state, run.kind
    worst = state["worst"]
    lines = [
        f"{state['calls']} calls in {state['seconds']:.0f} s, seed {state['seed']}, {len(state['faults'])} faults.",
        f"The largest error was {worst['use']:.2f} of its bound: {worst['case']}",
        "",
        coverage.table(state["backends"], "backend"),
        "",
        coverage.table(state["by entry"], "entry"),
        "",
    ]
    lines += [f"- {name}: {count} calls" for name, count in sorted(state["by relation"].items())]
    lines += ["", coverage.table_of_bits(state["both ways"])] if state["both ways"] else []
    claims = coverage.holes(state["backends"], kind)
    lines += ["", *(f"Claimed, but no call had it: {hole}" for hole in claims)]
    lines += [f"Can be written, but no call had it: {hole}" for hole in holes(state["by entry"], run.entries, kind)]
    for fault in state["faults"]:
        lines += ["", fault["fault"], f"attn replay '{fault['shrunk']}'"]
    return "\n".join(lines)
