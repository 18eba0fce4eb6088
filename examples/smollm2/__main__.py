"""``python -m examples.smollm2``: one language model, two frameworks, the same attention kernels."""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

QUESTIONS = (
    "What is the capital of France?",
    "Name the three primary colors.",
    "Which animal says meow?",
    "What do bees make?",
)
SHORT = 3
"""How many of the questions ``--short`` asks."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the demo; returns 0 when torch and JAX agree and the first answer is right, else 1."""
    options = _parser().parse_args(arguments)
    questions = QUESTIONS[:SHORT] if options.short else QUESTIONS
    new_tokens = options.max_new_tokens or (12 if options.short else 40)
    console = Console()
    console.print("[bold]SmolLM2-135M-Instruct[/], float32, on the CPU: torch and JAX on the same attention kernels")
    with Stages(console) as stages:
        report = run(list(questions), new_tokens, stages)

    from examples.smollm2.report import show

    show(report, console)
    if options.json:
        options.json.write_text(json.dumps(report.as_json(), indent=2) + "\n")
    return 1 if report.failures() else 0


class Stages:
    """Shows what runs now, and keeps how long each stage took (``seconds``)."""

    def __init__(self, console: Console) -> None:
        what = (SpinnerColumn(), TextColumn("{task.description}"))
        self._progress = Progress(*what, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console)
        self.seconds: dict[str, float] = {}

    def __enter__(self) -> Stages:
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    @contextmanager
    def stage(self, name: str, total: int = 1) -> Iterator[Any]:
        """Yields a function that moves the bar by one."""
        task = self._progress.add_task(name, total=total)
        started = time.perf_counter()
        yield lambda: self._progress.advance(task)
        self.seconds[name] = time.perf_counter() - started
        self._progress.update(task, completed=total)


def run(questions: list[str], new_tokens: int, stages: Stages) -> Any:
    """Loads, answers in both frameworks, compares; returns the Report."""
    with stages.stage("importing torch, JAX and transformers"):
        from examples.smollm2 import decoding, jax_side, layers, packing, torch_side, weights
        from examples.smollm2.report import Report

    with stages.stage("loading the weights (GGUF, dequantised to float32)"):
        loaded = weights.load()
        prompts = [weights.prompt_tokens(loaded.tokenizer, question) for question in questions]
        stop = loaded.tokenizer.eos_token_id
        capacity = decoding.capacity_for(prompts, new_tokens)
    with stages.stage("torch: answering", total=new_tokens) as advance:
        in_torch = torch_side.TorchForward(loaded.model, capacity, capture_steps=2)
        ours = decoding.greedy(in_torch, prompts, new_tokens, stop, advance)
    with stages.stage("JAX: converting the weights"):
        twin = jax_side.convert(loaded.model)
        in_jax = jax_side.JaxForward(twin, capacity)
    with stages.stage("JAX: compiling prefill and decoding", total=2) as advance:
        nothing, one_each = [0] * len(prompts), [[0] for _ in prompts]
        for step in (packing.pack(nothing, prompts, capacity), packing.pack(nothing, one_each, capacity)):
            in_jax.compile(step)
            advance()
    with stages.stage("JAX: answering", total=new_tokens) as advance:
        theirs = decoding.greedy(in_jax, prompts, new_tokens, stop, advance)
    with stages.stage("JAX: reading the finished row again, without a cache"):
        changed = decoding.reread_difference(lambda rows: jax_side.reread(twin, rows), prompts, theirs.tokens)
    with stages.stage("comparing every layer's attention", total=len(in_torch.captured)) as advance:
        checks = layers.compare(in_torch.captured, advance)

    chosen = layers.selections(in_torch.captured[0])
    return Report(
        weights=loaded.path.name,
        versions=weights.versions(),
        questions=questions,
        torch_texts=loaded.tokenizer.batch_decode(ours.tokens),
        jax_texts=loaded.tokenizer.batch_decode(theirs.tokens),
        same_tokens=ours.tokens == theirs.tokens,
        reread_tokens_differ=changed,
        logit_difference=float(np.abs(ours.prefill_logits - theirs.prefill_logits).max()),
        largest_logit=float(np.abs(ours.prefill_logits).max()),
        smallest_lead=min(ours.lead, theirs.lead),
        layers=checks,
        selections={"torch": str(chosen[0]), "JAX": str(chosen[1])},
        seconds={**stages.seconds, **_step_times("torch", ours), **_step_times("JAX", theirs)},
        memory_gib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    )


def _step_times(framework: str, generation: Any) -> dict[str, float]:
    times = {f"{framework}: prefill, all prompts": generation.prefill_seconds}
    if generation.decode_seconds:
        times[f"{framework}: decoding step, all prompts (median)"] = statistics.median(generation.decode_seconds)
    return times


def _positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, got {value}")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m examples.smollm2", description=__doc__)
    parser.add_argument("--short", action="store_true", help="fewer prompts and fewer tokens")
    parser.add_argument("--max-new-tokens", type=_positive, metavar="N", help="longest answer (40; 12 with --short)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the report there")
    return parser


if __name__ == "__main__":
    sys.exit(main())
