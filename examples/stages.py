"""The stages of an example: rich's bars show them, and the time of each is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


class Stages(Progress):
    """Shows a bar, the count and the elapsed time of each stage; without a terminal, once at the end.

    Attributes:
        seconds: the time of each finished stage.
    """

    def __init__(self, console: Console) -> None:
        bar = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        super().__init__(*bar, TimeElapsedColumn(), console=console)
        self.seconds: dict[str, float] = {}

    def show(self, line: str) -> None:
        """Prints a line of rich markup above the bars."""
        # Without highlight, because rich would colour every number.
        self.console.print(line, highlight=False)

    @contextmanager
    def stage(self, name: str, total: int = 1) -> Iterator[Callable[[], None]]:
        """Yields a function that counts one of ``total`` steps; a stage of one step need not call it."""
        began, task = perf_counter(), self.add_task(name, total=total)
        yield lambda: self.advance(task)
        if total == 1:
            self.update(task, completed=1)
        self.stop_task(task)
        self.seconds[name] = perf_counter() - began
