"""Renders what automatic choice costs, from the sweeps in benchmarks/results, as a Markdown table with its goals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import geometric_mean

from attn_core.cli.bench import speeds_beside
from attn_core.cli.bench_sweep import read
from attn_core.selection.cross_validation import Fitting
from attn_core.selection.regret import GOALS, TORCH_ALONE, summary
from attn_core.selection.sweeps import regrets_of_package

RESULTS = Path(__file__).resolve().parent / "results"
HEAD = "| device | installed | direction | calls | geometric mean | 99th percentile | worst | beside the framework |"
LEAST_SPEED = 0.95


def section() -> str:
    """Returns the table. A figure that misses its goal says so."""
    lines = [HEAD, "|---" * 8 + "|"]
    for file in sorted(RESULTS.glob("sweep-*.json"), key=lambda file: ("cpu" in file.stem, file.stem)):
        fitting = Fitting(read(file))
        lines += _rows(fitting, "everything", None)
        if fitting.kind == "cuda":
            lines += _rows(fitting, "torch alone", TORCH_ALONE)
    return "\n".join(lines)


def _rows(fitting: Fitting, installed: str, only: Sequence[str] | None) -> list[str]:
    raw, goals = fitting.raw, GOALS[fitting.kind]
    device = f"{raw['device_name']}, JAX" if raw["framework"] == "jax" else raw["device_name"]
    speeds = speeds_beside(fitting)[0] if only is None else {}
    lines = []
    for direction, facts in summary(regrets_of_package(fitting, only) or fitting.regrets(only)).items():
        shown = []
        for name in ("geometric mean", "99th percentile", "worst"):
            missed = " (missed)" if facts[name] > goals.get(name, math.inf) else ""
            shown.append(f"{facts[name]:.3f}{missed}" if name == "geometric mean" else f"{facts[name]:.2f}{missed}")
        beside = [
            _beside(name, [ratio for ratio, _ in pairs]) for (name, way), pairs in speeds.items() if way == direction
        ]
        lines.append(
            f"| {device} | {installed} | {direction} | {facts['cases']} | {' | '.join(shown)} | {'; '.join(beside)} |"
        )
    return lines


def _beside(name: str, ratios: list[float]) -> str:
    mean = geometric_mean(ratios)
    slower = sum(ratio < LEAST_SPEED for ratio in ratios)
    return f"{mean:.2f} times as fast as {name}; {slower} of {len(ratios)} below {LEAST_SPEED}"
