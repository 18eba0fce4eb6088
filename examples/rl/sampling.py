"""Samples answers from pages, the same loop for torch and for JAX: prompts in chunks, then token by token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np


class Policy(Protocol):
    """A language model of either framework, with its keys and values in the pages of ``cache``."""

    cache: Any

    def __call__(self, tokens: np.ndarray, places: np.ndarray, step: Any) -> np.ndarray:
        """(ids ``[tokens]``, positions ``[tokens]``, step) -> float32 log-probabilities ``[tokens, vocabulary]``."""
        ...

    def score(self, batch: Any) -> tuple[np.ndarray, Callable[[np.ndarray, float], float]]:
        """Runs the training forward on a ``rows.Batch``, all documents in one packed row.

        Returns:
            log-probabilities: float32 ``[sampled]``.
            update: ``update(gradient, length)`` moves the weights by ``length`` against the gradient of a loss, which
                the caller knows with respect to the log-probabilities, ``[sampled]``. It returns the gradient's norm.
        """
        ...


@dataclass
class Sample:
    """An answer to a prompt: token ids, and each one's log-probability when it was drawn, float32."""

    prompt: list[int]
    answer: list[int] = field(default_factory=list)
    chosen: list[np.float32] = field(default_factory=list)


def pages_for(prompts: Sequence[Sequence[int]], samples: int, new_tokens: int, page_size: int) -> int:
    """Returns the pages that ``sample`` needs at most."""
    return sum(-(-(len(prompt) + new_tokens) // page_size) + 1 for prompt in prompts) * (samples + 1)


def sample(
    policy: Policy,
    prompts: Sequence[list[int]],
    *,
    samples: int,
    chunk: int,
    new_tokens: int,
    seed: int,
    stop: int | None = None,
) -> list[Sample]:
    """Draws ``samples`` answers of up to ``new_tokens`` tokens to each prompt. They share the pages of their prompt.

    Args:
        chunk: tokens of a prompt in a call of the model.
        seed: of the draws.
        stop: the token that ends an answer, as its last one. What is drawn after it is dropped, because all steps have
            one shape.

    Returns:
        the samples, those of a prompt side by side. All pages are free again.
    """
    cache, drawn = policy.cache, [Sample(list(prompt)) for prompt in prompts for _ in range(samples)]
    width = -(-(max(map(len, prompts)) + new_tokens) // cache.allocator.page_size)
    draw = np.random.default_rng(seed)

    def run(names: list[Any], tokens: list[list[int]]) -> np.ndarray:
        """Appends tokens to sequences; returns the log-probabilities after the last token of each."""
        counts = [len(each) for each in tokens]
        starts = [cache.allocator.length(name) for name in names]
        places = [start + np.arange(count) for start, count in zip(starts, counts, strict=True)]
        step = cache.step(names, counts, width=width)
        return policy(np.concatenate(tokens), np.concatenate(places), step)[np.cumsum(counts) - 1]

    after = _prompts_in_chunks(cache, prompts, chunk, run)
    for number in range(len(drawn)):
        cache.fork(("prompt", number // samples), number)
    newest = np.repeat(after, samples, axis=0)
    for left in reversed(range(new_tokens)):
        tokens = (newest + draw.gumbel(size=newest.shape)).argmax(axis=-1)
        for one, token, row in zip(drawn, tokens.tolist(), newest, strict=True):
            one.answer.append(token)
            one.chosen.append(row[token])
        if left:
            newest = run(list(range(len(drawn))), [[token] for token in tokens.tolist()])
    for name in cache.allocator.sequences:
        cache.free(name)
    for one in drawn:
        length = one.answer.index(stop) + 1 if stop in one.answer else new_tokens
        one.answer, one.chosen = one.answer[:length], one.chosen[:length]
    return drawn


def _prompts_in_chunks(
    cache: Any, prompts: Sequence[list[int]], chunk: int, run: Callable[[list[Any], list[list[int]]], np.ndarray]
) -> np.ndarray:
    """Writes all prompts; returns the log-probabilities after each, ``[prompts, vocabulary]``."""
    after: dict[int, np.ndarray] = {}
    for number in range(len(prompts)):
        cache.add(("prompt", number))
    for start in range(0, max(map(len, prompts)), chunk):
        running = [number for number, prompt in enumerate(prompts) if len(prompt) > start]
        rows = run([("prompt", each) for each in running], [prompts[each][start : start + chunk] for each in running])
        after |= dict(zip(running, rows, strict=True))
    return np.stack([after[number] for number in range(len(prompts))])


def advantages(rewards: np.ndarray) -> np.ndarray:
    """Returns how much better each answer is than the others to its prompt, ``[prompts, samples]``, in deviations."""
    return (rewards - rewards.mean(1, keepdims=True)) / (rewards.std(1, keepdims=True) + 1e-6)
