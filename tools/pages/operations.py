"""The table of operations in docs/reference/expressions.md."""

from __future__ import annotations

from attn_core.expressions.tree import OPERATIONS


def table() -> str:
    """Returns the operations of expressions as a table in Markdown; those of equal operands and results share a row."""
    rows: dict[tuple[str, str], list[str]] = {}
    for each in OPERATIONS.values():
        written = each.pattern.format("a", "b", "c").removeprefix("(")
        written = written.removesuffix(")") if each.pattern.startswith("(") else written
        cell = written.replace("|", "\\|")
        rows.setdefault((each.takes, each.gives), []).append(f"`{cell}`")
    lines = [f"| {', '.join(cells)} | {takes} | {gives} |" for (takes, gives), cells in rows.items()]
    return "\n".join(["| written | takes | gives |", "|---|---|---|", *lines])
