"""The section "Faults" of docs/explanation/reliability.md, from tests/faults/table.jsonl."""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "tests/faults/table.jsonl"

HEAD = """## Faults

What a caller sees if something goes wrong. Each row names the tests that cause the fault.
"""


def section() -> str:
    """Returns the section as Markdown: a table for each group of faults, in the order of the file."""
    groups: dict[str, list[dict[str, object]]] = {}
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        groups.setdefault(row["group"], []).append(row)
    return "\n".join([HEAD, *(_table(group, rows) for group, rows in groups.items())])


def _table(group: str, rows: list[dict[str, object]]) -> str:
    lines = [f"### {group.capitalize()}\n", "| fault | what happens | tests |", "|---|---|---|"]
    for row in rows:
        tests = row["tests"]
        assert isinstance(tests, list)
        names = "<br>".join(f"`{test}`" for test in tests)
        fault, behaviour = (str(row[name]).replace("|", "\\|") for name in ("fault", "behaviour"))
        lines.append(f"| {fault} | {behaviour} | {names} |")
    return "\n".join([*lines, ""])
