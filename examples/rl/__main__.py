"""``python -m examples.rl`` samples from pages, and scores the samples in packed training, in torch and in JAX."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape

from attn_core import NoBackendError
from examples.rl.report import show
from examples.rl.run import Options, Outcome, compare
from examples.rl.sampling import pages_for
from examples.serving.requests import Chat, prompt_tokens
from examples.stages import Stages

PROMISES = (None, "batch", "prefix")
"""Without a promise the model computes all rows of a call together; with one its other layers run in blocks of rows."""
CHATS = (Chat("Name a color.", "Be brief."), Chat("Which animal says meow?", "Be brief."))
PAGE_SIZE = 8


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the example; returns 0 if "prefix" has no differing bit and training steps help, otherwise 1."""
    flags = _parser().parse_args(arguments)
    # Before torch is imported. Threads that spin while they wait would take the cores from everything else.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    console, outcomes = Console(), list[Outcome]()
    console.print("[bold]SmolLM2-135M-Instruct[/], float32: samples from pages, scored in packed training")
    with Stages(console) as stages:
        with stages.stage("importing torch, JAX and transformers"):
            from examples.smollm2 import weights
        with stages.stage("loading the weights (GGUF, dequantised to float32)"):
            loaded = weights.load()
            prompts = [prompt_tokens(loaded.tokenizer, chat) for chat in CHATS]
        options = Options(stop=loaded.tokenizer.eos_token_id, new_tokens=flags.new_tokens, chunk=flags.chunk)
        pages = pages_for(prompts, options.samples, options.new_tokens, PAGE_SIZE)
        pool: dict[str, Any] = {"num_pages": pages, "page_size": PAGE_SIZE, "backend": flags.backend}

        def reward(answer: list[int]) -> float:
            """Short words: the fewest letters for as many tokens."""
            return -len(loaded.tokenizer.decode(answer, skip_special_tokens=True)) / len(answer)

        try:
            for framework, make in _policies(flags, loaded.model, stages):
                for invariant in PROMISES:
                    with stages.stage(f"{framework}: sampling and scoring, invariant={invariant}"):
                        policy = make(invariant=invariant, **pool)
                        step = reward if invariant == "prefix" else None
                        outcome, samples = compare(framework, invariant, policy, prompts, options, step)
                        outcomes.append(outcome)
                for one in samples:
                    text = loaded.tokenizer.decode(one.answer, skip_special_tokens=True)
                    stages.show(f"[cyan]{framework}[/] {escape(repr(text))}")
        except NoBackendError as error:  # no kernel of this device keeps a promise
            console.print(f"[bold red]FAILED[/] {escape(str(error))}", highlight=False)
            return 1
    return show(console, outcomes)


def _policies(flags: argparse.Namespace, model: Any, stages: Stages) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yields each framework with what makes its policy. JAX comes first, because torch trains its weights in place."""
    if flags.framework != "torch":
        with stages.stage("JAX: converting the weights"):
            from examples.rl.jax_side import JaxPolicy, parts_of
            from examples.smollm2.jax_side import convert

            parts = parts_of(convert(model))
        yield "JAX", lambda **keywords: JaxPolicy(parts, **keywords)
    if flags.framework != "jax":
        from examples.rl.torch_side import TorchPolicy

        yield "torch", lambda **keywords: TorchPolicy(model, device=flags.device, **keywords)


def _positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, got {value}")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m examples.rl", description=__doc__)
    parser.add_argument("--framework", choices=("torch", "jax"), help="only this one (default: both)")
    parser.add_argument("--new-tokens", type=_positive, default=8, metavar="N", help="of an answer (%(default)s)")
    parser.add_argument("--chunk", type=_positive, default=16, metavar="N", help="of a prompt (%(default)s tokens)")
    parser.add_argument("--backend", metavar="NAME", help="of attention; default: automatic choice by the promise")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="torch's; JAX uses its own default")
    return parser


if __name__ == "__main__":
    sys.exit(main())
