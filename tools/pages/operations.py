"""The table of operations in docs/reference/expressions.md."""

from __future__ import annotations

from attn_core.expressions.tree import OPERATIONS


def table() -> str:
    """Returns the operations of expressions as a table in Markdown."""
    lines = ["| written | takes | gives |", "|---|---|---|"]
    for each in OPERATIONS.values():
        written = each.pattern.format("a", "b", "c").removeprefix("(")
        written = written.removesuffix(")") if each.pattern.startswith("(") else written
        cell = written.replace("|", "\\|")
        lines.append(f"| `{cell}` | {each.takes} | {each.gives} |")
    return "\n".join(lines)
