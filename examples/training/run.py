"""The example from the text to the results: both frameworks on the same batches, and runs that say what is rounding."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch

from attn_core import Selection
from benchmarks.measure import environment
from examples.smollm2.stages import Stages
from examples.training import data, weights
from examples.training.config import ADAMW, AdamW, GemmaConfig
from examples.training.data import Batch
from examples.training.jax_nn import JAX_NN, OURS, with_attention
from examples.training.jax_side import JaxTrainer
from examples.training.torch_side import TorchTrainer

TORCH, JAX, TWIN, FAULT = "torch", "JAX", "one rounding away", "planted fault"
SWAP_STEPS = 12


@dataclass(frozen=True)
class Options:
    """What a run is: steps of ``length`` tokens in one packed row, documents of at most ``longest``.

    Attributes:
        device: "cpu" or "cuda"; dtype: "float32", or "bfloat16" for matrix products and attention.
        backend: attention's in both frameworks; implementation: jax.nn's, where it takes attention's place.
    """

    steps: int = 200
    length: int = 1024
    longest: int = 512
    seed: int = 0
    device: str = "cpu"
    dtype: str = "float32"
    backend: str | None = None
    implementation: str = "xla"
    optimizer: AdamW = ADAMW

    @property
    def dense(self) -> dict[str, int]:
        """The shape of as many tokens where nothing is packed."""
        return {"rows": max(1, self.length // self.longest), "length": min(self.length, self.longest)}

    @property
    def trainer(self) -> dict[str, Any]:
        """What any trainer needs to know of it, beside attention."""
        return {"steps": self.steps, "optimizer": self.optimizer, "device": self.device, "dtype": self.dtype}


class Trainer(Protocol):
    """What both sides offer."""

    def step(self, batch: Batch) -> float: ...
    def selection(self, batch: Batch, layer: int) -> Selection: ...


def train(trainer: Trainer, batches: Iterable[Batch], on_step: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Takes all steps: the loss before each, and its seconds until that loss is on the host."""
    losses, seconds = [], []
    for batch in batches:
        began = time.perf_counter()
        losses.append(trainer.step(batch))
        seconds.append(time.perf_counter() - began)
        on_step()
    return {"losses": losses, "seconds": seconds}


def compare(config: GemmaConfig, options: Options, stages: Stages, *, controls: bool = False) -> dict[str, Any]:
    """Trains in torch and in JAX; returns plain data for ``json.dump``.

    With controls, three more runs: torch from weights one rounding away, which is how far rounding alone drives two
    runs apart; JAX with a window of one key more, which is what a fault looks like; and the swap with jax.nn.
    """
    with stages.stage("drawing weights and packing the text"):
        text, first = data.python_documentation(), weights.initial(config, options.seed)
        endless = data.packed_batches(text, options.length, options.longest, options.seed)
        batches = list(itertools.islice(endless, options.steps))
    make: dict[str, Any] = {"backend": options.backend, **options.trainer}
    trainers: dict[str, Callable[[], Trainer]] = {
        TORCH: partial(TorchTrainer, config, first, **make),
        JAX: partial(JaxTrainer, config, first, **make),
    }
    if controls:
        trainers[TWIN] = partial(TorchTrainer, config, weights.one_rounding_away(first, options.seed), **make)
        trainers[FAULT] = partial(JaxTrainer, replace(config, window=config.window + 1), first, **make)
    runs, facts = {}, {}
    for name, trainer in trainers.items():
        runs[name], facts[name] = _run(name, trainer, batches, stages)
    return {
        **_described(config, options, text, first),
        "runs": runs,
        "backends": {name: facts[name]["backends"] for name in (TORCH, JAX)},
        "traces": facts[JAX]["traces"],
        "swap": swap(config, first, text, options, stages) if controls else None,
    }


def _run(
    name: str, make: Callable[[], Trainer], batches: Sequence[Batch], stages: Stages
) -> tuple[dict[str, Any], dict[str, Any]]:
    """A run, and what is known of its trainer: each kind of layer's backend, and how often JAX traced the step."""
    with stages.stage(f"training: {name}", total=len(batches)) as advance:
        trainer = make()
        chosen = [trainer.selection(batches[0], layer).backend for layer in (0, 1)]
        run = train(trainer, batches, advance)
    return run, {"backends": chosen, "traces": getattr(trainer, "traces", None)}


def swap(
    config: GemmaConfig, first: weights.Weights, text: data.Text, options: Options, stages: Stages
) -> dict[str, Any]:
    """The Flax model with our attention and with jax.nn's, dense rows and no softcap; step by step in turn."""
    batches = list(itertools.islice(data.dense_batches(text, **options.dense, seed=options.seed), SWAP_STEPS))
    make: dict[str, Any] = {"implementation": options.implementation, **options.trainer}
    with stages.stage("JAX: attention ours and jax.nn in turn", total=SWAP_STEPS) as advance:
        trainers = {name: with_attention(name, config, first, **make) for name in (OURS, JAX_NN)}
        runs: dict[str, dict[str, list[float]]] = {name: {"losses": [], "seconds": []} for name in trainers}
        for batch in batches:
            for name, trainer in trainers.items():
                for key, values in train(trainer, [batch]).items():
                    runs[name][key] += values
            advance()
    return {
        **options.dense,
        "implementation": options.implementation,
        "backends": [trainers[OURS].selection(batches[0], layer).backend for layer in (0, 1)],
        "runs": runs,
    }


def _described(config: GemmaConfig, options: Options, text: data.Text, first: weights.Weights) -> dict[str, Any]:
    on_gpu = options.device != "cpu"
    return {
        "environment": environment(),
        "device": torch.cuda.get_device_name() if on_gpu else "CPU",
        "torch_threads": torch.get_num_threads(),
        "options": asdict(options),
        "model": asdict(config),
        "parameters": sum(array.size for array in first.values()),
        "text": {"paragraphs": len(text.paragraphs), "tokens": text.size, "digest": text.digest},
    }
