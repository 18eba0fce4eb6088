"""Shows progress on the terminal, and measures the time of each stage."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


class Stages:
    """Shows the running stage; ``seconds`` has the time of each finished stage."""

    def __init__(self, console: Console) -> None:
        what = (SpinnerColumn(), TextColumn("{task.description}"))
        self._progress = Progress(*what, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console)
        self.seconds: dict[str, float] = {}

    def __enter__(self) -> Stages:
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    @contextmanager
    def stage(self, name: str, total: int = 1) -> Iterator[Callable[[], None]]:
        """Yields a function that moves the bar by one."""
        task = self._progress.add_task(name, total=total)
        started = time.perf_counter()
        yield lambda: self._progress.advance(task)
        self.seconds[name] = time.perf_counter() - started
        self._progress.update(task, completed=total)
