"""Tests the benchmark of rows over ranks: a trial run over gloo and two JAX devices, and its tables."""

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

from benchmarks import context, tables
from benchmarks.context import NAMED, drawn, rows_of


@pytest.mark.slow
def test_a_trial_measures_every_way_in_both_frameworks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.json"
    code = context.main(["--device", "cpu", "--only", "packed", "--seconds", "180", "--json", str(path), "--seed", "3"])
    printed = capsys.readouterr().out
    assert code == 0
    result = json.loads(path.read_text())
    assert [row["name"] for row in result["rows"]] == ["packed"] and result["seed"] == 3
    ways = {", ".join(way) for way in NAMED[0].ways}
    for row in result["rows"]:
        for direction in tables.DIRECTIONS:
            entry = row["torch"][direction]
            assert len(entry["seconds"][tables.ONE]) == len(entry["seconds"][tables.CHOSEN]) >= 3
            ran = {entry["chosen"] if name == tables.CHOSEN else name for name in entry["others"]}
            assert ran | set(entry["refused"]) == ways, entry
            assert all(time > 0 for time in row["jax"][direction]["seconds"]), row["jax"]
            assert row["jax"][direction]["way"] == entry["chosen"]
    assert "packed: 92 tokens" in printed and "seed 3" in printed
    assert tables.context(result) in printed


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
    assert context._run(launched, "cpu", 15.0) == 124
    for number in ("0", "1"):
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / number).read_text()), 0)


def entry_of(one: list[float], chosen: list[float], others: dict[str, list[float]]) -> dict[str, Any]:
    """A direction of a row, as the benchmark writes it."""
    estimates = {"ring, zigzag": 0.011, "ring, contiguous": 0.012}
    seconds = {tables.ONE: one, tables.CHOSEN: chosen}
    memory = {tables.ONE: 2**21, tables.CHOSEN: 2**20}
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
    text = tables.context(run)
    assert "| packed: few | forward | 1.00 | ≥ 0.85 | ring, zigzag | 10 ms | 1.0% |" in text
    assert "| packed: few | training | 0.75 (missed) |" in text and "25.0% (missed)" in text and "2.00 (missed)" in text
    assert "1 MiB | 2 MiB" in text and "| odd: none | forward | not measured: out of time |" in text
    assert "- ring, documents: SpecError: x (packed)" in text
    columns = {
        line.count("|")
        for line in text.split("\n")
        if line.startswith(("| packed: ", "| odd: ", "| row | direction | E"))
    }
    assert len(columns) == 1


def test_a_seed_draws_the_same_rows_of_every_kind() -> None:
    rows = drawn(7)
    assert rows == drawn(7) != drawn(8) and len(rows) == 10
    assert any(row.lengths for row in rows) and any(row.window for row in rows) and any(row.softcap for row in rows)
    assert all(sum(row.lengths) == row.tokens for row in (*rows, *NAMED) if row.lengths)
    assert {row.head_dim for seed in range(5) for row in drawn(seed)} == {64, 128, 256}
    with pytest.raises(ValueError, match="--only nothing: expected the beginning of one of packed"):
        rows_of(1, ["nothing"])
