"""A plugin of pytest: ``--outcome FILE`` writes what a whole run found: date, commit, versions, counts and failures.

The file also has the seconds of the longest tests. ``longest_first`` sorts the next run by them, so that no worker
starts a slow compilation at the end. A run that was interrupted, or that only collects, writes nothing.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from subprocess import run
from typing import Any

import pytest

from attn_core.cli.devices import versions

COUNTED = ("passed", "failed", "failed as expected", "skipped")
LONG = 4.0
"""Seconds from which on a test is in the file."""


class Outcome:
    """Collects the results of a run in the process that starts the workers."""

    def __init__(self, path: Path) -> None:
        self._path, self._began = path, time.monotonic()
        self._results: dict[str, str] = {}
        self._seconds: Counter[str] = Counter()
        self._reasons: Counter[str] = Counter()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._results[report.nodeid] = "failed"

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] += report.duration
        if report.failed:
            self._results[report.nodeid] = "failed"
        elif report.skipped and hasattr(report, "wasxfail"):
            self._results[report.nodeid] = "failed as expected"
        elif report.skipped:
            self._results[report.nodeid] = "skipped"
            self._reasons[_reason(report)] += 1
        elif report.when == "call":
            self._results.setdefault(report.nodeid, "passed")

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        ended = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) and not session.shouldstop
        if not ended or session.config.option.collectonly:
            return
        longest = {name: round(seconds, 1) for name, seconds in self._seconds.most_common() if seconds >= LONG}
        content = {
            "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
            "commit": _commit(),
            "tests": session.config.getoption("markexpr"),
            "devices": _devices(),
            "workers": getattr(session.config.option, "numprocesses", None) or 1,
            "seconds": round(time.monotonic() - self._began),
            "versions": versions(),
            "counts": {name: list(self._results.values()).count(name) for name in COUNTED},
            "failed": sorted(name for name, result in self._results.items() if result == "failed"),
            "skipped": dict(self._reasons.most_common()),
            "longest": longest,
        }
        self._path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def longest_first(items: list[pytest.Item], stored: Path) -> None:
    """Sorts tests by the seconds that a stored run needed, the longest first. Others keep their order behind them.

    Kernels that compile for each kind of call count as long where no run has measured a test.
    """
    from both_frontends import COMPILED_ON_GPUS

    seconds = json.loads(stored.read_text(encoding="utf-8"))["longest"] if stored.exists() else {}
    if not seconds:
        seconds = {item.nodeid: LONG for item in items if any(name in item.nodeid for name in COMPILED_ON_GPUS)}
    items.sort(key=lambda item: -seconds.get(item.nodeid, 0.0))


def _reason(report: Any) -> str:
    """Returns why a test was skipped, without the place."""
    return str(report.longrepr[-1]).removeprefix("Skipped: ")


def _commit() -> str | None:
    """Returns the commit, from ``COMMIT`` in the environment where the files have no repository; "+" if they differ."""
    if named := os.environ.get("COMMIT"):
        return named
    found = run(["git", "describe", "--always", "--abbrev=12", "--dirty=+"], capture_output=True, text=True)
    return found.stdout.strip() or None


def _devices() -> list[str]:
    """Returns the names of the GPUs that torch sees."""
    import torch

    return [torch.cuda.get_device_name(at) for at in range(torch.cuda.device_count())]
