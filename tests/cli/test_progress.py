"""Tests the progress of long commands: bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from attn_core.cli.progress import Stages, time_left


class Clock:
    """A clock that stands still unless a test moves it."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def run(console: Console, seconds_each: float, steps: int, total: int | None, limit: float | None) -> Stages:
    """Runs one stage of steps of equal length."""
    clock = Clock()
    with Stages(console, clock) as stages, stages.stage("counting", total, limit) as advance:
        for step in range(steps):
            clock.now += seconds_each
            stages.log(f"[bold]step {step}[/bold]")
            advance()
    return stages


def in_a_pipe(*arguments: float | None) -> list[str]:
    file = io.StringIO()
    run(Console(file=file, width=80), *arguments)  # type: ignore[arg-type]
    return [line for line in file.getvalue().split("\n") if line and not line.startswith("step ")]


def test_a_pipe_gets_a_plain_line_every_few_seconds() -> None:
    assert in_a_pipe(2.0, 8, 8, None) == [
        "counting",
        "counting: 3 of 8, 0:06 elapsed, about 0:10 left",
        "counting: 6 of 8, 0:12 elapsed, about 0:04 left",
        "counting: 8 of 8, 0:16 elapsed",
    ]


def test_a_stage_that_a_time_limits_has_a_time_left_without_a_total() -> None:
    assert in_a_pipe(30.0, 2, None, 60.0) == [
        "counting",
        "counting: 1, 0:30 elapsed, about 0:30 left",
        "counting: 2, 1:00 elapsed, about 0:00 left",
    ]


@pytest.mark.parametrize("dumb", [False, True])
def test_there_are_no_control_characters_without_a_real_terminal(dumb: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb" if dumb else "xterm")
    file = io.StringIO()
    run(Console(file=file, width=80, force_terminal=dumb, no_color=True), 6.0, 3, 3, None)
    written = file.getvalue().replace("\x1b[1m", "").replace("\x1b[0m", "")  # log's own bold
    assert "2 of 3" in written and all(character.isprintable() or character == "\n" for character in written)


def test_a_terminal_gets_bars_with_count_elapsed_and_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    file, clock = io.StringIO(), Clock()
    stages = Stages(Console(file=file, width=100, force_terminal=True, no_color=True), clock)
    with stages, stages.stage("counting", 4) as advance:
        clock.now += 90
        advance()
        assert stages._bars is not None
        stages._bars.refresh()
        shown = file.getvalue().rpartition("counting")[2]
        assert "1/4" in shown and "0:01:30" in shown and "about 4:30 left" in shown
    assert stages.seconds == {"counting": 90.0}


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((0, 10, 5.0, None), ""),  # nothing is known before the first step
        ((1, 10, 5.0, None), "about 0:45 left"),
        ((1, 10, 5.0, 20.0), "about 0:15 left"),  # the limit comes first
        ((9, 10, 9.0, 20.0), "about 0:01 left"),
        ((0, None, 5.0, 65.0), "about 1:00 left"),
        ((3, None, 5.0, None), ""),
        ((1, 1000, 10.0, None), "about 2:46:30 left"),
        ((10, 10, 5.0, 20.0), ""),
    ],
)
def test_the_time_left_is_what_steps_and_limit_leave(arguments: tuple, text: str) -> None:
    assert time_left(*arguments) == text
