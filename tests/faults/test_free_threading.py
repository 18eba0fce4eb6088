"""Tests many threads at once, without torch: ``make matrix`` runs them on a free-threaded Python.

With a global interpreter lock threads only take turns. Without one they run at the same time.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

import attn_core
from attn_core import AttentionSpec, PageAllocator, Target, explain
from attn_core.call.masks import band
from attn_core.call.tensors import Inputs
from attn_core.correctness import reference

THREADS = 16
SIZES = {"batch": 1, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "value_dim": 8, "dtype": "float32"}


@pytest.fixture(autouse=True)
def eager_switches() -> Iterator[None]:
    """Threads take turns ten times as often as usual, if they have to."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-4)
    yield
    sys.setswitchinterval(before)


def together(work: Callable[[int], Any]) -> list[Any]:
    """Runs ``work(number)`` in THREADS threads that start at the same time."""
    barrier = threading.Barrier(THREADS)

    def one(number: int) -> Any:
        barrier.wait()
        return work(number)

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(one, range(THREADS)))


def test_imports_leave_the_interpreter_free() -> None:
    """A package that needs the lock turns it on again when it is imported."""
    is_enabled = getattr(sys, "_is_gil_enabled", lambda: True)  # before Python 3.13 there always is one
    if is_enabled():
        pytest.skip("this Python has a global interpreter lock, or another package turned it on")
    for name in ("backends", "cli", "context_parallel"):
        import_module(f"attn_core.{name}")
    assert not is_enabled()


def test_choices_of_many_threads_are_those_of_one() -> None:
    """Threads start at different specs, so the first look at a spec meets later ones."""
    specs = [AttentionSpec(**SIZES, q_len=3 + at, kv_len=5 + at, causal=at % 2 == 0) for at in range(60)]
    target = Target("jax", "cpu")

    def choices(number: int) -> dict[int, tuple[Any, ...]]:
        found = {}
        for step in range(len(specs)):
            at = (7 * number + step) % len(specs)
            fresh = AttentionSpec(**SIZES, q_len=3 + at, kv_len=5 + at, causal=at % 2 == 0)
            assert fresh == specs[at] and hash(fresh) == hash(specs[at])
            result = explain(fresh, target)
            found[at] = (result.backend, result.refusals, band(fresh))
        return found

    first, *others = together(choices)
    assert len(first) == len(specs) and all(other == first for other in others)


def test_allocators_of_many_threads_are_apart() -> None:
    def pages(number: int) -> list[int]:
        allocator = PageAllocator(num_pages=64, page_size=4)
        for at in range(40):
            allocator.allocate(at, 1 + (at + number) % 9)
            if at >= 3:
                allocator.free(at - 3)
        return [allocator.length(name) for name in allocator.sequences]

    assert together(pages) == [[1 + (at + number) % 9 for at in (37, 38, 39)] for number in range(THREADS)]


def test_no_plan_is_lost_from_the_counters() -> None:
    target, before = Target("jax", "cpu"), attn_core.counters()["plans"]["jax"].get("jax_xla", 0)
    spec = AttentionSpec(**SIZES, q_len=3, kv_len=3)
    from attn_core.selection.new_plans import planned

    together(lambda _: [planned(spec, target, None, "jax_xla", False) for _ in range(200)])
    assert attn_core.counters()["plans"]["jax"]["jax_xla"] == before + 200 * THREADS


@pytest.mark.skipif(find_spec("jax") is None, reason="needs jax")
def test_calls_of_many_threads_in_jax() -> None:
    import jax
    import jax.numpy as jnp

    from jax_frontend import attention, use_backend

    lengths = range(3, 9)
    arrays = {n: np.random.default_rng(n).standard_normal((1, n, 4, 8), np.float32) for n in lengths}
    right = {}
    for n, x in arrays.items():
        spec = AttentionSpec(**{**SIZES, "num_kv_heads": 4}, q_len=n, kv_len=n, causal=True)
        right[n] = reference.forward(spec, Inputs(*(x.astype(np.float64),) * 3))[0]
    program = jax.jit(lambda x: attention(x, x, x, causal=True))

    def error(number: int) -> float:
        largest = 0.0
        for step in range(40):
            n = 3 + (number + step) % len(lengths)
            x = jnp.asarray(arrays[n])
            with use_backend(("math", "jax_xla")[(number + step) % 2] if find_spec("torch") else "jax_xla"):
                for out in (attention(x, x, x, causal=True), program(x)):
                    largest = max(largest, float(np.abs(np.asarray(out) - right[n]).max()))
        return largest

    assert max(together(error)) < 1e-5
