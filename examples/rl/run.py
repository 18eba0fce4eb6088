"""Samples, scores the samples, compares, and takes a step of policy gradients, the same for torch and for JAX."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import NamedTuple

import numpy as np

from examples.rl.rows import packed
from examples.rl.sampling import Policy, Sample, advantages, sample


@dataclass(frozen=True)
class Options:
    """What is sampled: ``samples`` answers to each prompt, and how.

    Attributes:
        chunk: tokens of a prompt in a call of the model.
        stop: the token that ends an answer.
        length: of the training step, in the norm of all weights.
    """

    samples: int = 2
    chunk: int = 16
    new_tokens: int = 8
    stop: int | None = None
    seed: int = 0
    length: float = 0.02


class Outcome(NamedTuple):
    """What one framework did with one promise.

    Attributes:
        invariant: of attention; None without a promise.
        tokens: how many were sampled; equal: how many have the same log-probability, to the bit, in training.
        difference: the largest one between two log-probabilities of a token, in nats.
        seconds: of sampling and scoring.
        step: the norm of the gradient and the gain of the objective by a training step; None without a step.
    """

    framework: str
    invariant: str | None
    tokens: int
    equal: int
    difference: float
    seconds: float
    step: tuple[float, float] | None = None


def compare(
    framework: str,
    invariant: str | None,
    policy: Policy,
    prompts: Sequence[list[int]],
    options: Options,
    reward: Callable[[list[int]], float] | None = None,
) -> tuple[Outcome, list[Sample]]:
    """Samples from pages and scores the samples in one packed training forward.

    Args:
        reward: of an answer (token ids); then a step of policy gradients follows. None: no step.
    """
    started = perf_counter()
    how = {name: getattr(options, name) for name in ("samples", "chunk", "new_tokens", "seed", "stop")}
    samples = sample(policy, prompts, **how)
    batch = packed(samples)
    scored, update = policy.score(batch)
    seconds = perf_counter() - started
    drawn = np.concatenate([each.chosen for each in samples])
    equal = int((drawn.view(np.int32) == scored.view(np.int32)).sum())
    difference = float(np.abs(drawn - scored).max())
    step = None
    if reward is not None:
        rewards = np.array([reward(each.answer) for each in samples], np.float32).reshape(-1, options.samples)
        better = np.repeat(advantages(rewards).flatten(), [len(each.answer) for each in samples]).astype(np.float32)
        # The objective is the mean of exp(new - drawn) * advantage. Where bits are equal, the ratio is exactly 1.
        norm = update(-np.exp(scored - drawn) * better / len(better), options.length)
        after, _ = policy.score(batch)
        step = norm, float(((np.exp(after - drawn) - np.exp(scored - drawn)) * better).mean())
    return Outcome(framework, invariant, len(drawn), equal, difference, seconds, step), samples
