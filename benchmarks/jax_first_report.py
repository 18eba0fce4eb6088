"""Renders the raw times of ``benchmarks.jax_first`` as tables."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks.measure import median_ratio
from benchmarks.small_calls_report import RESULTS
from benchmarks.stored_rows import dates

LAYER_CALLS = 10
"""Training steps of the layer in a row of a turn."""
LAYER_TOKENS = 2 * 4096
OURS = "attention"


def section(path: Path = RESULTS / "jax-first-h200.json") -> str:
    """Returns the date, the device and the tables of a stored result."""
    result = json.loads(path.read_text(encoding="utf-8"))
    environment = result["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items() if version)
    return f"Measured on {dates(result)}: {result['device']}, {versions}.\n\n{table(result)}"


def table(result: dict[str, Any]) -> str:
    """Returns a result as Markdown tables: calls in both frameworks, and the layer."""
    lines = ["| call | | torch, ms | JAX, ms | JAX beside torch | reached by |", "|---|---|---|---|---|---|"]
    for row in result["calls"]:
        seconds = row["seconds"]
        times = " | ".join(f"{1e3 * statistics.median(seconds[name]):.3f}" for name in ("torch", "jax"))
        ratio = median_ratio(seconds, "jax", "torch")
        lines.append(f"| {row['call']} | {row['what']} | {times} | {ratio:.2f} | {row['lane']} |")
    launched = sum(row["lane"] != "callback" for row in result["calls"])
    lines += ["", f"{launched} of {len(result['calls'])} calls use no callback into Python.", ""]
    lines += anchor_lines(result["calls"])
    if "layer" not in result:  # the run was stopped before
        return "\n".join(lines)
    lines += ["| a layer's training step with | tokens per second | attention is |", "|---|---|---|"]
    for name, seconds in result["layer"].items():
        speed = LAYER_TOKENS / statistics.median(seconds)
        times = median_ratio(result["layer"], OURS, name)
        lines.append(f"| {name} | {speed:,.0f} | {'' if name == OURS else f'{times:.2f} times as fast'} |")
    return "\n".join(lines)


def anchor_lines(calls: list[dict[str, Any]]) -> list[str]:
    """Returns a table of other packages' times beside ours in JAX, and the calls that they do not take."""
    rows = [row for row in calls if "left_out" in row]
    names = list(dict.fromkeys(name for row in rows for name in row["seconds"] if name not in ("torch", "jax")))
    lines = ["| call | | ours, ms |" + "".join(f" {name}, ms |" for name in names)]
    lines.append("|---|---|---|" + "---|" * len(names))
    for row in rows:
        cells = [f"{1e3 * statistics.median(row['seconds']['jax']):.3f}"]
        for name in names:
            if name not in row["seconds"]:
                cells.append("")
                continue
            ratio = median_ratio(row["seconds"], "jax", name)
            cells.append(f"{1e3 * statistics.median(row['seconds'][name]):.3f} (ours {ratio:.2f} times as fast)")
        lines.append(f"| {row['call']} | {row['what']} | {' | '.join(cells)} |")
    reasons: dict[str, list[str]] = {}
    for row in rows:
        for name, reason in row["left_out"].items():
            reasons.setdefault(f"{name}: {reason.splitlines()[0]}", []).append(f"{row['call']} ({row['what']})")
    return [
        *(lines if names else []),
        "",
        *(f"- {reason}: {'; '.join(where)}" for reason, where in reasons.items()),
        "",
    ]
