"""Runs random calls through every entry point, and compares each with the float64 reference.

python -m tests.campaign --minutes 10 --json campaign.json    # again with --resume: goes on where it stopped
python -m tests.campaign --only "torch paged" --only "jax"    # some entry points alone
python -m tests.campaign --processes 8 --minutes 30           # eight processes, each with other calls
python -m tests.campaign --seed 7 --calls 2000                # the same 2000 calls on every day and machine
python -m tests.campaign --replay '{"entry": "torch attention", ...}'    # one call again, as a campaign printed it

Exit code: 0 if every call was right; 1 if one was not; 2 for invalid options, or if the call to replay cannot run here.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic

from attn_core import backends
from attn_core.cli.devices import devices_of, installed
from attn_core.errors import SpecError
from attn_core.selection.whole_file import check_place
from tests.campaign import coverage
from tests.campaign.case import case_of
from tests.campaign.entries import left_out
from tests.campaign.judge import verdict_of
from tests.campaign.loop import Campaign, State, run_in_processes

EVERY = 30.0
"""Seconds between two lines that say how far a campaign is."""


def main(arguments: list[str] | None = None) -> int:
    """Runs a campaign, or one call again; returns the exit code."""
    options = _parser().parse_args(arguments)
    try:
        return _campaign(options) if options.replay is None else _replay(options.replay, options.device)
    except SpecError as error:
        print(f"campaign: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="campaign", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=3.0, help="how long to run (3)")
    parser.add_argument("--calls", type=int, help="stop after so many calls; not with --processes")
    parser.add_argument("--seed", type=int, default=0, help="of the calls: another seed draws others (0)")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="the GPU if there is one, else cpu")
    parser.add_argument("--only", action="append", default=[], help="entries whose name has this text; repeatable")
    parser.add_argument("--json", type=Path, help="keep counts and faults in this file")
    parser.add_argument("--resume", action="store_true", help="continue with the --json file")
    parser.add_argument("--processes", type=int, default=1, help="how many to run side by side (1)")
    parser.add_argument("--replay", metavar="CASE", help="run one call again: the JSON that was printed for a fault")
    return parser


def _campaign(options: argparse.Namespace) -> int:
    if options.calls is not None and options.processes > 1:
        raise SpecError(f"--calls={options.calls}: expected one process, got --processes={options.processes}")
    if options.resume and options.json is None:
        raise SpecError("--resume: expected --json with the file to continue")
    run = Campaign(options.seed, _devices(options.device), tuple(options.only))
    if options.json is not None:
        check_place(options.json)
    print(f"seed {options.seed}, {run.state['device_name']}", flush=True)
    for framework in run.devices:
        for name, reason in left_out(framework).items():
            print(f"left out: {name}: {reason}", flush=True)
    seconds, progress = 60 * options.minutes, _progress()
    if options.processes > 1:
        with TemporaryDirectory() as folder:
            path = options.json or Path(folder) / "campaign.json"
            run_in_processes(run, options.processes, seconds, path, options.resume, progress)
    else:
        if options.resume and options.json.exists():
            run.resume(options.json)
        run.run(seconds, options.json, progress, math.inf if options.calls is None else options.calls)
    print(report(run))
    return 1 if run.state["faults"] else 0


def _replay(text: str, device: str | None) -> int:
    case, devices = case_of(text), _devices(device)
    framework = case.entry.partition(" ")[0]
    if framework not in devices:
        raise SpecError(f"entry={case.entry!r}: expected one of {', '.join(devices)}, which are installed here")
    verdict = verdict_of(case, devices[framework])
    print(case.spec)
    if verdict.skipped is not None:
        print(f"cannot run here: {verdict.skipped}")
        return 2
    print(verdict.fault or f"right: the largest error is {verdict.use:.2f} of its bound")
    return 0 if verdict.fault is None else 1


def _devices(requested: str | None) -> dict[str, str]:
    """Returns the device of each installed framework."""
    result = {}
    for framework in installed():
        fitting = [each for each in devices_of(framework) if requested in (None, backends.kind_of(each))]
        if fitting:
            result[framework] = fitting[-1]
    if not result:
        raise SpecError(f"--device={requested}: expected a device of this machine, with torch or jax installed")
    # One kind for all, because the sizes of the calls depend on it.
    kinds = {backends.kind_of(device) for device in result.values()}
    return result if len(kinds) == 1 else {name: device for name, device in result.items() if device != "cpu"}


def _progress() -> Callable[[State], None]:
    """Returns a function that prints every new fault, and every EVERY seconds the number of calls."""
    faults, printed = 0, monotonic()

    def show(state: State) -> None:
        nonlocal faults, printed
        for fault in state["faults"][faults:]:
            print(f"fault: {fault['fault']}", file=sys.stderr, flush=True)
        faults = len(state["faults"])
        if monotonic() - printed > EVERY:
            printed = monotonic()
            print(f"{state['calls']} calls, {faults} faults", file=sys.stderr, flush=True)

    return show


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
    claims = coverage.holes_of_backends(state["backends"], kind)
    lines += ["", *(f"Claimed, but no call had it: {hole}" for hole in claims)]
    unsaid = coverage.holes_of_entries(state["by entry"], run.entries, kind)
    lines += [f"Can be written, but no call had it: {hole}" for hole in unsaid]
    for fault in state["faults"]:
        lines += ["", fault["fault"], f"python -m tests.campaign --replay '{fault['shrunk']}'"]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
