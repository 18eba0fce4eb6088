"""Renders the raw times of ``benchmarks.jax_first`` as tables."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.measure import median_ratio

CALLS = 40
"""Calls of attention in a row of a turn."""
LAYER_CALLS = 10
"""Training steps of the layer in a row of a turn."""
LAYER_TOKENS = 2 * 4096
OURS = "attention"


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
    lines += ["| a layer's training step with | tokens per second | attention is |", "|---|---|---|"]
    for name, seconds in result["layer"].items():
        speed = LAYER_TOKENS / statistics.median(seconds)
        times = median_ratio(result["layer"], OURS, name)
        lines.append(f"| {name} | {speed:,.0f} | {'' if name == OURS else f'{times:.2f} times as fast'} |")
    return "\n".join(lines)
