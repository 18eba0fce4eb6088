"""Serves thousands of requests that arrive, are cancelled and are preempted at random, from one small pool of pages.

A request's cache is a ``PagedKVCache`` of torch; its model is one layer of attention between fixed random matrices, in
float64. Every answer must equal the answer to the request alone, none may be missing or come twice, and all pages must
be free at the end. When the pool is full, the youngest running request loses its pages and starts again later. Prompts
that begin like a running request's prompt fork its pages.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
import torch

from attn_core.paged.allocator import PoolFullError
from torch_frontend import PagedKVCache

VOCABULARY, WIDTH, HEADS, KV_HEADS, DIM, STOP, LONGEST = 31, 16, 4, 2, 8, 0, 96
PAGES, PAGE, TOGETHER = 40, 4, 12
"""Less than half of what TOGETHER requests of the longest kind need, so the pool is full often."""


class Model:
    """One layer of attention between random matrices; an answer depends on every token and its position."""

    def __init__(self, seed: int = 0) -> None:
        random = np.random.default_rng(seed)
        self.embed, self.place = (random.standard_normal((rows, WIDTH)) for rows in (VOCABULARY, LONGEST))
        self.weights = [random.standard_normal((WIDTH, heads * DIM)) for heads in (HEADS, KV_HEADS, KV_HEADS)]
        self.out = random.standard_normal((HEADS * DIM, VOCABULARY))

    def qkv(self, tokens: Any, places: Any) -> list[np.ndarray]:
        """q, k and v ``[tokens, heads, dim]``."""
        x = self.embed[tokens] + self.place[places]
        return [(x @ weight).reshape(len(x), -1, DIM) for weight in self.weights]

    def alone(self, prompt: tuple[int, ...], new_tokens: int) -> list[int]:
        """The answer to one prompt, in numpy, without pages."""
        q, k, v = self.qkv(np.array(prompt), np.arange(len(prompt)))
        answer: list[int] = []
        while True:
            rows = np.repeat(k, HEADS // KV_HEADS, 1), np.repeat(v, HEADS // KV_HEADS, 1)
            scores = np.einsum("hd,thd->ht", q[-1], rows[0]) / DIM**0.5
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            out = np.einsum("ht,thd->hd", weights / weights.sum(-1, keepdims=True), rows[1])
            answer.append(int((out.reshape(-1) @ self.out).argmax()))
            if answer[-1] == STOP or len(answer) == new_tokens:
                return answer
            new = self.qkv(np.array(answer[-1:]), np.array([len(k)]))
            q, k, v = new[0], np.concatenate([k, new[1]]), np.concatenate([v, new[2]])


@dataclass
class Request:
    """A prompt; when it arrives, and when its sender gives up, in steps of the server (None: never)."""

    number: int
    prompt: tuple[int, ...]
    new_tokens: int
    arrives: int
    cancelled: int | None
    answer: list[int] = field(default_factory=list)


def drawn(count: int, seed: int) -> list[Request]:
    """Draws requests: a third begins with one of a few long prefixes, and one in ten is cancelled."""
    random, requests, now = Random(seed), list[Request](), 0
    prefixes = [tuple(random.randrange(1, VOCABULARY) for _ in range(18)) for _ in range(3)]
    for number in range(count):
        now += random.choice((0, 0, 0, 1, 2, 5))
        start = random.choice(prefixes) if random.random() < 0.35 else ()
        prompt = start + tuple(random.randrange(1, VOCABULARY) for _ in range(random.randint(1, 20)))
        cancelled = now + random.randint(0, 30) if random.random() < 0.1 else None
        requests.append(Request(number, prompt, random.randint(1, 16), now, cancelled))
    return requests


class Server:
    """Serves requests in order of arrival; counts what happened in ``counts``."""

    def __init__(self, model: Model, num_pages: int = PAGES) -> None:
        sizes = {"num_layers": 1, "kv_heads": KV_HEADS, "head_dim": DIM, "dtype": torch.float64}
        self.cache = PagedKVCache(num_pages=num_pages, page_size=PAGE, **sizes)  # type: ignore[arg-type]
        for pool in (*self.cache.k_pages, *self.cache.v_pages):
            pool.fill_(torch.nan)
        self.model, self.counts, self.running = model, Counter[str](), list[Request]()
        self.waiting: deque[Request] = deque()
        self.answers: list[tuple[int, list[int]]] = []

    def serve(self, requests: list[Request]) -> list[tuple[int, list[int]]]:
        """Returns (number, answer) of every request that was not cancelled, in the order in which they ended."""
        coming, now = deque(requests), 0
        while coming or self.waiting or self.running:
            while coming and coming[0].arrives <= now:
                self.waiting.append(coming.popleft())
            self._cancel(now)
            self._admit()
            if self.running:
                self._step()
            now += 1
        self.counts["steps"] = now
        return self.answers

    def _cancel(self, now: int) -> None:
        for each in [each for each in self.running if each.cancelled is not None and each.cancelled <= now]:
            self._leave(each)
            self.counts["cancelled while running"] += 1
        staying = [each for each in self.waiting if each.cancelled is None or each.cancelled > now]
        self.counts["cancelled while waiting"] += len(self.waiting) - len(staying)
        self.waiting = deque(staying)

    def _admit(self) -> None:
        """Starts requests while their prompts fit. Their answers may not: then one is preempted."""
        allocator = self.cache.allocator
        while self.waiting and len(self.running) < TOGETHER:
            request = self.waiting[0]
            parent, shared = self._like(request)
            if -(-(len(request.prompt) - shared) // PAGE) + 1 > allocator.free_pages and self.running:
                return
            self.running.append(self.waiting.popleft())
            if parent is None:
                self.cache.add(request.number)
            else:
                self.cache.fork(parent.number, request.number, shared)
                self.counts["forked"] += 1

    def _like(self, request: Request) -> tuple[Request | None, int]:
        """Returns the running request with the longest common beginning that is in the pages, and its length."""
        best, most = None, 0
        for other in self.running:
            pairs = zip(request.prompt[:-1], other.prompt)
            same = next((at for at, (one, two) in enumerate(pairs) if one != two), None)
            length = min(len(request.prompt) - 1, len(other.prompt)) if same is None else same
            length = min(length, self.cache.allocator.length(other.number))
            if length > max(most, PAGE):
                best, most = other, length
        return best, most

    def _step(self) -> None:
        """One call of the model for all running requests; without room for it, the youngest request makes some."""
        allocator = self.cache.allocator
        while True:
            new = [self._unread(request) for request in self.running]
            names = [request.number for request in self.running]
            before = [allocator.length(name) for name in names]
            try:
                step = self.cache.step(names, [len(tokens) for tokens in new])
                break
            except PoolFullError:
                assert [allocator.length(name) for name in names] == before, "a refused step changes nothing"
                youngest = self.running[-1]
                self._leave(youngest)
                youngest.answer.clear()
                self.waiting.appendleft(youngest)
                self.counts["preempted"] += 1
        places = np.concatenate([start + np.arange(len(tokens)) for start, tokens in zip(before, new)])
        q, k, v = map(torch.from_numpy, self.model.qkv(np.concatenate(new), places))
        self.cache.update(0, k, v, step)
        attended = self.cache.attend(0, q, step).numpy().reshape(len(places), -1)
        last = attended[np.cumsum([len(tokens) for tokens in new]) - 1]
        self.counts["largest batch"] = max(self.counts["largest batch"], len(names))
        for request, token in zip(list(self.running), (last @ self.model.out).argmax(-1).tolist()):
            request.answer.append(token)
            if token == STOP or len(request.answer) == request.new_tokens:
                self._leave(request)
                self.answers.append((request.number, request.answer))

    def _unread(self, request: Request) -> list[int]:
        """Returns the tokens of a request that are not in its pages yet."""
        return [*request.prompt, *request.answer][self.cache.allocator.length(request.number) :]

    def _leave(self, request: Request) -> None:
        self.cache.free(request.number)
        self.running.remove(request)


def faults(server: Server, requests: list[Request]) -> list[str]:
    """Returns a sentence for each answer that is wrong, missing or twice there, and for pages that are not free."""
    times = Counter(number for number, _ in server.answers)
    found = [f"request {number} was answered {count} times" for number, count in times.items() if count > 1]
    cancelled = server.counts["cancelled while running"] + server.counts["cancelled while waiting"]
    found += [
        f"request {request.number} has no answer"
        for request in requests
        if request.cancelled is None and not times[request.number]
    ]
    if len(times) + cancelled != len(requests):
        found.append(f"{len(times)} answers and {cancelled} cancellations of {len(requests)} requests")
    for number, answer in server.answers:
        alone = server.model.alone(requests[number].prompt, requests[number].new_tokens)
        if answer != alone:
            found.append(f"request {number}: {answer}, and alone {alone}")
    allocator = server.cache.allocator
    if allocator.free_pages != allocator.num_pages or len(allocator):
        found.append(f"at the end {allocator.free_pages} of {allocator.num_pages} pages are free")
    return found
