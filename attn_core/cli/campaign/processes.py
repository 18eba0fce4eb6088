"""Runs a campaign in several processes, each with its own part of the blocks, and adds up their counts."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from attn_core.cli.campaign.campaign import MOST_FAULTS, Campaign, Part, running_file
from attn_core.cli.campaign.judge import Verdict
from attn_core.cli.campaign.workers import end_with_parent
from attn_core.cli.ctrl_c import insistent_ctrl_c
from attn_core.errors import SpecError
from attn_core.selection.whole_file import write_whole

CALLS = 10_000
"""Calls of one process, which is then replaced. torch and JAX keep about 100 MB for each 1000 compiled calls."""
LAST = 10.0
"""Seconds. With less time left, no process starts."""
EVERY = 10.0
"""Seconds between two writes of the sums."""
POLL = 0.5
"""Seconds between two looks at the processes."""

ADDED = ("calls", "skipped")
COUNTED = ("backends", "by entry", "by relation", "both ways", "seconds by entry")


def run_in_processes(  # noqa: C901
    campaign: Campaign, count: int, seconds: float, path: Path, resume: bool, advance: Callable[[], None]
) -> None:
    """Runs a campaign in processes until time is over, and leaves the sums in ``campaign.state``.

    A process that dies is started again, and the case in which it died is a fault.

    Args:
        campaign: gives the seed, the devices and the entries.
        count: the number of processes.
        seconds: how long each process runs. Its start comes on top.
        path: the JSON file of the sums. The state of process i is kept in ``<path>.<i>``.
        resume: whether to continue with those files, if they exist.
        advance: called once for every call that has run.
    """
    files = [path.with_name(f"{path.name}.{number}") for number in range(count)]
    if not resume:
        for file in files:
            file.unlink(missing_ok=True)
    context, began = get_context("spawn"), monotonic()

    def start(number: int, left: float) -> Any:
        names = tuple(campaign.state["only"])
        arguments = (campaign.state["seed"], campaign.devices, names, Part(number, count), left, files[number])
        process = context.Process(target=_run_part, args=arguments, name=f"campaign {number}")
        process.start()
        return process

    def collect() -> dict[str, Any]:
        total = merged([campaign.state, *_states(files)])
        write_whole(json.dumps(total, indent=1) + "\n", path)
        return total

    workers = [start(number, seconds) for number in range(count)]
    seen, written = sum(state["calls"] for state in _states(files)), began
    try:
        while any(worker.is_alive() for worker in workers):
            sleep(POLL)
            for number, (worker, file) in enumerate(zip(workers, files)):
                left = seconds - (monotonic() - began)
                if worker.is_alive() or left < LAST or _full(file):
                    continue
                if worker.exitcode != 0 and not running_file(file).exists():
                    raise SpecError(f"--processes: process {number} ended with exit code {worker.exitcode}")
                workers[number] = start(number, left)
            calls = sum(state["calls"] for state in _states(files))
            for _ in range(calls - seen):
                advance()
            seen = calls
            if monotonic() - written > EVERY:  # so that little is lost if this process is killed
                collect()
                written = monotonic()
    except BaseException:
        for worker in workers:
            if worker.is_alive():
                os.kill(worker.pid, signal.SIGINT)  # so that it writes its file
        raise
    finally:
        for worker in workers:
            worker.join()
        campaign.state = collect()


def _run_part(
    seed: int, devices: dict[str, str], names: tuple[str, ...], part: Part, seconds: float, path: Path
) -> None:
    end_with_parent()
    run = Campaign(seed, devices, names, part)
    if path.exists():
        run.resume(path)
    try:
        with insistent_ctrl_c():
            run.run(seconds, path, _ignore, CALLS)
    except KeyboardInterrupt:
        raise SystemExit(0) from None


def _ignore(verdict: Verdict) -> None:
    pass


def _full(file: Path) -> bool:
    return any(len(state["faults"]) >= MOST_FAULTS for state in _states([file]))


def _states(files: list[Path]) -> list[dict[str, Any]]:
    return [json.loads(file.read_text(encoding="utf-8")) for file in files if file.exists()]


def merged(states: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the sum of several campaigns' states. The first gives the date, the seed, the device and the versions."""
    total = json.loads(json.dumps(states[0]))
    for state in states[1:]:
        for name in ADDED:
            total[name] += state[name]
        for name in COUNTED:
            add_counts(total[name], state[name])
        total["seconds"] = max(total["seconds"], state["seconds"])
        total["faults"] += state["faults"]
        if state["worst"]["use"] > total["worst"]["use"]:
            total["worst"] = state["worst"]
    return total  # type: ignore[no-any-return]


def add_counts(total: dict[str, Any], more: dict[str, Any]) -> None:
    """Adds counts to others in place; both may be nested."""
    for key, value in more.items():
        if isinstance(value, dict):
            add_counts(total.setdefault(key, {}), value)
        else:
            total[key] = total.get(key, 0) + value
