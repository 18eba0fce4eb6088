"""Renders benchmarks/results/real-calls-*.json, the raw times of ``benchmarks.real_calls``, as Markdown tables."""

from __future__ import annotations

import json
from typing import Any

from benchmarks.measure import median_ratio, medians
from benchmarks.small_calls_report import RESULTS, measured_on

GOAL = 0.97
"""The least speed of attention() as a multiple of F.sdpa's."""


def section() -> str:
    """Returns one table for each device, with a line that counts the calls below the goal."""
    files = sorted(RESULTS.glob("real-calls-*.json"), reverse=True)
    return "\n\n".join(_section(json.loads(file.read_text(encoding="utf-8"))) for file in files)


def _section(result: dict[str, Any]) -> str:
    lines = ["| call | direction | kernel | attention() | F.sdpa | times as fast |", "|---|---|---|---|---|---|"]
    below = 0
    for entry in result["calls"]:
        ours, torchs = (medians(entry["seconds"])[name] * 1e6 for name in ("attention", "F.sdpa"))
        speed = median_ratio(entry["seconds"], "attention", "F.sdpa")
        below += speed < GOAL
        shown = f"{speed:.2f}" + (" (missed)" if speed < GOAL else "")
        cells = (
            entry["call"],
            entry["direction"],
            f"`{entry['backend']}`",
            f"{ours:.0f} µs",
            f"{torchs:.0f} µs",
            shown,
        )
        lines.append(f"| {' | '.join(cells)} |")
    count = f"{below} of {len(result['calls'])} are below the goal, {GOAL} times as fast."
    return f"{measured_on(result)}\n\n" + "\n".join(lines) + f"\n\n{count}"
