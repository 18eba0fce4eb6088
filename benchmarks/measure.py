"""Timing of candidates that take turns in one process, and the files of raw times that the programs write.

A file is ``{"environment": ..., "device": ..., "calls": [row, ...]}``. A row has the name of a "call", "what" of it was
measured, and "seconds": for each candidate the seconds per call in each round. ``benchmarks.report`` shows files.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from attn_core import NoBackendError
from attn_core.selection import tables

Seconds = dict[str, list[float]]
Calls = dict[str, Callable[[], Any]]
"""Candidates by name: functions without arguments."""
Row = dict[str, Any]
Result = dict[str, Any]
ROUNDS = 7
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # else JAX takes most of a GPU from torch


def measure(calls: Calls, *, turn: float = 0.0, rounds: int = ROUNDS, rest: float = 0.0, most: int = 2000) -> Row:
    """Times the candidates that can run here.

    Args:
        turn: the seconds of a turn, which fill with calls in a row before a wait. A GPU runs the first milliseconds
            after a wait at a higher clock. 0 times one call, for calls that take long.
        rounds, rest: as in ``take_turns``.
        most: the most calls in a turn.

    Returns:
        "seconds" of those that ran, and "not_run": the reasons of those that did not.
    """
    turns: Calls = {}
    not_run: dict[str, str] = {}
    for name, call in calls.items():
        try:
            for _ in range(2):
                settle(call())
            once = min(timed(call, 3) for _ in range(2)) if turn else 1.0
        except Exception as error:  # a package that is missing, a refusal, or an error of another library
            not_run[name] = reason(error)
            continue
        turns[name] = partial(timed, call, max(1, min(most, round(turn / once))), warm=turn > 0)
    return {"seconds": take_turns(turns, rounds, rest), "not_run": not_run}


def take_turns(turns: Calls, rounds: int, rest: float = 0.0) -> Seconds:
    """Returns what each turn returns, seconds per call, in each round; the rounds interleave the candidates.

    A GPU is slower for a while after a kernel that drew much power. Each round therefore begins with the next
    candidate, and every other round runs backwards, so no candidate always follows the same neighbour. ``rest`` seconds
    before each turn let the GPU recover.
    """
    seconds: Seconds = {name: [] for name in turns}
    order = list(turns)
    gc.collect()
    gc.disable()
    try:
        for number in range(rounds if order else 0):
            begin = number % len(order)
            turned = order[begin:] + order[:begin]
            for name in reversed(turned) if number % 2 else turned:
                time.sleep(rest)
                seconds[name].append(turns[name]())
    finally:
        gc.enable()
    return seconds


def timed(call: Callable[[], Any], calls: int, warm: bool = True) -> float:
    """Returns the seconds per call of so many calls in a row and the wait for their end; ``warm`` runs one before."""
    settle(call() if warm else None)
    began = time.perf_counter()
    for _ in range(calls):
        last = call()
    settle(last)
    return (time.perf_counter() - began) / calls


def graphed(call: Callable[[], Any], count: int) -> Callable[[], Any]:
    """Returns the replay of a CUDA graph of so many calls in torch."""
    import torch

    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            call()
    return lambda: (graph.replay(), call)[0]  # ``call`` holds the tensors that the graph's kernels read


def settle(result: Any) -> None:
    """Waits for the arrays of JAX in a result, or for all work of torch on its GPU."""
    if "jax" in sys.modules:
        import jax

        if any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(result)):
            jax.block_until_ready(result)
            return
    if "torch" in sys.modules:
        import torch

        if torch.cuda.is_initialized():
            torch.cuda.synchronize()


def reason(error: Exception) -> str:
    """Returns why a candidate did not run, in one line; for a refusal the reasons of each backend."""
    if isinstance(error, NoBackendError):
        selection = error.selection
        named = selection.requested or selection.considered
        return "; ".join(f"{one}: {', '.join(selection.reasons(one))}" for one in named)[:300]
    lines = str(error).strip().splitlines() or ["without a message"]
    return f"{type(error).__name__}: {lines[0]}"[:300]


def medians(seconds: Seconds) -> dict[str, float]:
    """Returns the median seconds per call of each candidate."""
    return {name: statistics.median(values) for name, values in seconds.items()}


def median_difference(seconds: Seconds, name: str, baseline: str) -> float:
    """Returns the median over rounds of (candidate - baseline), in seconds per call."""
    pairs = zip(seconds[name], seconds[baseline], strict=True)
    return statistics.median(one - other for one, other in pairs)


def median_ratio(seconds: Seconds, name: str, baseline: str) -> float:
    """Returns the median over rounds of (baseline / candidate): how many times as fast the candidate is."""
    pairs = zip(seconds[name], seconds[baseline], strict=True)
    return statistics.median(other / one for one, other in pairs)


PACKAGES = (
    *("attn-core", "numpy", "torch", "triton", "jax", "jaxlib", "flax", "jax-tvm-ffi", "tokamax", "transformers"),
    *("flash-attn", "tokenspeed-fa3", "flash-attn-4", "nvidia-cudnn-cu13"),
)
"""The packages whose versions are recorded; None if one is not installed."""


def environment() -> dict[str, Any]:
    """Returns the date, the machine and the versions of a measurement."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "processor": tables.processor(),
        "versions": tables.versions(PACKAGES),
    }


def device_name() -> str:
    """Returns the name of the GPU that torch sees, or "cpu"."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Returns a parser with the option that every program has."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--json", type=Path, help="writes the times of every round to this file")
    return made


Jobs = dict[tuple[str, str], Callable[[], Row]]
"""Measurements by the name of the call and what of it is measured."""


def run(
    doc: str | None,
    jobs: Jobs,
    table: Callable[[Result], str],
    arguments: Sequence[str] | None = None,
    *,
    device: str = "cuda",
    **facts: Any,
) -> int:
    """Runs the jobs of a program, prints their table, and writes the file after each row: a crash loses nothing.

    With ``--only CALL`` the rows of this call replace those of the file, and its other rows stay.

    Args:
        table: of ``benchmarks.tables``.
        arguments: of the command line.
        device: where the jobs run.
        facts: of the whole run, which the file has, too.

    Returns:
        The exit code: 1 if a job failed, 2 if the jobs need a GPU and there is none.
    """
    options = parser(doc)
    options.add_argument("--only", action="append", metavar="CALL", help="measures this call alone; repeatable")
    parsed = options.parse_args(arguments)
    names = list(dict.fromkeys(name for name, _ in jobs))
    if unknown := [name for name in parsed.only or () if name not in names]:
        options.error(f"--only {unknown[0]!r}: calls are {', '.join(names)}")
    if device == "cuda" and device_name() == "cpu":
        print("needs an NVIDIA GPU, and torch sees none", file=sys.stderr)
        return 2
    now = environment()
    result: Result = {"environment": now, "device": device_name(), **facts, "calls": []}
    if parsed.only and parsed.json is not None and parsed.json.exists():
        result = continued(parsed.json, result)
    chosen = {key: job for key, job in jobs.items() if not parsed.only or key[0] in parsed.only}
    failed = sum(not ran(*key, job, result, now["date"], parsed.json) for key, job in chosen.items())
    print(table(result))
    return 1 if failed else 0


def ran(name: str, what: str, job: Callable[[], Row], result: Result, date: str, path: Path | None) -> bool:
    """Puts the row of a job into the result; returns whether the job ran."""
    try:
        row = {"call": name, "what": what, **job()}
    except Exception as error:  # the other calls are still useful
        print(f"{name}, {what}: {reason(error)}", file=sys.stderr, flush=True)
        return False
    times = ", ".join(f"{each} {1e6 * seconds:.1f} µs" for each, seconds in medians(row["seconds"]).items())
    print(f"{name}, {what}: {times}", *row.get("not_run", {}).items(), flush=True)
    put(result, row, date)
    release()
    write(path, result)
    return True


def release() -> None:
    """Frees the memory of tensors that nothing holds any more."""
    gc.collect()
    if "torch" in sys.modules:
        import torch

        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()


def write(path: Path | None, result: Result) -> None:
    """Writes a result if there is a path."""
    if path is not None:
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def continued(path: Path, result: Result) -> Result:
    """Returns the result that a file stores, to which rows of this run may be added.

    Args:
        path: of the file.
        result: of this run, so far without rows.

    Raises:
        SystemExit: names what differs if the file is of another device, processor, Python or package version. Its rows
            beside new ones would be compared as if they were equal.
    """
    stored: Result = json.loads(path.read_text(encoding="utf-8"))
    before, now = ({"device": each["device"], **_flat(each["environment"])} for each in (stored, result))
    changed = [f"{name} {before.get(name)}, here {now.get(name)}" for name in now if before.get(name) != now[name]]
    if changed:
        raise SystemExit(f"{path}: measured with other things, so measure it whole: {'; '.join(changed)}")
    return stored


def _flat(environment: dict[str, Any]) -> dict[str, Any]:
    """Returns the versions, Python and the machine by name, without the date."""
    return {name: value for name, value in environment.items() if name not in ("date", "versions")} | environment[
        "versions"
    ]


def put(result: Result, row: Row, date: str) -> None:
    """Adds a row to a result, in the place of an older row of the same call; a row of a later day has its "date"."""
    if date != result["environment"]["date"]:
        row = {**row, "date": date}
    places = [at for at, old in enumerate(result["calls"]) if key(old) == key(row)]
    if places:
        result["calls"][places[0]] = row
    else:
        result["calls"].append(row)


def key(row: Row) -> tuple[str, str]:
    """Returns what a row measures: the name of the call and the direction."""
    return row["call"], row.get("what", "")


def dates(result: Result) -> str:
    """Returns the days on which a result was measured, the first one first, and which rows are of later days."""
    first = str(result["environment"]["date"])
    later: dict[str, list[str]] = {}
    for row in result["calls"]:
        if "date" in row:
            later.setdefault(row["date"], []).append(" ".join(filter(None, key(row))))
    return "; ".join([first, *(f"on {date}: {', '.join(names)}" for date, names in sorted(later.items()))])
