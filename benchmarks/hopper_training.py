"""Compares training steps of the example's Flax model with our attention and with jax.nn's.

jax.nn has neither softcap nor packed documents. In all variants, each row is one document and scores are not capped.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

from benchmarks.hopper_group import Group, Turn
from examples.training import data, weights
from examples.training.config import GemmaConfig
from examples.training.jax_nn import JAX_NN, OURS, with_attention

STEPS = 8
WIDE = GemmaConfig(
    hidden_size=1024,
    mlp_size=4096,
    num_layers=4,
    num_heads=16,
    num_kv_heads=4,
    head_dim=64,
    window=512,
    max_positions=4096,
)


@dataclass(frozen=True)
class Model:
    """A model and the rows of a step: tokens ``[rows, length]``."""

    title: str
    config: GemmaConfig
    rows: int
    length: int

    def __str__(self) -> str:
        heads = f"{self.config.num_heads}/{self.config.num_kv_heads}"
        return (
            f"{self.config.num_layers} layers, hidden {self.config.hidden_size}, heads {heads}, head_dim "
            f"{self.config.head_dim}, window {self.config.window} in every other layer, {self.rows} rows of "
            f"{self.length} tokens, bfloat16"
        )


MODELS = (Model("The training example", GemmaConfig(), 2, 512), Model("The same, wider", WIDE, 4, 4096))


def training_steps() -> list[Group]:
    """Times whole steps (forward, backward and optimizer) until the loss is on the host."""
    return [_steps(model) for model in MODELS]


def _steps(model: Model) -> Group:
    note = f"{model}; {STEPS} steps a turn, each until its loss is on the host; seconds per step"
    group = Group(model.title, note)
    text, first = data.python_documentation(), weights.initial(model.config, 0)
    batches = list(islice(data.dense_batches(text, model.rows, model.length, seed=0), STEPS))

    def candidate(name: str, **named: Any) -> Callable[[], Turn]:
        def make() -> Turn:
            trainer = with_attention(name, model.config, first, steps=1000, device="cuda", dtype="bfloat16", **named)
            return _turn(trainer, batches)

        return make

    makers = {
        "attention": candidate(OURS),
        "attention flash4": candidate(OURS, backend="flash4"),
        "jax.nn cudnn": candidate(JAX_NN, implementation="cudnn"),
    }
    group.measure(makers, calls=STEPS, rounds=15)
    group.speed("automatic choice beside jax.nn cudnn", "attention", "jax.nn cudnn", 1.0)
    group.speed("backend='flash4' beside jax.nn cudnn", "attention flash4", "jax.nn cudnn")
    return group


def _turn(trainer: Any, batches: list[data.Batch]) -> Turn:
    endless = cycle(batches)

    def turn(steps: int) -> float:
        trainer.step(next(endless))
        began = time.perf_counter()
        for batch in islice(endless, steps):
            trainer.step(batch)
        seconds = (time.perf_counter() - began) / steps
        if trainer.traces != 1:
            raise RuntimeError(f"the step was traced {trainer.traces} times")
        return seconds

    return turn
