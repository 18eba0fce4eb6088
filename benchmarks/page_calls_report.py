"""Renders the raw times of ``benchmarks.page_calls`` as tables."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks.measure import median_ratio, medians
from benchmarks.small_calls_report import RESULTS

JAX_CALLS = 100
"""Calls of JAX in a row, whose time counts as one. The wait for the last must not count, because decoding has none."""
GOALS_TB = {
    "2 drafts": 2.5,
    "4 drafts": 2.5,
    "8 drafts": 2.5,
    "16 drafts": 2.5,
    "one sequence of 65536": 3.0,
    "one kv head": 2.5,
    "uneven lengths": 3.3,
}


def section(path: Path = RESULTS / "page-calls-h200.json") -> str:
    """Returns the date, the device and the tables of a stored result."""
    result = json.loads(path.read_text(encoding="utf-8"))
    environment = result["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items() if version)
    return f"Measured on {environment['date']}: {result['device']}, {versions}.\n\n{report(result)}"


def lines(result: dict[str, Any]) -> list[str]:
    """Returns a row's lines of the report."""
    seconds, texts = medians(result["seconds"]), []
    for name, each in seconds.items():
        # Older files do not say how many calls were made in a row.
        each = each / result.get("in_a_row", 20) if name.startswith("JAX") else each
        read = result.get("read", {}).get(name, result.get("bytes"))
        rate = "" if read is None else f"{read / each / 1e12:.2f}"
        texts.append(f"| {result['call']} | {name} | {1e6 * each:.0f} | {rate} |")
    return texts


def report(result: dict[str, Any]) -> str:
    """Returns the results as Markdown tables."""
    table = ["| call | | µs | TB/s |", "|---|---|---|---|"]
    for row in result["rows"]:
        table += lines(row)
    goals = ["", "| goal | | |", "|---|---|---|"]
    rows = {row["call"]: row for row in result["rows"]}
    for name, goal in GOALS_TB.items():
        if name in rows:
            rate = rows[name]["bytes"] / statistics.median(rows[name]["seconds"]["attention"]) / 1e12
            goals.append(f"| {name} | >= {goal} TB/s | {rate:.2f} |")
    for call, name, beside, goal in (
        ("64 x 8192, pages in", "float8_e4m3fn", "bfloat16", 1.7),
        ("64 x 8192, pages in", "int8", "bfloat16", 1.7),
        ("64 x 8192, pages in", "int4", "bfloat16", 2.4),
        ("append of 64 tokens, 100 in a CUDA graph", "rotated, float8_e4m3fn", "plain", 1 / 1.15),
        ("flash_attn_func, 1 x 64 tokens", "flash_attn_func", "flash-attn 2", 1.0),
        *(
            (f"a cache of {size}", "flash_attn_with_kvcache", other, 1.0)
            for size in ("16 x 6000", "128 x 2048")
            for other in ("flash-attn 2", "FlashAttention-3")
        ),
    ):
        if call in rows and {name, beside} <= set(rows[call]["seconds"]):
            times = median_ratio(rows[call]["seconds"], name, beside)
            goals.append(f"| {call}: {name} beside {beside} | >= {goal:.2f} | {times:.2f} times as fast |")
    return "\n".join(table + goals)
