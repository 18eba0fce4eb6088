"""Renders the raw times of ``benchmarks.forward_mode`` as a table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.measure import median_ratio, medians
from benchmarks.small_calls_report import RESULTS
from benchmarks.stored_rows import dates

RESULT = RESULTS / "forward-mode-h200.json"
COLUMNS = ("kernel", "torch.func.jvp", "jax.jvp", "math", "plain torch", "jax_xla", "jax.nn")


def section(path: Path = RESULT) -> str:
    """Returns the date, the device and the table of a stored result."""
    result = json.loads(path.read_text(encoding="utf-8"))
    environment = result["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items() if version)
    return f"Measured on {dates(result)}: {result['device']}, {versions}.\n\n{table(result['calls'])}"


def table(calls: list[dict[str, Any]]) -> str:
    """Returns a row for each call: the kernel's rate, its share of two forwards' rates, and the candidates' times."""
    lines = [
        f"| call | TFLOP/s | rate beside its forward | beside FlexAttention's | MiB | {' | '.join(COLUMNS)} |",
        f"|---|---|---|---|---|{'---|' * len(COLUMNS)}",
    ]
    for call in calls:
        times = medians(call["seconds"])
        rate = call["operations"]["kernel"] / times["kernel"] / 1e12
        shares = [_share(call, other) for other in ("forward", "FlexAttention")]
        cells = [f"{1e3 * times[name]:.2f} ms" if name in times else "" for name in COLUMNS]
        memory = f"{call['bytes']['kernel'] / 2**20:.0f}"
        lines.append(f"| {call['call']} | {rate:.0f} | {' | '.join([*shares, memory, *cells])} |")
    return "\n".join(lines)


def _share(call: dict[str, Any], other: str) -> str:
    """Returns the kernel's rate divided by another candidate's, or nothing if the other did not run."""
    if other not in call["seconds"]:
        return ""
    operations = call["operations"]["kernel"] / call["operations"][other]
    return f"{median_ratio(call['seconds'], 'kernel', other) * operations:.2f}"
