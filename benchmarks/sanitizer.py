"""Runs compute-sanitizer over every kernel of this project, on small calls with right and with lying tables.

python -m benchmarks.sanitizer --json benchmarks/results/sanitizer-h200.json    # needs an NVIDIA GPU and CUDA's toolkit

memcheck finds accesses outside of an allocation, initcheck reads of memory that nobody has written, racecheck threads
that use shared memory without waiting for each other. The cases are those of tests/gpu/memcheck_cases.py.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CASES = ROOT / "tests/gpu/memcheck_cases.py"
RESULTS = ROOT / "benchmarks/results"
TOOLS = ("memcheck", "initcheck", "racecheck")


def main(arguments: list[str] | None = None) -> int:
    """Runs the tools side by side. Exit code: 1 if one found an error, or if a case failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seconds", type=float, default=300, help="the limit of each tool")
    parsed = parser.parse_args(arguments)
    import torch

    with ThreadPoolExecutor(len(TOOLS)) as pool:
        outcomes = list(pool.map(lambda tool: run(tool, parsed.seconds), TOOLS))
    result = {
        "device_name": torch.cuda.get_device_name(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "versions": {"torch": torch.__version__, "cuda": torch.version.cuda},
        "tools": outcomes,
    }
    if parsed.json is not None:
        parsed.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(section([result]))
    return 0 if all(outcome["exit"] == 0 for outcome in outcomes) else 1


def run(tool: str, seconds: float) -> dict[str, Any]:
    """Runs one tool and returns its outcome: tool, exit, errors, cases, wrong, reports, and the end of its output."""
    # The tool knows the driver's allocations: without the variable, torch cuts many tensors out of one.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    options = ("--tool", tool, "--error-exitcode", "9")
    if tool == "memcheck":  # CUDA's Python package asks the driver for functions that it may not have
        options += ("--report-api-errors", "no")
    # Upstream's kernels around our functions copy by hardware that the other tools do not follow.
    cases = ("--own", "--functions") if tool == "memcheck" else ("--own",)
    command = ["compute-sanitizer", *options, sys.executable, str(CASES), *cases]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=environment, check=False)
        text, code = done.stdout + done.stderr, done.returncode
    except subprocess.TimeoutExpired as late:
        text = (late.stdout or b"").decode() if isinstance(late.stdout, bytes) else late.stdout or ""
        code = 124
    ran = re.search(r"memcheck cases: (\d+) ran, (\d+) wrong", text)
    found = re.search(r"(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard)", text)
    return {
        **{"tool": tool, "exit": code, "errors": int(next(filter(None, found.groups()))) if found else None},
        **{"cases": int(ran[1]) if ran else None, "wrong": int(ran[2]) if ran else None},
        "reports": [line for line in text.splitlines() if line.startswith("=========")][:60],
        "end": [line for line in text.splitlines() if line.strip()][-12:],
    }


def section(runs: list[dict[str, Any]] | None = None) -> str:
    """Returns a section of docs/explanation/reliability.md; empty if nothing has run."""
    if runs is None:
        runs = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(RESULTS.glob("sanitizer-*.json"))]
    if not runs:
        return ""
    lines = [
        "## Memory on the GPU\n",
        "`python -m benchmarks.sanitizer` runs NVIDIA's compute-sanitizer over every kernel of this project: attention",
        "on pages, appending, merging, offsets of documents, tables of pages, block tables of ranges and of mask",
        "functions, sinks, and forward mode. Half of the calls on pages have tables that lie, and so do the ranges.",
        "memcheck also runs our mask and score functions inside FlashAttention-4's kernels.",
        "No build with AddressSanitizer exists: the only C++ code is the library that",
        "`jax_frontend.compile_operator_lane` compiles, which passes XLA's buffers to torch's operators.\n",
        "| device | date | tool | calls | errors |",
        "|---|---|---|---|---|",
    ]
    for run in runs:
        for outcome in run["tools"]:
            errors = outcome["errors"] if outcome["exit"] in (0, 9) else f"did not finish (exit {outcome['exit']})"
            lines.append(
                f"| {run['device_name']} | {run['date']} | {outcome['tool']} | {outcome['cases']} | {errors} |"
            )
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    sys.exit(main())
