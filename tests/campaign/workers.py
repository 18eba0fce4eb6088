"""Workers: processes that run calls one after another, for entries that need several processes or another one.

They start once. A worker that dies, or does not answer in time, is an error of the call that it ran; the next call
starts new ones.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from threading import Thread
from time import monotonic
from typing import Any

SECONDS = 120.0
"""How long a call may take, and how long workers may take to start: generous, because the machine may be busy."""
GRACE = 5.0
"""How long the other workers may take to answer after one has failed."""

PRELOADED = ["torch", "torch_frontend"]
"""Modules that the server of new processes imports once for all of them. They start no thread."""


class WorkerError(RuntimeError):
    """A worker raised, died, or did not answer."""


class Workers:
    """A group of processes that all run each call."""

    def __init__(self, work: Callable[..., None], count: int) -> None:
        """Starts the processes.

        Args:
            work: ``work(rank, count, folder, connection)`` at the top of a module. It calls ``serve``.
        """
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self._folder = tempfile.TemporaryDirectory(prefix="attn-campaign-")
        self._connections: list[Connection] = []
        self._processes = []
        for rank in range(count):
            here, there = context.Pipe()
            arguments = (work, rank, count, Path(self._folder.name), there)
            process = context.Process(target=_work, args=arguments, daemon=True, name=f"worker {rank}")
            process.start()
            there.close()
            self._connections.append(here)
            self._processes.append(process)

    def run(self, job: Any) -> list[Any]:
        """Runs a job in every process, and returns the result of each.

        Raises:
            WorkerError: if a worker raised, died, or did not answer. Unless all of them raised, the group is stopped.
        """
        for connection in self._connections:
            with suppress(OSError):  # a worker that is gone is found below
                connection.send(job)
        answers: dict[int, Any] = {}
        failures: dict[int, str] = {}
        deadline = monotonic() + SECONDS
        while len(answers) + len(failures) < len(self._connections):
            left = [c for rank, c in enumerate(self._connections) if rank not in answers and rank not in failures]
            ready = wait(left, max(0.0, deadline - monotonic()))
            if not ready:
                failures |= {self._connections.index(each): "no answer" for each in left}
                break
            for rank in [self._connections.index(each) for each in left if each in ready]:
                try:
                    right, answer = self._connections[rank].recv()
                except (EOFError, OSError):
                    self._processes[rank].join(GRACE)
                    right, answer = False, f"died with exit code {self._processes[rank].exitcode}"
                    deadline = min(deadline, monotonic() + GRACE)
                if right:
                    answers[rank] = answer
                else:
                    failures[rank] = answer
                    deadline = min(deadline, monotonic() + GRACE)
        if not failures:
            return [answers[rank] for rank in range(len(self._connections))]
        count = len(self._connections)
        # Workers that all raised alike still agree about the next call. Others may wait for each other.
        if len(failures) < count or not all(each.is_alive() for each in self._processes):
            self.stop()
        first = min(failures, key=lambda rank: (failures[rank] == "no answer", rank))
        raise WorkerError(f"worker {first} of {count}: {failures[first]}")

    @property
    def alive(self) -> bool:
        """Whether the group can run a call."""
        return bool(self._processes) and all(process.is_alive() for process in self._processes)

    def stop(self) -> None:
        """Ends the processes."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for connection in self._connections:
            connection.close()
        self._processes, self._connections = [], []
        self._folder.cleanup()


_groups: dict[Callable[..., None], Workers] = {}
"""The group of each function, which the cases of a campaign share."""


def workers_of(work: Callable[..., None], count: int) -> Workers:
    """Returns the running group of a function; starts it at the first call, and again after a failure."""
    group = _groups.get(work)
    if group is None or not group.alive:
        if group is not None:
            group.stop()
        _groups[work] = group = Workers(work, count)
    return group


def end_with_parent() -> None:
    """Makes this process end as soon as the process that started it has ended, also if that was killed.

    Without this a rank would wait for another one that got no job any more, and a part of a campaign for its time.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None, "multiprocessing did not start this process"

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    Thread(target=watch, daemon=True, name="end with parent").start()


def _work(work: Callable[..., None], *arguments: Any) -> None:
    end_with_parent()
    work(*arguments)


def serve(connection: Connection, run: Callable[[Any], Any]) -> None:
    """Answers jobs in a worker until the other end closes."""
    while True:
        try:
            job = connection.recv()
        except (EOFError, OSError):
            return
        try:
            answer = True, run(job)
        except Exception as error:
            answer = False, f"{type(error).__name__}: {error}"
        connection.send(answer)
