"""Progress of long commands and of the examples: bars on a terminal, elsewhere a plain line every few seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

EVERY = 5.0
"""Seconds between two lines where there is no terminal."""


class Stages:
    """Shows the running stage: its count, the elapsed time and the time left.

    Attributes:
        seconds: the time of each finished stage.
    """

    def __init__(self, console: Console, clock: Callable[[], float] = perf_counter) -> None:
        self._console, self._clock = console, clock
        # Bars move the cursor, which leaves control characters in a pipe and on a dumb terminal.
        on_terminal = console.is_terminal and not console.is_dumb_terminal
        self._bars = _bars(console, clock) if on_terminal else None
        self.seconds: dict[str, float] = {}

    def __enter__(self) -> Stages:
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bars is not None:
            self._bars.stop()

    def log(self, line: str) -> None:
        """Prints a line of rich markup above the bars."""
        # Without highlight, because rich would colour every number.
        self._console.print(line, highlight=False)

    @contextmanager
    def stage(self, name: str, total: int | None = 1, limit: float | None = None) -> Iterator[Callable[[], None]]:
        """Yields a function that counts one step.

        Args:
            total: the number of steps; None if only the time limits them.
            limit: the seconds after which no step starts; None for no limit.
        """
        started = self._clock()
        if self._bars is None:
            lines = _Lines(self._console, self._clock, name, total, limit, started)
            lines.begin()
            yield lines.advance
            lines.end()
        else:
            bars, task = self._bars, self._bars.add_task(name, total=total, limit=limit)
            yield lambda: bars.advance(task)
            # A stage may need fewer steps than expected; one that ran out of time does not.
            if limit is None:
                bars.update(task, completed=total)
            bars.stop_task(task)
        self.seconds[name] = self._clock() - started


@dataclass
class _Lines:
    """A stage without a terminal."""

    console: Console
    clock: Callable[[], float]
    name: str
    total: int | None
    limit: float | None
    started: float
    done: int = 0

    def begin(self) -> None:
        self.printed = self.started
        self._print(self.name)

    def advance(self) -> None:
        self.done += 1
        now = self.clock()
        if now - self.printed >= EVERY and self.done != self.total:
            self.printed = now
            self._print(self._state(now))

    def end(self) -> None:
        # Not twice, if the last step was just printed.
        if self.done and (now := self.clock()) != self.printed:
            self._print(self._state(now))

    def _state(self, now: float) -> str:
        elapsed = now - self.started
        count = str(self.done) if self.total is None else f"{self.done} of {self.total}"
        left = time_left(self.done, self.total, elapsed, self.limit)
        return f"{self.name}: {count}, {_clock(elapsed)} elapsed" + (f", {left}" if left else "")

    def _print(self, line: str) -> None:
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)


class _Left(ProgressColumn):
    """The time left, from the steps so far and the limit."""

    def render(self, task: Task) -> Text:
        total = None if task.total is None else int(task.total)
        return Text(time_left(int(task.completed), total, task.elapsed or 0.0, task.fields["limit"]))


def _bars(console: Console, clock: Callable[[], float]) -> Progress:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeElapsedColumn(), _Left(), console=console, get_time=clock)


def time_left(done: int, total: int | None, elapsed: float, limit: float | None) -> str:
    """Returns the time left as text, at most what the limit leaves; empty if nothing is left or known."""
    if done == total:
        return ""
    estimates = [] if limit is None else [max(0.0, limit - elapsed)]
    if done and total is not None:
        estimates.append(elapsed / done * (total - done))
    return f"about {_clock(min(estimates))} left" if estimates else ""


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
