"""Tests that rows measured later join a stored result only if they can be compared with its rows, and say their day."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
from benchmarks import forward_mode, forward_mode_report, jax_first_report
from benchmarks.stored_rows import continued, dates, put

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
    stored["layer_date"] = "2026-02-03"
    assert dates(stored) == "2026-01-02; on 2026-02-03: a forward, the layer"


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


def test_forward_mode_keeps_the_other_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter(range(9))
    monkeypatch.setattr(forward_mode, "measured", lambda name, *_: {"call": name, "seconds": next(times)})
    monkeypatch.setattr(forward_mode, "shown", str)
    path = tmp_path / "stored.json"
    arguments = ["--trial", "--json", str(path), "--only"]
    for name in ("softcap", "float32", "softcap"):
        forward_mode.main([*arguments, name])
    calls = json.loads(path.read_text(encoding="utf-8"))["calls"]
    assert calls == [{"call": "softcap", "seconds": 2}, {"call": "float32", "seconds": 1}]
    with pytest.raises(SystemExit):
        forward_mode.main([*arguments, "unknown"])


@pytest.mark.parametrize("report", [jax_first_report, forward_mode_report])
def test_the_page_says_which_rows_are_of_a_later_day(report: Any, tmp_path: Path) -> None:
    name = {"jax_first_report": "jax-first", "forward_mode_report": "forward-mode"}[report.__name__.split(".")[1]]
    stored = json.loads((Path("benchmarks/results") / f"{name}-h200.json").read_text(encoding="utf-8"))
    row = stored["calls"][1]
    put(stored, row, "2030-01-01")
    path = tmp_path / "stored.json"
    path.write_text(json.dumps(stored), encoding="utf-8")
    assert f"; on 2030-01-01: {row['call']}" in report.section(path).splitlines()[0]
