"""Tests many threads and tasks that call both frontends at once, each under backends of its own."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
import pytest
from frameworks import BOTH, JAX, TORCH, Framework, as_numpy

from attn_core.selection.override import requested

THREADS = 16
NAMES = {TORCH.name: ("math", "sdpa_flash"), JAX.name: ("math", "jax_xla")}


@pytest.fixture(autouse=True)
def eager_switches() -> Iterator[None]:
    """Threads take turns ten times as often as usual."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-4)
    yield
    sys.setswitchinterval(before)


def inputs(framework: Framework, length: int) -> Any:
    return framework.array(np.random.default_rng(length).standard_normal((1, length, 2, 8), np.float32))


@cache
def right(length: int) -> np.ndarray:
    """Causal attention in float64."""
    x = np.random.default_rng(length).standard_normal((1, length, 2, 8), np.float32)[0].astype(np.float64)
    scores = np.einsum("qhd,khd->hqk", x, x) * 8**-0.5
    scores = np.where(np.tri(length, dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), x)[None]


def call(framework: Framework, length: int, number: int) -> float:
    """A call under two nested blocks; returns the largest error."""
    outer, inner = NAMES[framework.name][number % 2], NAMES[framework.name][(number // 2) % 2]
    with framework.frontend.use_backend(outer):
        with framework.frontend.use_backend(inner):
            x = inputs(framework, length)
            out = framework.frontend.attention(x, x, x, causal=True)
            assert requested() == (inner,)
        assert requested() == (outer,)
    assert requested() is None
    return float(np.abs(as_numpy(out) - right(length)).max())


@pytest.mark.parametrize(("framework", "calls", "shapes"), [(TORCH, 500, 200), (JAX, 60, 6)], ids=["torch", "jax"])
def test_many_threads_with_shapes_and_backends_of_their_own(framework: Framework, calls: int, shapes: int) -> None:
    """Threads start at different shapes, so first calls of a shape meet later ones."""
    barrier = threading.Barrier(THREADS)

    def work(thread: int) -> float:
        barrier.wait()
        return max(call(framework, 3 + (7 * thread + at) % shapes, thread + at) for at in range(calls))

    with ThreadPoolExecutor(THREADS) as pool:
        errors = list(pool.map(work, range(THREADS)))
    assert max(errors) < 1e-5


@pytest.mark.parametrize("framework", BOTH, ids=str)
def test_tasks_and_their_executors_keep_backends_apart(framework: Framework) -> None:
    """A task's threads start without its names, unless its context goes with them (``asyncio.to_thread``)."""

    async def task(number: int) -> None:
        names = NAMES[framework.name]
        for at in range(6):
            name = names[(number + at) % 2]
            with framework.frontend.use_backend(name):
                await asyncio.sleep(0)
                x = inputs(framework, 5)
                out = framework.frontend.attention(x, x, x, causal=True)
                assert requested() == (name,)
                assert await asyncio.to_thread(requested) == (name,)
                plain = asyncio.get_running_loop().run_in_executor(None, requested)
                assert await plain is None
                error = await asyncio.get_running_loop().run_in_executor(None, call, framework, 4, number)
                assert requested() == (name,) and error < 1e-5
            assert np.abs(as_numpy(out) - right(5)).max() < 1e-5
        assert requested() is None

    async def main() -> None:
        await asyncio.gather(*(task(number) for number in range(8)))

    asyncio.run(main())
    assert requested() is None
