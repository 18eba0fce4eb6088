"""Tests the timing of candidates in turns, and that rows measured later join a stored result only if they can be
compared with its rows, and say their day."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import measure, report
from benchmarks.measure import continued, dates, put

ENVIRONMENT = {"date": "2026-01-02", "python": "3.12", "processor": "X", "versions": {"torch": "2.11", "jax": "0.11"}}


def result(**changes: Any) -> dict[str, Any]:
    return {"environment": {**ENVIRONMENT, **changes}, "device": "H200", "calls": []}


def test_rows_replace_their_own_call_alone_and_have_their_day() -> None:
    stored = result()
    put(stored, {"call": "a", "what": "forward", "seconds": 1}, "2026-01-02")
    put(stored, {"call": "a", "what": "training", "seconds": 2}, "2026-01-02")
    put(stored, {"call": "a", "what": "forward", "seconds": 3}, "2026-02-03")
    later = {"call": "a", "what": "forward", "seconds": 3, "date": "2026-02-03"}
    assert stored["calls"] == [later, {"call": "a", "what": "training", "seconds": 2}]
    assert dates(stored) == "2026-01-02; on 2026-02-03: a forward"


@pytest.mark.parametrize(
    ("now", "words"),
    [
        (result(versions={"torch": "2.12", "jax": "0.11"}), "torch 2.11, here 2.12"),
        (result(versions={"torch": "2.11", "jax": "0.11", "new": "1"}), "new None, here 1"),
        (result(processor="Y"), "processor X, here Y"),
        ({**result(), "device": "H100"}, "device H200, here H100"),
    ],
)
def test_rows_of_other_machines_and_packages_are_refused(now: dict[str, Any], words: str, tmp_path: Path) -> None:
    path = tmp_path / "stored.json"
    path.write_text(json.dumps(result()), encoding="utf-8")
    assert continued(path, result(date="2026-02-03")) == result()
    with pytest.raises(SystemExit, match=f"measure it whole: {words}$"):
        continued(path, now)


def test_candidates_take_turns_in_changing_order() -> None:
    order: list[str] = []

    def turn(name: str) -> float:
        order.append(name)
        return 1.0

    seconds = measure.take_turns({name: lambda name=name: turn(name) for name in "abc"}, rounds=3)  # type: ignore[misc]
    assert "".join(order) == "abc" + "acb" + "cab" and seconds == dict.fromkeys("abc", [1.0] * 3)
    assert measure.take_turns({}, rounds=3) == {}


def test_a_turn_fills_with_calls_and_a_failure_is_named() -> None:
    counts = {"one": 0}

    def one() -> None:
        counts["one"] += 1

    def broken() -> None:
        raise ImportError("no such package\nmore")

    found = measure.measure({"one": one, "broken": broken}, turn=1e-4, rounds=2, most=9)
    assert found["not_run"] == {"broken": "ImportError: no such package"} and len(found["seconds"]["one"]) == 2
    assert counts["one"] >= 2 * (1 + 9)
    counts["one"] = 0
    measure.measure({"one": one}, rounds=2)
    assert counts["one"] == 2 + 2, "without a turn, two calls that are not timed, and one for each round"


def test_a_program_keeps_the_other_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter(range(9))
    jobs = {(name, ""): lambda: {"seconds": {"x": [next(times)]}} for name in ("softcap", "float32")}
    monkeypatch.setattr(measure, "device_name", lambda: "cpu")
    path = tmp_path / "stored.json"
    for name in ("softcap", "float32", "softcap"):
        code = measure.run("doc", jobs, str, ["--json", str(path), "--only", name], device="cpu")
        assert code == 0
    calls = json.loads(path.read_text(encoding="utf-8"))["calls"]
    assert [(row["call"], row["seconds"]["x"]) for row in calls] == [("softcap", [2]), ("float32", [1])]
    assert measure.run("doc", jobs, str, [], device="cuda") == 2
    with pytest.raises(SystemExit):
        measure.run("doc", jobs, str, ["--only", "unknown"], device="cpu")


def test_the_page_says_which_rows_are_of_a_later_day(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = report.load("jax-first-h200")
    row = stored["calls"][1]
    put(stored, row, "2030-01-01")
    monkeypatch.setattr(report, "load", lambda stem: stored)
    assert f"; on 2030-01-01: {row['call']}" in report.render("jax-first-h200").splitlines()[0]
