"""``python -m examples.serving`` decodes sixteen prompts together from one pool of pages, and then one at a time."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from attn_core.cli.progress import Stages
from attn_core.paged.report import PoolReport
from examples.serving.engine import Served, serve

QUESTIONS = (
    "What is the capital of France?",
    "Name the three primary colors.",
    "Which animal says meow?",
    "What do bees make?",
    "Write the numbers from one to ten.",
    "Why is the sky blue? Answer in one short sentence, in words that a child of six understands.",
    "Hi!",
    "Which planet is closest to the sun?",
    "Translate into French: good morning.",
    "A farmer has three red hens, four white ducks and one old goat. He sells two of the ducks at the market in the "
    "morning, and buys a dog on his way home. How many birds does he have in the evening?",
    "What is the opposite of hot?",
    "Give me a short name for a black cat.",
    "Who wrote Hamlet?",
    "List the four seasons of the year, beginning with spring.",
    "How many legs does a spider have?",
    "Say yes.",
)
SHORT = 6
"""The number of questions with ``--short``."""
PAGE_SIZE, TOGETHER = 16, 8


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the example; returns 0 if both ways give the same tokens and no page was wasted or lost, otherwise 1."""
    parser = argparse.ArgumentParser(prog="python -m examples.serving", description=__doc__)
    parser.add_argument("--short", action="store_true", help="fewer prompts and fewer tokens")
    options = parser.parse_args(arguments)
    questions, new_tokens = (QUESTIONS[:SHORT], 8) if options.short else (QUESTIONS, 24)
    console = Console()
    console.print("[bold]SmolLM2-135M-Instruct[/], float32, on the CPU: continuous batching from a pool of pages")
    with Stages(console) as stages:
        with stages.stage("importing torch and transformers"):
            from examples.serving.torch_side import TorchForward
            from examples.smollm2 import weights
        with stages.stage("loading the weights (GGUF, dequantised to float32)"):
            loaded = weights.load()
            prompts = [weights.prompt_tokens(loaded.tokenizer, question) for question in questions]
        longest = -(-(max(map(len, prompts)) + new_tokens) // PAGE_SIZE)
        forward = TorchForward(loaded.model, num_pages=longest * TOGETHER, page_size=PAGE_SIZE)
        limits = {"new_tokens": new_tokens, "stop": loaded.tokenizer.eos_token_id}
        with stages.stage(f"up to {TOGETHER} at a time", total=len(prompts)) as advance:
            served = serve(forward, forward.cache, prompts, **limits, together=TOGETHER, on_answer=advance)
        alone = []
        with stages.stage("one at a time", total=len(prompts)) as advance:
            for prompt in prompts:
                alone += serve(forward, forward.cache, [prompt], **limits, together=1, on_answer=advance).answers
    texts = list(zip(questions, loaded.tokenizer.batch_decode(served.answers), strict=True))
    return _show(console, stages.seconds, texts, served, alone, forward.cache.allocator.report())


def _show(
    console: Console,
    seconds: dict[str, float],
    texts: Sequence[tuple[str, str]],
    served: Served,
    alone: list[list[int]],
    left: PoolReport,
) -> int:
    """Prints the answers and the checks; returns 1 if a check failed, otherwise 0."""
    table = Table("question", "answer", show_lines=False)
    for question, text in texts:
        table.add_row(question, text.strip())
    console.print(table)
    waste, holders = served.waste
    checks = {
        "the same tokens as one at a time": served.answers == alone,
        f"waste below one page per sequence ({waste} places of {holders} sequences)": waste < PAGE_SIZE * holders,
        "all pages are free again": left.free == left.num_pages,
    }
    for what, passed in checks.items():
        console.print(f"{'[green]yes[/]' if passed else '[red]no[/]'}  {what}")
    console.print(
        f"{served.steps} calls of the model, up to {served.largest_batch} requests in one; up to {served.shared} pages "
        f"of {left.num_pages} shared; smallest lead of a chosen token {served.lead:.3f} logits"
    )
    together, one = list(seconds.values())[-2:]
    console.print(f"together {together:.1f} s, one at a time {one:.1f} s: {one / together:.1f} times as fast")
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
