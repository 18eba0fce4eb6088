"""A plugin of pytest: tells which processes of a run held too much memory, or are still there after it.

Such a run fails if STRICT is set in the environment, as it is in the workflow ci.

Processes are found by an environment variable, which children inherit. So a process is found even if it left its group
or lost its parent. Both checks need Linux.
"""

from __future__ import annotations

import os
import re
import time
import uuid
from collections.abc import Generator
from pathlib import Path
from typing import Any

import psutil
import pytest

MOST = (8 if Path("/dev/nvidiactl").exists() else 3) * 2**30
"""Bytes that one process of the tests may hold at its peak; beside a GPU its runtime alone takes some GiB."""
PATIENCE = 10.0
"""Seconds that the processes of a run have to end after it."""
RUN = "ATTN_CORE_TEST_RUN"
"""The environment variable with the run's name."""

SERVERS = re.compile(r"from multiprocessing\.(resource_tracker|forkserver) import main")
"""Command lines of servers that multiprocessing keeps, each until the process ends that started it."""

STRICT = "ATTN_CORE_LEAVE_NOTHING"
_PEAK = "peak memory"
_peaks: dict[str, int] = {}
"""Bytes by the worker's name."""
_FAULTS = pytest.StashKey[list[str]]()


def pytest_configure() -> None:
    os.environ.setdefault(RUN, uuid.uuid4().hex)  # a worker has it from the process that started it


@pytest.hookimpl(wrapper=True, trylast=True)  # inside of the one that prints the summary
def pytest_sessionfinish(session: pytest.Session) -> Generator[None, Any, Any]:
    result = yield  # the workers end in here
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput[_PEAK] = peak()
        return result
    _peaks["main"] = peak()
    found = session.config.stash[_FAULTS] = [*too_large(_peaks), *left_behind(os.environ[RUN])]
    if found and os.environ.get(STRICT):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    return result


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """A hook of xdist: a worker has ended."""
    output = getattr(node, "workeroutput", {})  # a worker that died has none
    if _PEAK in output:
        _peaks[node.gateway.id] = output[_PEAK]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    sizes = ", ".join(f"{name} {size / 2**30:.2f}" for name, size in sorted(_peaks.items()))
    terminalreporter.write_line(f"peak memory in GiB: {sizes}")
    for line in config.stash.get(_FAULTS, []):
        terminalreporter.write_line(line, red=True)


def peak() -> int:
    """Returns the most bytes that this process has held; 0 if the system does not tell."""
    status = Path("/proc/self/status")
    # Not getrusage: its number survives exec, so a worker would report the process that started it.
    found = re.search(r"^VmHWM:\s+(\d+) kB", status.read_text("ascii") if status.exists() else "", re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def too_large(peaks: dict[str, int]) -> list[str]:
    """Returns a line for each process that held more than MOST bytes."""
    return [
        f"the process {name} held {size / 2**30:.2f} GiB, but {MOST / 2**30:.0f} are allowed"
        for name, size in peaks.items()
        if size > MOST
    ]


def left_behind(run: str) -> list[str]:
    """Returns a line for each process of a run that does not end in time."""
    until = time.monotonic() + PATIENCE
    while (found := _processes(run)) and time.monotonic() < until:
        time.sleep(0.1)
    return [f"the process {pid} was left behind: {command[:200]}" for pid, command in found.items()]


def _processes(run: str) -> dict[int, str]:
    """The command lines of a run's processes, but for this one and its ancestors."""
    own = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    found = {}
    for process in psutil.process_iter():
        try:
            if process.pid in own or process.environ().get(RUN) != run or process.status() == psutil.STATUS_ZOMBIE:
                continue
            command = " ".join(process.cmdline())
            if not (process.ppid() == os.getpid() and SERVERS.search(command)):
                found[process.pid] = command
        except psutil.Error:  # it has just ended, or belongs to another user
            continue
    return found
