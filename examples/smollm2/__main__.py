"""``python -m examples.smollm2``: one language model, two frameworks, the same attention kernels."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from examples.stages import Stages

QUESTIONS = (
    "What is the capital of France?",
    "Name the three primary colors.",
    "Which animal says meow?",
    "What do bees make?",
)
SHORT = 3
"""The number of questions with ``--short``."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the demo; returns 0 if torch and JAX agree and the first answer is right, otherwise 1."""
    options = _parser().parse_args(arguments)
    questions = QUESTIONS[:SHORT] if options.short else QUESTIONS
    new_tokens = options.max_new_tokens or (12 if options.short else 40)
    console = Console()
    console.print("[bold]SmolLM2-135M-Instruct[/], float32, on the CPU: torch and JAX on one attention kernel")
    with Stages(console) as stages:
        with stages.stage("importing torch, JAX and transformers"):
            from examples.smollm2.report import show
            from examples.smollm2.run import run
        report = run(questions, new_tokens, stages)
    show(report, console)
    if options.json:
        options.json.write_text(json.dumps(report.as_json(), indent=2) + "\n")
    return 1 if report.failures() else 0


def _positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, got {value}")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m examples.smollm2", description=__doc__)
    parser.add_argument("--short", action="store_true", help="fewer prompts and fewer tokens")
    parser.add_argument("--max-new-tokens", type=_positive, metavar="N", help="longest answer (40; 12 with --short)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the report to this file")
    return parser


if __name__ == "__main__":
    sys.exit(main())
