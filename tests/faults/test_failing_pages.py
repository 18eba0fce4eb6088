"""Tests that a step or an append which fails half-way leaves a paged cache as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from frameworks import BOTH, JAX, Framework, as_numpy

from attn_core import PageAllocator, PoolFullError
from jax_frontend.paged import cache as jax_cache

everywhere = pytest.mark.parametrize("framework", BOTH, ids=str)
LAYERS, PAGE_SIZE = 2, 4
VALUES = np.random.default_rng(0).standard_normal((LAYERS, 2, 6, 2, 8)).astype(np.float32)  # layer, k or v, token


def filled_cache(framework: Framework) -> Any:
    """Two layers; "parent" has 6 tokens on two pages, and "child" shares them."""
    cache = framework.frontend.PagedKVCache(num_layers=LAYERS, num_pages=5, page_size=PAGE_SIZE, kv_heads=2, head_dim=8)
    cache.add("parent")
    step = cache.step(["parent"], [6])
    for layer in range(LAYERS):
        cache.update(layer, *(framework.array(each) for each in VALUES[layer]), step)
    cache.fork("parent", "child")
    return cache


def state_of(allocator: PageAllocator) -> Any:
    """Everything that an allocator knows."""
    return (
        list(allocator._free),
        list(allocator._holders),
        dict(allocator._held),
        dict(allocator._swapped),
        allocator.now,
    )


def tokens_of(cache: Any, name: str) -> list[np.ndarray]:
    """The keys and values of a sequence in every layer."""
    pages, length = list(cache.allocator.pages(name)), cache.allocator.length(name)
    pools = (*cache.k_pages, *cache.v_pages)
    return [as_numpy(pool)[pages].reshape(-1, 2, 8)[:length] for pool in pools]


def failing_at(function: Callable[..., Any], run: int, error: type[BaseException]) -> Callable[..., Any]:
    """The function, which raises in its run of that number instead."""
    count = 0

    def fail(*arguments: Any) -> Any:
        nonlocal count
        count += 1
        if count == run:
            raise error("planted")
        return function(*arguments)

    return fail


PLACES = [("_to_device", 1), ("_to_device", 2), ("_copy", 1)]


@everywhere
@pytest.mark.parametrize("error", [MemoryError, torch.OutOfMemoryError, RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize(("place", "run"), PLACES)
def test_a_step_that_fails_half_way(
    framework: Framework, place: str, run: int, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = filled_cache(framework)
    earlier = cache.step(["parent"], [0])
    before = state_of(cache.allocator), tokens_of(cache, "parent"), tokens_of(cache, "child")
    with monkeypatch.context() as patch:
        patch.setattr(cache, place, failing_at(getattr(cache, place), run, error))
        with pytest.raises(error, match="planted"):
            cache.step(["parent", "child"], [3, 1])
    after = state_of(cache.allocator), tokens_of(cache, "parent"), tokens_of(cache, "child")
    assert after[0] == before[0]
    for one, other in zip((*before[1], *before[2]), (*after[1], *after[2]), strict=True):
        np.testing.assert_array_equal(one, other)
    cache.check(earlier)  # nothing changed, so its tables are still right
    assert cache.allocator.length("parent") == 6
    cache.step(["parent", "child"], [3, 1])  # with memory, the same step works
    assert cache.allocator.length("parent") == 9 and cache.allocator.length("child") == 7


@pytest.mark.parametrize("run", [1, 2, 3, 4])
def test_pools_of_jax_survive_a_copy_that_fails_in_any_of_them(run: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # A copy donates the pool, so JAX deletes the old array; the new one must be in its place before the next copy.
    cache = filled_cache(JAX)
    before = state_of(cache.allocator), tokens_of(cache, "parent"), tokens_of(cache, "child")
    with monkeypatch.context() as patch:
        patch.setattr(jax_cache, "_copy_pages", failing_at(jax_cache._copy_pages, run, MemoryError))
        with pytest.raises(MemoryError, match="planted"):
            cache.step(["child"], [1])
    assert state_of(cache.allocator) == before[0]
    assert not any(pool.is_deleted() for pool in (*cache.k_pages, *cache.v_pages))
    for name, expected in (("parent", before[1]), ("child", before[2])):
        for one, other in zip(tokens_of(cache, name), expected, strict=True):
            np.testing.assert_array_equal(one, other)
    cache.step(["child"], [1])


@everywhere
def test_an_append_that_fails_can_run_again(framework: Framework, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, expected = filled_cache(framework), filled_cache(framework)
    arrays = [[framework.array(each[:1]) for each in VALUES[layer]] for layer in range(LAYERS)]
    step, same = cache.step(["child"], [1]), expected.step(["child"], [1])
    with monkeypatch.context() as patch:

        def fail(*arguments: Any, **tables: Any) -> None:
            raise MemoryError("planted")

        patch.setattr(cache, "_append", fail)
        for layer in range(LAYERS):
            with pytest.raises(MemoryError, match="planted"):
                cache.update(layer, *arrays[layer], step)
    for layer in range(LAYERS):
        cache.update(layer, *arrays[layer], step)
        expected.update(layer, *arrays[layer], same)
    for one, other in zip(tokens_of(cache, "child"), tokens_of(expected, "child"), strict=True):
        np.testing.assert_array_equal(one, other)


@everywhere
def test_a_full_pool_in_the_middle_of_a_batch(framework: Framework) -> None:
    cache = filled_cache(framework)
    before = state_of(cache.allocator)
    # The copy for "child" fits, and "parent" alone would fit: only both together need more than is free.
    with pytest.raises(PoolFullError):
        cache.step(["child", "parent"], [9, 3])
    with pytest.raises(PoolFullError):
        cache.allocator.allocate("third", 13)
    assert state_of(cache.allocator) == before and "third" not in cache.allocator
    cache.free("child")
    cache.step(["parent"], [3])


def test_a_table_that_cannot_be_built_undoes_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = filled_cache(JAX)
    before = state_of(cache.allocator)
    with monkeypatch.context() as patch:
        patch.setattr(cache.allocator, "table_of", failing_at(cache.allocator.table_of, 1, MemoryError))
        with pytest.raises(MemoryError):
            cache.step(["parent", "child"], [3, 1])
    assert state_of(cache.allocator) == before
