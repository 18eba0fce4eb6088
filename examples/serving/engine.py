"""Continuous batching: requests join and leave a running batch, and share one pool of pages. No framework here.

A request starts if the pool has room for its prompt. Pages that already contain the beginning of the prompt are shared,
and their tokens are not computed again. If the pool is full later, the youngest request that shares no page goes to
host memory and returns when there is room. If all share pages, the youngest one is dropped and starts again; most of
its tokens are then still found. Prompts and single tokens share one call of the model.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from attn_core import PageAllocator, SpecError
from attn_core.paged.allocator import PoolFullError


class Cache(Protocol):
    """The part of a ``PagedKVCache`` of either framework that the engine uses."""

    allocator: PageAllocator

    def add(self, name: Any, tokens: Sequence[int] = (), *, salt: Any = None) -> int: ...
    def record(self, name: Any, tokens: Sequence[int]) -> None: ...
    def swap_out(self, name: Any) -> None: ...
    def swap_in(self, name: Any) -> None: ...
    def free(self, name: Any) -> None: ...
    def step(self, names: Sequence[Any], new: int | Sequence[int] = 1, *, width: int | None = None) -> Any: ...


Forward = Callable[[np.ndarray, np.ndarray, Any], np.ndarray]
"""(token ids ``[tokens]``, positions in their sequences ``[tokens]``, step) -> float32 logits ``[tokens, vocab]``."""


@dataclass
class Request:
    """One prompt with its answer so far.

    Attributes:
        tokens: ids of the prompt and of the answer; prompt: the length of the prompt.
        leads: for each token of the answer, how far its logit is above the second-best.
        matched: tokens that were in pages when it started first; None before.
    """

    number: int
    tokens: list[int]
    prompt: int
    leads: list[float] = field(default_factory=list)
    matched: int | None = None


@dataclass
class Served:
    """The answers, and what happened in the pool.

    Attributes:
        answers: token ids for each prompt, without the stop token; leads: as in ``Request``, of the stop token, too.
        steps: calls of the model; largest_batch: the most requests in one of them.
        most_used: the most pages in use; shared: the most pages that several requests shared.
        waste: unused places in pages in use, and the number of sequences, at the largest waste per sequence.
        prompt_tokens: tokens of all prompts; matched_tokens: those that were in pages already.
        swapped: numbers of the requests that went to host memory; dropped: of those that started again.
    """

    answers: list[list[int]]
    leads: list[list[float]] = field(default_factory=list)
    steps: int = 0
    largest_batch: int = 0
    most_used: int = 0
    shared: int = 0
    waste: tuple[int, int] = (0, 0)
    prompt_tokens: int = 0
    matched_tokens: int = 0
    swapped: list[int] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)


def serve(
    forward: Forward,
    cache: Cache,
    prompts: Sequence[Sequence[int]],
    *,
    new_tokens: int,
    stop: int,
    together: int,
    on_token: Callable[[int, int, bool], None] = lambda number, token, last: None,
) -> Served:
    """Answers every prompt greedily with at most ``new_tokens`` tokens, up to ``together`` prompts at a time.

    All pages of the requests are free at the end, and the cache still finds their content.

    Args:
        cache: may contain other sequences, unless they are named by a number.
        stop: the token that ends an answer; the answer does not include it.
        on_token: called with a prompt's number, a token of its answer, and whether it is the last one.

    Raises:
        ValueError: for a prompt without tokens, or fewer than one new token or request.
        PoolFullError: before anything runs, if the longest answer to a prompt does not fit into the free pages.
    """
    _check(prompts, new_tokens, together, cache.allocator)
    batch = _Batch(forward, cache, prompts, together)
    while batch.start_requests():
        batch.make_room()
        for request, token in batch.advance():
            last = token == stop or len(request.tokens) - request.prompt == new_tokens
            on_token(request.number, token, last)
            if last:
                batch.end(request, stop)
    return batch.result


def _check(prompts: Sequence[Sequence[int]], new_tokens: int, together: int, allocator: PageAllocator) -> None:
    for name, value in (("new_tokens", new_tokens), ("together", together)):
        if value < 1:
            raise ValueError(f"{name}={value}: expected 1 or more")
    for number, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(f"prompts[{number}]: expected at least one token, got none")
        needed = -(-(len(prompt) + new_tokens - 1) // allocator.page_size)  # the last token needs no place
        if needed > allocator.free_pages:
            raise PoolFullError(
                f"prompts[{number}]: {len(prompt)} tokens and an answer of up to {new_tokens} need {needed} pages of "
                f"{allocator.page_size}, and {allocator.free_pages} are free; make the pool larger, or new_tokens "
                "smaller"
            )


class _Batch:
    """The requests that run, those that wait for their start, and those in host memory, each in order of arrival."""

    def __init__(self, forward: Forward, cache: Cache, prompts: Sequence[Sequence[int]], together: int) -> None:
        self.forward, self.cache, self.allocator, self.together = forward, cache, cache.allocator, together
        self.waiting = deque(Request(number, list(prompt), len(prompt)) for number, prompt in enumerate(prompts))
        self.running: list[Request] = []
        self.elsewhere: list[Request] = []
        tokens = sum(map(len, prompts))
        self.result = Served([[] for _ in prompts], [[] for _ in prompts], prompt_tokens=tokens)

    def start_requests(self) -> bool:
        """Continues requests from host memory, then starts new ones, while they fit. Returns whether any runs."""
        while self.elsewhere and len(self.running) < self.together:
            request = self.elsewhere[0]
            if not self._fits(len(request.tokens), taken=0):
                return True
            self.cache.swap_in(request.number)
            self.running.append(self.elsewhere.pop(0))
        beginnings = set[tuple[int, ...]]()  # of requests that start now, so that their pages have no content yet
        while self.waiting and len(self.running) < self.together and not self.elsewhere:
            request = self.waiting[0]
            match = self.allocator.match(request.tokens[:-1])
            beginning = tuple(request.tokens[: self.allocator.page_size])
            if not match.pages and beginning in beginnings:
                break  # its beginning is found after the next step
            if not self._fits(len(request.tokens), taken=match.cached - len(match.pages)):
                break
            beginnings.add(beginning)
            there = self.cache.add(request.number, request.tokens)
            if request.matched is None:
                request.matched = there
                self.result.matched_tokens += there
            self.running.append(self.waiting.popleft())
        return bool(self.running)

    def _fits(self, tokens: int, taken: int) -> bool:
        """Returns whether a request fits beside the others, each of which may need one more page soon.

        Args:
            taken: free pages that it takes beside those for its tokens; below 0 if it shares pages.
        """
        pages = -(-tokens // self.allocator.page_size) + taken
        return not self.running or pages + len(self.running) <= self.allocator.free_pages

    def make_room(self) -> None:
        """Moves requests out of the pool until the next step fits."""
        while self.allocator.needed(self._new_tokens()) > self.allocator.free_pages:
            if not self._swap_one():
                self._drop_one()

    def _new_tokens(self) -> dict[Any, int]:
        """Returns for each running request how many of its tokens are not in pages."""
        lengths = {request.number: self.allocator.length(request.number) for request in self.running}
        return {request.number: len(request.tokens) - lengths[request.number] for request in self.running}

    def _swap_one(self) -> bool:
        """Moves the youngest request that shares no page to host memory. Returns whether there is one."""
        for request in reversed(self.running):
            if len(request.tokens) == request.prompt:
                continue  # its prompt did not run yet
            try:
                self.cache.swap_out(request.number)
            except SpecError:
                continue  # it shares pages, which would not become free
            self.running.remove(request)
            self.elsewhere = sorted([*self.elsewhere, request], key=lambda each: each.number)
            self.result.swapped.append(request.number)
            return True
        return False

    def _drop_one(self) -> None:
        request = self.running.pop()
        self.cache.free(request.number)
        self.waiting.appendleft(request)
        self.result.dropped.append(request.number)

    def advance(self) -> list[tuple[Request, int]]:
        """Calls the model once for all running requests, new prompts included. Returns the next token of each."""
        new = self._new_tokens()
        counts, running = list(new.values()), list(self.running)
        tokens = [request.tokens[-count:] for request, count in zip(running, counts, strict=True)]
        places = [np.arange(len(each.tokens) - n, len(each.tokens)) for each, n in zip(running, counts, strict=True)]
        step = self.cache.step(list(new), counts)
        logits = self.forward(np.concatenate(tokens), np.concatenate(places), step)[np.cumsum(counts) - 1]
        _note(self.result, self.allocator, running)
        chosen = logits.argmax(axis=-1).tolist()
        for request, token, lead in zip(running, chosen, _leads(logits), strict=True):
            self.cache.record(request.number, request.tokens)  # they are written by now
            request.tokens.append(token)
            request.leads.append(lead)
        return list(zip(running, chosen, strict=True))

    def end(self, request: Request, stop: int) -> None:
        """Frees the pages of a request and keeps its answer."""
        answer = request.tokens[request.prompt :]
        self.result.answers[request.number] = answer[:-1] if answer[-1] == stop else answer
        self.result.leads[request.number] = request.leads
        self.cache.free(request.number)
        self.running.remove(request)


def _note(result: Served, allocator: PageAllocator, running: Sequence[Request]) -> None:
    report = allocator.report()
    result.steps += 1
    result.largest_batch = max(result.largest_batch, len(running))
    result.most_used = max(result.most_used, report.num_pages - report.free)
    result.waste = max(result.waste, (report.waste, len(allocator)), key=lambda pair: (pair[0] / max(pair[1], 1), pair))
    result.shared = max(result.shared, report.shared)


def _leads(logits: np.ndarray) -> list[float]:
    """Returns for each row ``[rows, vocabulary]`` how far its best logit is above the second-best."""
    second, first = np.partition(logits, -2, axis=-1)[:, -2:].T
    leads: list[float] = (first - second).tolist()
    return leads
