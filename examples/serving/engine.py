"""Continuous batching: requests join and leave a running batch, and share one pool of pages. No framework here.

A request is admitted if the pool can hold its prompt with its longest answer, in addition to those of all running
requests. So a started request never runs out of pages. Requests are served in order. Prompts and single tokens share
one call of the model.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from attn_core import PageAllocator
from attn_core.paged.allocator import PoolFullError

PREFIX = "the common beginning of all prompts"
"""The name of the sequence whose pages the requests share."""


class Cache(Protocol):
    """The part of a ``PagedKVCache`` of either framework that the engine uses."""

    allocator: PageAllocator

    def add(self, name: Any) -> None: ...
    def fork(self, parent: Any, name: Any, tokens: int | None = None) -> None: ...
    def free(self, name: Any) -> None: ...
    def step(self, names: Sequence[Any], new: int | Sequence[int] = 1, *, width: int | None = None) -> Any: ...


Forward = Callable[[np.ndarray, np.ndarray, Any], np.ndarray]
"""(token ids ``[tokens]``, positions in their sequences ``[tokens]``, step) -> float32 logits ``[tokens, vocab]``."""


@dataclass
class Request:
    """One prompt (token ids) and its answer so far."""

    number: int
    prompt: list[int]
    answer: list[int] = field(default_factory=list)


@dataclass
class Served:
    """The answers, and statistics of the pool.

    Attributes:
        answers: token ids for each prompt, without the stop token.
        steps: calls of the model; largest_batch: the most requests in one of them.
        waste: unused places in pages in use, and the number of sequences, at the largest waste per sequence.
        shared: the largest number of pages that several sequences shared.
        lead: the smallest lead, in logits, of a chosen token over the second-best token.
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
    """Answers every prompt greedily with at most ``new_tokens`` tokens, up to ``together`` prompts at a time.

    All pages of the requests are free at the end.

    Args:
        cache: may contain other sequences, unless they are named by a number or ``PREFIX``.
        stop: the token that ends an answer; the answer does not include it.

    Raises:
        ValueError: for a prompt without tokens, or fewer than one new token or request.
        PoolFullError: before anything runs, if the longest answer to a prompt does not fit into the free pages.
    """
    room = _Room(cache.allocator, new_tokens)
    _check(prompts, new_tokens, together, room)
    waiting = deque(Request(number, list(prompt)) for number, prompt in enumerate(prompts))
    running: list[Request] = []
    result = Served([[] for _ in prompts])
    common = room.share(prompts)
    if common:
        cache.add(PREFIX)
        step = cache.step([PREFIX], [common])
        forward(np.array(prompts[0][:common]), np.arange(common), step)
        result.steps += 1
    while waiting or running:
        while waiting and len(running) < together and room.fits(waiting[0], running):
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
    """Returns the number of common first tokens. Each prompt keeps at least one token; a single prompt shares none."""
    if len(prompts) < 2:
        return 0
    shortest = min(map(len, prompts)) - 1
    same = (len({prompt[at] for prompt in prompts}) == 1 for at in range(shortest))
    return next((at for at, is_same in enumerate(same) if not is_same), shortest)


class _Room:
    """The free pages of a pool, and the pages that requests may need."""

    def __init__(self, allocator: PageAllocator, new_tokens: int) -> None:
        self.pages, self.page_size = allocator.free_pages, allocator.page_size
        self.new_tokens, self.common = new_tokens, 0

    def share(self, prompts: Sequence[Sequence[int]]) -> int:
        """Returns the number of first tokens that all prompts share.

        Their last page may be partly filled; each request then copies it. If the pool has no pages for the copies, only
        full pages are shared, which never needs more pages than sharing none.
        """
        self.common = _common_prefix(prompts)
        if not all(self.fits(Request(0, list(prompt)), ()) for prompt in prompts):
            self.common -= self.common % self.page_size
        return self.common

    def fits(self, request: Request, running: Sequence[Request]) -> bool:
        """Returns whether the pages suffice for the longest answers of this request and all running ones."""
        own = sum(self.held(len(one.prompt)) for one in (*running, request))
        return own + -(-self.common // self.page_size) <= self.pages

    def held(self, prompt: int) -> int:
        """Returns the pages of a request with its longest answer, without shared pages; its last token needs none."""
        return -(-(prompt + self.new_tokens - 1) // self.page_size) - self.common // self.page_size


def _check(prompts: Sequence[Sequence[int]], new_tokens: int, together: int, room: _Room) -> None:
    for name, value in (("new_tokens", new_tokens), ("together", together)):
        if value < 1:
            raise ValueError(f"{name}={value}: expected 1 or more")
    for number, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(f"prompts[{number}]: expected at least one token, got none")
        if (needed := room.held(len(prompt))) > room.pages:
            raise PoolFullError(
                f"prompts[{number}]: {len(prompt)} tokens and an answer of up to {new_tokens} need {needed} pages of "
                f"{room.page_size}, and {room.pages} are free; make the pool larger, or new_tokens smaller"
            )


def _advance(forward: Forward, cache: Cache, running: Sequence[Request], common: int) -> np.ndarray:
    """Calls the model once for all running requests, new prompts included; returns the logits of their last tokens."""
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
    result.waste = max(result.waste, (report.waste, len(allocator)), key=lambda pair: (pair[0] / max(pair[1], 1), pair))
    result.shared = max(result.shared, report.shared)


def _lead(logits: np.ndarray) -> float:
    """Returns the smallest difference between the best and the second-best logit of a row ``[rows, vocabulary]``."""
    second, first = np.partition(logits, -2, axis=-1)[:, -2:].T
    return float((first - second).min())
