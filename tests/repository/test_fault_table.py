"""Tests that each row of tests/faults/table.jsonl is complete, and names tests that exist."""

from __future__ import annotations

import ast
import json
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROWS = [json.loads(line) for line in (ROOT / "tests/faults/table.jsonl").read_text(encoding="utf-8").splitlines()]
GROUPS = ("input", "kernels", "memory and files", "processes", "ranks", "bridge", "hosts", "load")


@cache
def _tests_of(file: str) -> frozenset[str]:
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef))


def test_rows_are_complete_and_name_tests_that_exist() -> None:
    for row in ROWS:
        assert set(row) == {"group", "fault", "behaviour", "tests"}, row
        assert row["group"] in GROUPS, row
        assert isinstance(row["tests"], list) and row["tests"], row
        for test in row["tests"]:
            file, _, name = test.partition("::")
            assert (ROOT / file).is_file(), test
            assert name.startswith("test_") and name in _tests_of(file), test


def test_no_fault_stands_twice() -> None:
    names = [row["fault"] for row in ROWS]
    assert len(set(names)) == len(names)
