"""Tests the worker processes of a campaign: they fail alone, and end with the process that started them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.campaign import faulty_workers, workers
from tests.campaign.workers import WorkerError, Workers


def test_workers_stay_alive_between_jobs() -> None:
    group = Workers(faulty_workers.answers, 2)
    try:
        first, second = group.run(("none", 0)), group.run(("none", 0))
        assert first == second and len(set(first)) == 2 and os.getpid() not in first
    finally:
        group.stop()


@pytest.mark.parametrize(
    ("fault", "message"),
    [("die", "worker 1 of 2: died with exit code 3"), ("hang", "worker 1 of 2: no answer"), ("raise", "no such tile")],
)
def test_a_worker_that_fails_is_an_error_and_the_next_call_starts_another(
    monkeypatch: pytest.MonkeyPatch, fault: str, message: str
) -> None:
    work = faulty_workers.answers
    try:
        before = workers.workers_of(work, 2).run(("none", 0))
        if fault == "hang":
            monkeypatch.setattr(workers, "SECONDS", 1.0)
        with pytest.raises(WorkerError, match=message):
            workers.workers_of(work, 2).run((fault, 1))
        monkeypatch.undo()
        after = workers.workers_of(work, 2).run(("none", 0))
        assert set(before).isdisjoint(after)
    finally:
        workers._groups.pop(work).stop()


STARTS_TWO = """
from tests.campaign import faulty_workers
from tests.campaign.workers import Workers

if __name__ == "__main__":
    group = Workers(faulty_workers.answers, 2)
    print(*group.run(("none", 0)), flush=True)
    group.run(("hang", 1))
"""


def test_workers_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    """Killed, it cannot tell them; one of them waits for its next job then, and the other one hangs in a job."""
    script = tmp_path / "starts_two.py"
    script.write_text(STARTS_TWO, encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": str(Path(workers.__file__).parents[2])}
    with subprocess.Popen([sys.executable, script], env=environment, text=True, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        started = [psutil.Process(int(pid)) for pid in process.stdout.readline().split()]
        assert len(started) == 2
        process.send_signal(signal.SIGKILL)
    _, left = psutil.wait_procs(started, timeout=300)
    for each in left:
        each.kill()
    assert not left
