"""Continuous batching: requests join and leave a running batch, and share one pool of pages. No framework here.

A request is admitted when the pool can hold its prompt and the longest answer it may give, so that nobody who has begun
must stop for want of a page. Prompts and single tokens go through the model in one call.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from attn_core import PageAllocator

PREFIX = "what all prompts begin with"
"""The name of the sequence whose pages the requests share."""


class Cache(Protocol):
    """What a ``PagedKVCache`` of either framework has."""

    allocator: PageAllocator

    def add(self, name: Any) -> None: ...
    def fork(self, parent: Any, name: Any, tokens: int | None = None) -> None: ...
    def free(self, name: Any) -> None: ...
    def step(self, names: Sequence[Any], new: int | Sequence[int] = 1, *, width: int | None = None) -> Any: ...


Forward = Callable[[np.ndarray, np.ndarray, Any], np.ndarray]
"""(token ids ``[tokens]``, places in their sequences ``[tokens]``, step) -> float32 logits ``[tokens, vocabulary]``."""


@dataclass
class Request:
    """One prompt (token ids) and its answer so far."""

    number: int
    prompt: list[int]
    answer: list[int] = field(default_factory=list)


@dataclass
class Served:
    """What came out, and how full the pool was.

    Attributes:
        answers: token ids for each prompt, without the stop token.
        steps: calls of the model; largest_batch: the most requests in one of them.
        waste: the most places without a token in held pages, and how many sequences held pages then.
        shared: the most pages that several sequences held.
        lead: the smallest lead, in logits, that a chosen token had over the runner-up.
    """

    answers: list[list[int]]
    steps: int = 0
    largest_batch: int = 0
    waste: tuple[int, int] = (0, 0)
    shared: int = 0
    lead: float = float("inf")


def serve(
    forward: Forward,
    cache: Cache,
    prompts: Sequence[Sequence[int]],
    *,
    new_tokens: int,
    stop: int,
    together: int,
    on_answer: Callable[[], None] = lambda: None,
) -> Served:
    """Answers every prompt greedily with at most ``new_tokens``, up to ``together`` at a time; the cache ends empty."""
    waiting = deque(Request(number, list(prompt)) for number, prompt in enumerate(prompts))
    running: list[Request] = []
    result = Served([[] for _ in prompts])
    common = _common_prefix(prompts)
    if common:
        cache.add(PREFIX)
        step = cache.step([PREFIX], [common])
        forward(np.array(prompts[0][:common]), np.arange(common), step)
        result.steps += 1
    while waiting or running:
        while waiting and len(running) < together and _fits(cache.allocator, waiting[0], running, new_tokens, common):
            request = waiting.popleft()
            if common:
                cache.fork(PREFIX, request.number)
            else:
                cache.add(request.number)
            running.append(request)
        logits = _advance(forward, cache, running, common)
        result.steps += 1
        _note(result, cache.allocator, running)
        result.lead = min(result.lead, _lead(logits))
        for request, token in zip(list(running), logits.argmax(axis=-1).tolist(), strict=True):
            request.answer.append(token)
            if token == stop or len(request.answer) == new_tokens:
                result.answers[request.number] = [token for token in request.answer if token != stop]
                cache.free(request.number)
                running.remove(request)
                on_answer()
    if common:
        cache.free(PREFIX)
    return result


def _common_prefix(prompts: Sequence[Sequence[int]]) -> int:
    """How many tokens all prompts begin with; every prompt keeps at least one of its own, and one alone shares none."""
    if len(prompts) < 2:
        return 0
    shortest = min(map(len, prompts)) - 1
    same = (len({prompt[at] for prompt in prompts}) == 1 for at in range(shortest))
    return next((at for at, is_same in enumerate(same) if not is_same), shortest)


def _fits(allocator: PageAllocator, request: Request, running: Sequence[Request], new_tokens: int, common: int) -> bool:
    """Whether the pool holds this request and all that run to their longest ends, pages not shared counted in full."""

    def pages(one: Request) -> int:
        longest = len(one.prompt) + new_tokens - common // allocator.page_size * allocator.page_size
        return -(-longest // allocator.page_size)

    prefix = -(-common // allocator.page_size)
    return prefix + sum(map(pages, (*running, request))) <= allocator.num_pages or not running


def _advance(forward: Forward, cache: Cache, running: Sequence[Request], common: int) -> np.ndarray:
    """One call of the model for all that run, new prompts among them: the logits of each one's newest token."""
    tokens = [request.answer[-1:] or request.prompt[common:] for request in running]
    names, counts = [request.number for request in running], [len(new) for new in tokens]
    before = [cache.allocator.length(name) for name in names]
    step = cache.step(names, counts)
    places = np.concatenate([np.arange(start, start + count) for start, count in zip(before, counts, strict=True)])
    logits = forward(np.concatenate(tokens), places, step)
    return logits[np.cumsum(counts) - 1]


def _note(result: Served, allocator: PageAllocator, running: Sequence[Request]) -> None:
    report = allocator.report()
    result.largest_batch = max(result.largest_batch, len(running))
    result.waste = max(result.waste, (report.waste, len(allocator)))
    result.shared = max(result.shared, report.shared)


def _lead(logits: np.ndarray) -> float:
    """The smallest difference between the best and the second-best logit of any row ``[rows, vocabulary]``."""
    second, first = np.partition(logits, -2, axis=-1)[:, -2:].T
    return float((first - second).min())
