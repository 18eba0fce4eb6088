"""Renders benchmarks/results/grpo-*.json, the raw times of ``benchmarks.grpo_step``, for the performance page."""

from __future__ import annotations

import json
import statistics
from typing import Any

from benchmarks.small_calls_report import RESULTS

PROMPT, COMPLETIONS, LENGTH = 2048, 8, 512
FORMS = ("shared", "copied")


def section() -> str:
    """Returns the text of every stored measurement."""
    files = sorted(RESULTS.glob("grpo-*.json"))
    return "\n\n".join(text(json.loads(file.read_text(encoding="utf-8"))) for file in files)


def text(result: dict[str, Any]) -> str:
    """Returns a result as a paragraph and a table."""
    shared, copied = (result["forms"][form] for form in FORMS)
    lines = ["| rows | tokens | seconds of a step | peak memory, GiB |", "|---|---|---|---|"]
    for name, form in (("the prompt once", shared), ("a copy for every completion", copied)):
        median = statistics.median(form["seconds"])
        lines.append(f"| {name} | {form['tokens']} | {median:.3g} | {form['peak_bytes'] / 2**30:.2f} |")
    times, memory = (
        statistics.median(copied["seconds"]) / statistics.median(shared["seconds"]),
        copied["peak_bytes"] / shared["peak_bytes"],
    )
    apart = abs(shared["gradient_norm"] / copied["gradient_norm"] - 1)
    where = f"{result['dtype']}, {result['device']}, {result['environment']['date']}"
    said = (
        f"A step on {COMPLETIONS} completions of {LENGTH} tokens on one prompt of {PROMPT}, with the model of the "
        f"training example ({where}): {times:.1f} times as fast with the prompt once, and {memory:.1f} times less "
        f"memory. The norms of the gradients differ by {apart:.0e} of their size."
    )
    return "\n".join([said, "", *lines])
