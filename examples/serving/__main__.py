"""``python -m examples.serving`` answers sixteen chats together from one pool of pages, and some of them alone."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

from rich.console import Console

from attn_core import bytes_per_token, pages_that_fit
from examples.serving.engine import Served, serve
from examples.serving.report import Alone, Run, show
from examples.serving.requests import CHATS, SHORT, prompt_tokens
from examples.serving.stream import Stream
from examples.stages import Stages

PAGE_SIZE, TOGETHER = 16, 8
ALONE = 4
"""The number of chats that are answered alone, too; half of them with ``--short``."""
SECONDS = 60
"""After so many seconds no other chat is answered alone, so that the example ends on a busy machine, too."""
LEAST = {"bfloat16": 4, "float32": 8, "float8_e4m3fn": 2, "int8": 2, "int4": 2}
"""By dtype of the pool, the MiB for the longest chat with its answer."""
QUANTISED = ("float8_e4m3fn", "int8", "int4")
"""Dtypes of pages that have a scale for each token and head."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the example; returns 0 if both ways give the same tokens and no page was wasted or lost, otherwise 1."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.memory < LEAST[options.kv]:
        parser.error(
            f"argument --memory: {options.memory}: expected at least {LEAST[options.kv]} MiB, for the longest chat"
        )
    chats, new_tokens = (CHATS[:SHORT], 8) if options.short else (CHATS, 16)
    # Before torch is imported. Threads that spin while they wait would take the cores from everything else.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    console = Console()
    console.print(f"[bold]SmolLM2-135M-Instruct[/] on the CPU: continuous batching from {options.memory} MiB of pages")
    with Stages(console) as stages:
        with stages.stage("importing torch and transformers"):
            import torch

            from examples.serving.torch_side import TorchForward, sizes_of
            from examples.smollm2 import weights
        with stages.stage("loading the weights (GGUF, dequantised to float32)"):
            loaded = weights.load()
            prompts = [prompt_tokens(loaded.tokenizer, chat) for chat in chats]

        sizes = sizes_of(loaded.model.config)
        pool: dict[str, Any] = {
            "num_pages": pages_that_fit(options.memory * 2**20, page_size=PAGE_SIZE, **sizes, dtype=options.kv),
            "page_size": PAGE_SIZE,
            "dtype": torch.bfloat16 if options.kv in QUANTISED else getattr(torch, options.kv),
            "kv_dtype": options.kv if options.kv in QUANTISED else None,
            "invariant": options.invariant,
        }

        def answer(forward: Any, some: Sequence[list[int]], on_token: Callable[[int, int, bool], None]) -> Served:
            limits = {"new_tokens": new_tokens, "stop": loaded.tokenizer.eos_token_id, "together": TOGETHER}
            return serve(forward, forward.cache, some, **limits, on_token=on_token)

        forward = TorchForward(loaded.model, **pool)
        with stages.stage(f"up to {TOGETHER} at a time", total=len(prompts)) as advance:
            stream = Stream(loaded.tokenizer, stages.show, advance)
            served = answer(forward, prompts, stream.on_token)
        chosen = _to_compare(served, len(prompts), ALONE // 2 if options.short else ALONE)
        alone, left = Alone([], []), SECONDS - sum(stages.seconds.values())
        with stages.stage("one at a time", total=len(chosen)) as advance:
            ends = perf_counter() + left
            for number in chosen:  # each from an empty pool
                if alone.numbers and perf_counter() > ends:
                    break
                by_itself = TorchForward(loaded.model, **pool)
                alone.runs.append(answer(by_itself, [prompts[number]], lambda number, token, last: None))
                alone.numbers.append(number)
                advance()
    together, one = list(stages.seconds.values())[-2:]
    questions = [chat.question for chat in chats]
    run = Run(
        questions,
        stream.texts,
        served,
        together,
        options.kv,
        bytes_per_token(**sizes, dtype=options.kv),
        forward.cache.allocator,
    )
    return show(console, run, alone, one)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m examples.serving", description=__doc__)
    parser.add_argument("--short", action="store_true", help="fewer chats and fewer tokens")
    parser.add_argument(
        "--kv",
        type=lambda name: "float8_e4m3fn" if name == "fp8" else name,
        choices=tuple(LEAST),
        default="bfloat16",
        help="the dtype of keys and values; fp8 is short for float8_e4m3fn (default: %(default)s)",
    )
    parser.add_argument(
        "--memory", type=int, default=9, metavar="MIB", help="the size of the pool in MiB (default: %(default)s)"
    )
    parser.add_argument(
        "--invariant",
        choices=("batch", "prefix"),
        help="the same bits of attention in every batch; with prefix also in every chunk of a prompt",
    )
    return parser


def _to_compare(served: Served, chats: int, count: int) -> list[int]:
    """Returns the numbers of chats to answer alone: first those that lost their pages for a while."""
    return list(dict.fromkeys([*served.swapped, *served.dropped, *range(chats)]))[:count]


if __name__ == "__main__":
    sys.exit(main())
