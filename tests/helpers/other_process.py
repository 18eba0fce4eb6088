"""A second pytest process that runs tests one by one on request, for tests that need another environment.

The tests are collected and counted in the first process like any other. This file is also the second process's plugin.
"""

from __future__ import annotations

import os
import subprocess
import sys
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

_DESCRIPTOR = "TESTS_ON_REQUEST"


class OtherProcess:
    """A process that runs tests of some files. The first test starts the process; a test that times out ends it.

    Args:
        root: the folder that node ids start at. pytest itself would guess it from where the process runs.
    """

    def __init__(self, files: list[Path], root: Path, log: Path, environment: dict[str, str]) -> None:
        self._files, self._root, self._log, self._environment = files, root, log, environment
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    def run(self, test: str) -> None:
        """Fails, with the other process's traceback, unless the test with this node id passes there."""
        connection = self._connection or self._start()
        try:
            connection.send(test)
            reports = connection.recv()
        except BaseException as error:  # a timeout, too
            self.end()
            if not isinstance(error, (EOFError, OSError)):
                raise
            pytest.fail(f"the other process ended:\n{self._log.read_text()[-6000:]}", pytrace=False)
        if not reports:
            pytest.fail(f"{test}: no such test in the other process", pytrace=False)
        if any(outcome != "passed" for outcome, _ in reports):
            pytest.fail("\n".join(text for _, text in reports), pytrace=False)

    def _start(self) -> Connection:
        self._connection, theirs = Pipe()
        options = ("-q", "-p", "no:cacheprovider", "-p", "other_process")
        paths = os.pathsep.join(path for path in sys.path if path)
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "pytest", *options, f"--rootdir={self._root}", *map(str, self._files)],
                **{"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log, "pass_fds": [theirs.fileno()]},
                env={"PYTHONPATH": paths, **self._environment, _DESCRIPTOR: str(theirs.fileno())},
            )
        theirs.close()
        return self._connection

    def end(self) -> None:
        if self._connection is not None:
            self._connection.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._process = self._connection = None


_reports: list[tuple[str, str]] = []


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    sections = "".join(f"\n{name}\n{text}" for name, text in report.sections)
    _reports.append((report.outcome, report.longreprtext + (sections if report.failed else "")))


def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Runs the tests that the first process names, until the first process closes the connection."""
    connection = Connection(int(os.environ[_DESCRIPTOR]))
    items = {item.nodeid: item for item in session.items}
    while True:
        try:
            item = items.get(connection.recv())
        except EOFError:
            return True
        _reports.clear()
        if item is not None:
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
        connection.send(list(_reports))
