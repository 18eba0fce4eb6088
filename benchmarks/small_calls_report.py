"""Renders benchmarks/results/small-calls-*.json, the raw times of ``benchmarks.small_calls``, as Markdown tables."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"


def stored() -> dict[str, dict[str, Any]]:
    """Reads the results by the stem of their file, GPUs first."""
    files = {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in sorted(RESULTS.glob("small-calls-*"))}
    return dict(sorted(files.items(), key=lambda item: item[1]["device"] == "cpu"))


def section(result: dict[str, Any]) -> str:
    """Returns the heading, the versions and the tables of one device."""
    return f"{measured_on(result)}\n\n{tables(result)}"


def measured_on(result: dict[str, Any]) -> str:
    """Returns the date, the device and the versions of a result as a sentence."""
    environment = result["environment"]
    device = environment["processor"] if result["device"] == "cpu" else result["device"]
    versions = {"Python": environment["python"], **environment["versions"]}
    shown = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    dtype = result["dtype"].removeprefix("torch.")
    return f"Measured on {environment['date']}: {device}, {dtype}, {shown}."


def tables(result: dict[str, Any]) -> str:
    """Returns one table for each set of shapes that have the same cases."""
    by_shape: dict[str, dict[str, dict[str, Any]]] = {}
    for entry in result["calls"]:
        by_shape.setdefault(entry["shape"], {})[entry["case"]] = entry
    groups: dict[tuple[str, ...], list[str]] = {}
    for shape, cases in by_shape.items():
        groups.setdefault(tuple(cases), []).append(shape)
    return "\n\n".join(_table(cases, shapes, by_shape) for cases, shapes in groups.items())


def _table(cases: tuple[str, ...], shapes: list[str], by_shape: dict[str, dict[str, dict[str, Any]]]) -> str:
    lines = [f"| call | beside | {' | '.join(shapes)} |", f"|---|---|{'---|' * len(shapes)}"]
    for case in cases:
        cells = [_cell(by_shape[shape][case]["seconds"]) for shape in shapes]
        lines.append(f"| {case} | {by_shape[shapes[0]][case]['rival']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(seconds: dict[str, list[float]]) -> str:
    ours, rival = (statistics.median(seconds[who]) * 1e6 for who in ("attention", "rival"))
    return f"{ours:.0f} / {rival:.0f}"
