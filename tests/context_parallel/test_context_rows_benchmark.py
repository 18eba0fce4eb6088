"""Tests the benchmark of rows over ranks: a trial run over gloo and two JAX devices, its tables and its profile."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("jax")
if not torch.distributed.is_available():
    pytest.skip("torch was built without torch.distributed", allow_module_level=True)

from benchmarks import context_row_report as report
from benchmarks import context_rows
from benchmarks.context_row_profile import Span, summary
from benchmarks.context_row_shapes import NAMED, drawn, rows_of


@pytest.mark.slow
def test_a_trial_measures_every_way_in_both_frameworks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.json"
    code = context_rows.main(
        ["--device", "cpu", "--only", "packed", "--seconds", "180", "--json", str(path), "--seed", "3"]
    )
    printed = capsys.readouterr().out
    assert code == 0
    result = json.loads(path.read_text())
    assert [row["name"] for row in result["rows"]] == ["packed"] and result["seed"] == 3
    ways = {", ".join(way) for way in NAMED[0].ways}
    for row in result["rows"]:
        for direction in report.DIRECTIONS:
            entry = row["torch"][direction]
            assert len(entry["seconds"][report.ONE]) == len(entry["seconds"][report.CHOSEN]) >= 3
            ran = {entry["chosen"] if name == report.CHOSEN else name for name in entry["others"]}
            assert ran | set(entry["refused"]) == ways, entry
            assert all(time > 0 for time in row["jax"][direction]["seconds"]), row["jax"]
            assert row["jax"][direction]["way"] == entry["chosen"]
    assert "packed: 92 tokens" in printed and "seed 3" in printed
    assert context_rows.main([str(path)]) == 0 and capsys.readouterr().out == printed


@pytest.mark.slow
def test_a_profile_has_a_file_for_each_rank(tmp_path: Path) -> None:
    options = ["--device", "cpu", "--profile", "window", "--folder", str(tmp_path), "--seconds", "100"]
    assert context_rows.main(options) == 0
    for rank in (0, 1):
        text = (tmp_path / f"window-rank{rank}.txt").read_text()
        assert f"rank {rank} of 2" in text and "## forward" in text and "## training" in text
        assert text.count("gaps: ") == text.count("host, to launch: ") == 2 and "Self CPU" in text


@pytest.mark.slow
def test_no_rank_is_left_behind_when_the_time_is_over(tmp_path: Path) -> None:
    """The launcher's ranks have sessions of their own. One that stays would slow what is measured next."""
    rank = tmp_path / "rank.py"
    rank.write_text(
        "import os, pathlib, sys, time\n"
        "pathlib.Path(sys.argv[1], os.environ['RANK']).write_text(str(os.getpid()))\n"
        "time.sleep(80)\n"
    )
    launched = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(rank), str(tmp_path)]
    assert context_rows._run(launched, "cpu", 15.0) == 124
    for number in ("0", "1"):
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / number).read_text()), 0)


def entry_of(one: list[float], chosen: list[float], others: dict[str, list[float]]) -> dict[str, Any]:
    """A direction of a row, as the benchmark writes it."""
    estimates = {"ring, zigzag": 0.011, "ring, contiguous": 0.012}
    seconds = {report.ONE: one, report.CHOSEN: chosen, report.CAPTURED: [0.8 * each for each in chosen]}
    memory = {report.ONE: 2**21, report.CHOSEN: 2**20}
    rest = {"refused": {"ring, documents": "SpecError: x"}, "memory": memory, "backends": [], "others": others}
    return {"chosen": "ring, zigzag", "estimates": estimates, "seconds": seconds, **rest}


def test_the_tables_mark_what_was_missed() -> None:
    fast = entry_of([0.02, 0.02], [0.01, 0.01], {"chosen": [0.01], "ring, contiguous": [0.0099]})
    slow = entry_of([0.015, 0.015], [0.01, 0.01], {"chosen": [0.01], "ring, contiguous": [0.008]})
    row = {"name": "packed", "words": "few", "goals": (0.85, 0.88), "error": ""}
    row |= {"torch": {"forward": fast, "training": slow}}
    row |= {"jax": {"forward": {"seconds": [0.0101]}, "training": {"seconds": [0.02]}}}
    missing = {"name": "odd", "words": "none", "goals": None, "error": "not measured: out of time", "torch": {}}
    facts = {"date": "2026-01-01", "python": "3.12", "versions": {"torch": "2.13"}}
    run = {"environment": facts, "ranks": 2, "device": "GPU", "dtype": "bfloat16", "seed": 1, "rows": [row, missing]}
    text = report.section(run)
    assert "| packed: few | forward | 1.00 | ≥ 0.85 | 1.25 | ring, zigzag | 10 ms | 11 ms | +10% | 1.0% |" in text
    assert "| packed: few | training | 0.75 (missed) |" in text and "25.0% (missed)" in text and "2.00 (missed)" in text
    assert "1 MiB | 2 MiB" in text and "| odd: none | forward | not measured: out of time |" in text
    assert "- ring, documents: SpecError: x (packed)" in text
    columns = {
        line.count("|")
        for line in text.split("\n")
        if line.startswith(("| packed: ", "| odd: ", "| row | direction | E"))
    }
    assert len(columns) == 1


def test_tables_are_written_between_markers(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    report.write("new", page)
    assert page.read_text() == f"before\n{report.BEGIN}\n\nnew\n\n{report.END}\nafter\n"
    page.write_text("no markers")
    with pytest.raises(ValueError, match="expected the markers"):
        report.write("new", page)
    assert report.BEGIN in report.PAGE.read_text(encoding="utf-8")


def test_a_seed_draws_the_same_rows_of_every_kind() -> None:
    rows = drawn(7)
    assert rows == drawn(7) != drawn(8) and len(rows) == 10
    assert any(row.lengths for row in rows) and any(row.window for row in rows) and any(row.softcap for row in rows)
    assert all(sum(row.lengths) == row.tokens for row in (*rows, *NAMED) if row.lengths)
    assert {row.head_dim for seed in range(5) for row in drawn(seed)} == {64, 128, 256}
    with pytest.raises(ValueError, match="--only nothing: expected the beginning of one of packed"):
        rows_of(1, ["nothing"])


def test_a_summary_adds_up_kernels_and_gaps() -> None:
    kernels = [Span("ncclAllGather", 0, 10), Span("flash_fwd", 5, 25), Span("vectorized_copy", 30, 34)]
    text = summary(kernels, 20, 2)
    assert "exchange: 5.0 us, 0.5 kernels" in text and "attention: 10.0 us" in text and "copy: 2.0 us" in text
    assert "gaps: 2.5 us" in text and "first to last kernel: 17.0 us" in text and "host, to launch: 10.0 us" in text
