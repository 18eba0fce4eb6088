"""Greedy decoding of all packed documents together, the same loop for torch and for JAX."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from examples.smollm2.packing import PackedStep, pack

Forward = Callable[[PackedStep], np.ndarray]
"""Runs one step, updates the cache, and returns float32 logits ``[tokens, vocabulary]`` of the new tokens."""


@dataclass
class Generation:
    """The answers of a model, with logits and times.

    Attributes:
        tokens: the token ids of each answer, without the stop token.
        prefill_logits: float32 ``[prompt tokens, vocabulary]``.
        lead: the smallest lead, in logits, of a chosen token over the second-best token.
        prefill_seconds, decode_seconds: time of the first step, and of each later step.
    """

    tokens: list[list[int]]
    prefill_logits: np.ndarray
    lead: float = float("inf")
    prefill_seconds: float = 0.0
    decode_seconds: list[float] = field(default_factory=list)


def capacity_for(prompts: Sequence[Sequence[int]], new_tokens: int) -> int:
    """Returns the number of slots that the packed cache needs; the last token of an answer is never fed back."""
    return sum(map(len, prompts)) + len(prompts) * (new_tokens - 1)


def greedy(
    forward: Forward,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    stop: int,
    on_step: Callable[[], None] = lambda: None,
) -> Generation:
    """Extends every prompt (token ids) by the most likely token, until all stop or have ``new_tokens`` tokens."""
    capacity = capacity_for(prompts, new_tokens)
    written: list[list[int]] = [[] for _ in prompts]
    cached, new = [0] * len(prompts), [list(prompt) for prompt in prompts]
    result = Generation(written, np.empty(0))
    for index in range(new_tokens):
        step = pack(cached, new, capacity)
        started = time.perf_counter()
        logits = forward(step)
        seconds = time.perf_counter() - started
        if index == 0:
            result.prefill_logits, result.prefill_seconds = logits, seconds
        else:
            result.decode_seconds.append(seconds)
        newest = logits[step.last]
        chosen = [int(token) for token in newest.argmax(axis=-1)]
        running = [stop not in tokens for tokens in written]
        result.lead = min(result.lead, _lead(newest[running]))
        for tokens, token in zip(written, chosen, strict=True):
            tokens.append(token)
        on_step()
        if all(stop in tokens for tokens in written):
            break
        cached, new = list(step.lengths_k[:-1]), [[token] for token in chosen]
    # A document that stopped early was continued, because the shape of a step is fixed. Its tail is dropped.
    result.tokens = [tokens[: tokens.index(stop)] if stop in tokens else tokens for tokens in written]
    return result


def _lead(logits: np.ndarray) -> float:
    """Returns the smallest difference between the best and the second-best logit of a row ``[rows, vocabulary]``."""
    second, first = np.partition(logits, -2, axis=-1)[:, -2:].T
    return float((first - second).min())


def reread_difference(
    logits_of: Callable[[list[list[int]]], np.ndarray],
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
) -> int:
    """Returns the number of answer tokens that one pass over the finished documents would choose differently.

    Args:
        logits_of: whole packed documents (token ids) -> logits ``[tokens, vocabulary]``, without a cache.
    """
    documents = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
    chosen = logits_of(documents).argmax(axis=-1)  # [tokens]: the most likely next token
    changed, start = 0, 0
    for prompt, answer in zip(prompts, answers, strict=True):
        first = start + len(prompt) - 1  # the prompt's last token chooses the answer's first
        changed += int((chosen[first : first + len(answer)] != np.asarray(answer, int)).sum())
        start += len(prompt) + len(answer)
    return changed
