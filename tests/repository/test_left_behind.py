"""Tests the checks of the test suite itself: a process that is left behind, or too much memory, fails a run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import left_behind
import pytest

HELPERS = Path(left_behind.__file__).parent
pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")

CONFTEST = """
import left_behind

left_behind.PATIENCE = 0.5
left_behind.MOST = {most}


def pytest_configure(config):
    config.pluginmanager.register(left_behind)
"""
# It leaves its group and loses its parent, as a daemon does.
LEAVES_ONE = """
import subprocess


def test_it():
    subprocess.run("(setsid sleep 7.25 &) </dev/null >/dev/null 2>&1", shell=True, check=True)
"""
LEAVES_NONE = """
import subprocess


def test_it():
    subprocess.run(["sleep", "0"], check=True)
    subprocess.Popen(["sleep", "0.1"])
"""
STARTS_A_SERVER = """
from multiprocessing import get_context


def test_it():
    get_context("spawn").Semaphore()
"""


def run(folder: Path, test: str, *arguments: str, most: int = left_behind.MOST) -> subprocess.CompletedProcess[str]:
    """Runs pytest on one test in a process of its own."""
    (folder / "conftest.py").write_text(CONFTEST.format(most=most), encoding="utf-8")
    (folder / "test_it.py").write_text(test, encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {left_behind.RUN: f"run of {folder}", left_behind.STRICT: "1", "PYTHONPATH": str(HELPERS)}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # most of the time of a start
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "xdist", *arguments, "test_it.py"]
    return subprocess.run(command, cwd=folder, env=environment, text=True, capture_output=True, check=False)


@pytest.mark.parametrize("workers", [(), ("-n", "1")], ids=["one process", "a worker"])
def test_a_process_left_behind_fails_the_run(tmp_path: Path, workers: tuple[str, ...]) -> None:
    result = run(tmp_path, LEAVES_ONE, *workers)
    assert "was left behind: sleep 7.25" in result.stdout and "1 passed" in result.stdout, result.stdout
    assert result.returncode == pytest.ExitCode.TESTS_FAILED


def test_processes_that_end_in_time_are_fine(tmp_path: Path) -> None:
    result = run(tmp_path, LEAVES_NONE)
    assert result.returncode == 0 and "left behind" not in result.stdout, result.stdout


@pytest.mark.parametrize(("workers", "name"), [((), "main"), (("-n", "1"), "gw0")], ids=["one process", "a worker"])
def test_too_much_memory_fails_the_run(tmp_path: Path, workers: tuple[str, ...], name: str) -> None:
    result = run(tmp_path, "def test_it():\n    bytearray(b'1' * 2**28)\n", *workers, most=2**28)
    assert f"the process {name} held 0.5" in result.stdout, result.stdout
    assert result.returncode == pytest.ExitCode.TESTS_FAILED


def test_the_peak_is_of_this_process_alone() -> None:
    """A process that started from a larger one, which counts in getrusage."""
    large = b"1" * 2**29
    code = "import left_behind; print(left_behind.peak())"
    environment = os.environ | {"PYTHONPATH": str(HELPERS)}
    out = subprocess.run([sys.executable, "-c", code], env=environment, text=True, capture_output=True, check=True)
    assert 2**20 < int(out.stdout) < len(large)


def test_servers_of_multiprocessing_may_stay_as_long_as_pytest(tmp_path: Path) -> None:
    result = run(tmp_path, STARTS_A_SERVER)
    assert result.returncode == 0 and "left behind" not in result.stdout, result.stdout
