"""Runs the example: both frameworks on the same batches, and control runs that show the effect of rounding."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch

from benchmarks.measure import environment
from examples.stages import Stages
from examples.training import data, weights
from examples.training.config import GemmaConfig, Options
from examples.training.data import Batch
from examples.training.jax_nn import JAX_NN, OURS, with_attention
from examples.training.jax_side import JaxTrainer
from examples.training.steps import Trainer, train
from examples.training.torch_side import TorchTrainer

TORCH, JAX, TWIN, FAULT = "torch", "JAX", "one rounding away", "planted fault"
SWAP_STEPS = 12


def compare(config: GemmaConfig, options: Options, stages: Stages, *, controls: bool = False) -> dict[str, Any]:
    """Trains in torch and in JAX; returns plain data for ``json.dump``.

    With controls, there are three more runs: torch from weights one rounding away, which shows how much rounding alone
    separates two runs; JAX with one more key in the window, which shows the effect of a fault; and the comparison with
    jax.nn.
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
    """Returns a run, the backend of each kind of layer, and how often JAX traced the step."""
    with stages.stage(f"training: {name}", total=len(batches)) as advance:
        trainer = make()
        chosen = [trainer.selection(batches[0], layer).backend for layer in (0, 1)]
        run = train(trainer, batches, advance)
    return run, {"backends": chosen, "traces": getattr(trainer, "traces", None)}


def swap(
    config: GemmaConfig, first: weights.Weights, text: data.Text, options: Options, stages: Stages
) -> dict[str, Any]:
    """Trains the Flax model with our attention and with jax.nn's in turns, with dense rows and without softcap."""
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
