"""Tests how calls are timed, with plain functions in place of backends."""

from __future__ import annotations

import math
from time import sleep
from typing import Any

import pytest

from attn_core.cli import timing
from attn_core.cli.timing import Calls

torch = pytest.importorskip("torch")


def test_results_are_awaited_once_after_a_queue() -> None:
    """As JAX needs it on a GPU: the host's time ends before the wait."""
    waited: list[Any] = []

    def call(name: str) -> tuple[Any, ...]:
        return (name,)

    def wait(results: Any) -> None:
        sleep(0.02)
        waited.append(results)

    total, host = timing._queue(Calls(call, wait), "a", 4)
    assert waited == [("a",)] and host < total


def test_backends_take_their_turns_after_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """As JAX needs it on a CPU: the threads of torch's OpenMP spin for a while after a call."""
    events: list[str] = []

    def call(name: str) -> tuple[Any, ...]:
        events.append(name)
        return (name,)

    monkeypatch.setattr(timing, "sleep", lambda seconds: events.append(f"pause {seconds}"))
    timing._rounds(Calls(call, pause=0.25), {"a": (1.0, 1.0), "b": (1.0, 1.0)}, 2)
    assert events == ["pause 0.25", "a", "pause 0.25", "b", "pause 0.25", "b", "pause 0.25", "a"]


def one(value: float) -> tuple[Any, ...]:
    return (torch.full((3,), value),)


def measure(results: dict[str, Any], rounds: int = 3) -> dict[str, timing.Entry]:
    def call(name: str) -> tuple[Any, ...]:
        actual = results[name]
        if isinstance(actual, Exception):
            raise actual
        return actual

    return timing.measure(Calls(call), list(results), rounds)


def test_results_are_compared_with_the_first_backend_that_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "_queue", lambda call, name, count: (call.run(name), (1e-6, 1e-6))[1])
    actual = measure(
        {"a": ValueError("no\nreally"), "b": one(math.nan), "c": one(2.0), "d": one(2.5), "e": one(2.0)}, rounds=4
    )
    assert list(actual) == ["a", "b", "c", "d", "e"]
    assert actual["a"] == {"failed": "ValueError: no"}
    assert actual["b"] == {"failed": "its results are not finite"}
    assert [actual[name]["difference"] for name in "cde"] == [0.0, 0.25, 0.0]
    for name in "cde":
        entry = actual[name]
        assert len(entry["microseconds"]) == 4
        assert min(entry["microseconds"]) <= entry["median"] <= max(entry["microseconds"])


def test_a_case_that_no_backend_runs_has_no_times() -> None:
    actual = measure({"a": ValueError("no")})
    assert actual == {"a": {"failed": "ValueError: no"}}


@pytest.mark.slow
def test_very_slow_calls_are_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = {"quick": 0, "slow": 0}
    seconds = {"quick": 0.001, "slow": 1.0}
    monkeypatch.setattr(timing, "_queue", lambda call, name, count: (call.run(name), (seconds[name], seconds[name]))[1])

    def call(name: str) -> tuple[Any, ...]:
        calls[name] += 1
        return one(1.0)

    actual = timing.measure(Calls(call), ["slow", "quick"], 5)
    assert actual["slow"]["microseconds"] == [1e6]
    assert "timed once: much slower" in actual["slow"]["note"]
    assert actual["quick"]["microseconds"] == [1e3] * 5
    assert calls == {"slow": 2, "quick": 5 + 10}
    seconds["slow"] = 0.0031
    actual = timing.measure(Calls(call), ["slow", "quick"], 5)
    assert [len(actual[name]["microseconds"]) for name in actual] == [2, 5]


def test_a_backend_is_not_judged_by_one_slow_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a backend prepares its later calls in the second one."""
    queues: list[str] = []

    def queue(call: Any, name: str, count: int) -> tuple[float, float]:
        queues.append(name)
        seconds = 0.04 if queues == ["odd"] else 0.001
        return seconds, seconds

    monkeypatch.setattr(timing, "_queue", queue)
    entries = timing.measure(Calls(lambda name: one(1.0)), ["odd", "quick"], 5)
    assert entries["odd"]["microseconds"] == [1e3] * 5
