"""Tests sequences whose pages go to host memory and back: no bit changes, and nothing is lost if something fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
import torch
from frameworks import BOTH, EVERYWHERE, JAX, TORCH_ON_GPU, Framework, as_numpy

from attn_core import PoolFullError, SpecError
from jax_frontend.paged import cache as jax_cache

pytestmark = pytest.mark.sampled

LAYERS, PAGE_SIZE, KV_HEADS, DIM = 2, 4, 2, 8
everywhere = pytest.mark.parametrize("framework", EVERYWHERE, ids=str)
on_the_cpu = pytest.mark.parametrize("framework", BOTH, ids=str)


def cache_of(framework: Framework, pages: int = 6, **options: Any) -> Any:
    sizes = {"num_layers": LAYERS, "page_size": PAGE_SIZE, "kv_heads": KV_HEADS, "head_dim": DIM, "value_dim": 5}
    if framework.device != "cpu":
        options["device"] = "cuda" if framework.name == "torch" else jax.devices("cuda")[0]
    return framework.frontend.PagedKVCache(num_pages=pages, **{**sizes, **options})


def values(seed: int, tokens: int, dim: int = DIM) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((tokens, KV_HEADS, dim)).astype(np.float32)


def write(framework: Framework, cache: Any, name: str, tokens: int, dtype: str = "float32") -> Any:
    """Takes a step and writes different values in every layer. Returns the step."""
    step = cache.step([name], [tokens])
    for layer in range(LAYERS):
        seed = 10 * cache.allocator.length(name) + layer
        cache.update(layer, *(framework.array(values(seed, tokens, dim), dtype=dtype) for dim in (DIM, 5)), step)
    return step


def content(cache: Any, name: str) -> list[bytes]:
    """The bits of a sequence's tokens in every pool."""
    pages, length = list(cache.allocator.pages(name)), cache.allocator.length(name)
    pools = (*cache.k_pages, *cache.v_pages)
    return [as_numpy(pool)[pages].reshape(-1, KV_HEADS, pool.shape[-1])[:length].tobytes() for pool in pools]


def state(cache: Any) -> Any:
    allocator = cache.allocator
    there = {name: (allocator.length(name), content(cache, name)) for name in allocator.sequences}
    return there, allocator.swapped, allocator.free_pages


@everywhere
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_sequence_returns_bit_for_bit_and_goes_on(framework: Framework, dtype: str) -> None:
    there = getattr(torch, dtype) if framework.name == "torch" else dtype
    cache, stayed = cache_of(framework, dtype=there), cache_of(framework, dtype=there)
    for each in (cache, stayed):
        each.add("a")
        write(framework, each, "a", 11, dtype)
    before, pages = content(cache, "a"), cache.allocator.pages("a")
    cache.swap_out("a")
    assert cache.allocator.swapped == ("a",) and cache.allocator.free_pages == 6
    cache.add("b")
    write(framework, cache, "b", 9, dtype)  # overwrites the pages
    b = content(cache, "b")
    cache.swap_in("a")
    assert content(cache, "a") == before and content(cache, "b") == b
    assert cache.allocator.pages("a") != pages and not cache.allocator.swapped
    q = framework.array(values(1, 1), dtype=dtype)
    for each in (cache, stayed):
        each.last = write(framework, each, "a", 1, dtype)
    for layer in range(LAYERS):
        one, other = (as_numpy(each.attend(layer, q, each.last)) for each in (cache, stayed))
        np.testing.assert_array_equal(one, other)


@everywhere
def test_a_sequence_without_tokens(framework: Framework) -> None:
    cache = cache_of(framework)
    cache.add("a")
    cache.swap_out("a")
    cache.swap_in("a")
    write(framework, cache, "a", 3)
    assert cache.allocator.length("a") == 3


@on_the_cpu
def test_a_pool_of_float8(framework: Framework) -> None:
    """Pools of one byte move as they are, whatever a framework can index."""
    cache = cache_of(framework)
    cache.add("a")
    write(framework, cache, "a", 11)
    fp8 = torch.float8_e4m3fn if framework.name == "torch" else "float8_e4m3fn"
    for pools in (cache.k_pages, cache.v_pages):
        pools[:] = [pool.to(fp8) if framework.name == "torch" else pool.astype(fp8) for pool in pools]

    def taken() -> list[Any]:
        pages = list(cache.allocator.pages("a"))
        pools = (*cache.k_pages, *cache.v_pages)
        bits = [p.view(torch.uint8).numpy() if framework.name == "torch" else np.asarray(p) for p in pools]
        return [each[pages].tobytes() for each in bits]

    before = taken()
    assert len(set(before)) == 4
    cache.swap_out("a")
    cache.allocator.allocate("b", 5)
    cache.swap_in("a")
    assert taken() == before


@on_the_cpu
def test_what_is_recorded_is_found_again(framework: Framework) -> None:
    cache = cache_of(framework)
    assert cache.add("a", range(11), salt="adapter") == 0
    write(framework, cache, "a", 11)
    cache.record("a", range(11))
    cache.swap_out("a")
    cache.allocator.allocate("everything", 24)
    cache.free("everything")
    assert cache.allocator.match(range(11), salt="adapter").tokens == 0
    cache.swap_in("a")
    assert cache.allocator.match(range(11), salt="adapter").tokens == 8
    assert cache.add("b", range(11), salt="adapter") == 8
    assert [one[: len(other)] for one, other in zip(content(cache, "a"), content(cache, "b"))] == content(cache, "b")


@on_the_cpu
def test_refusals_change_nothing(framework: Framework) -> None:
    cache = cache_of(framework)
    for name, tokens in (("a", 11), ("b", 5)):
        cache.add(name)
        write(framework, cache, name, tokens)
    cache.fork("b", "c", 4)
    cache.swap_out("a")
    old = cache.step(["c"], [0])
    cache.allocator.allocate("long", 12)
    before = state(cache)
    refused: list[tuple[Callable[[], Any], type[Exception], str]] = [
        (
            lambda: cache.swap_out("b"),
            SpecError,
            "^name='b': .* 1 of its 2 pages are shared, with 'c' for one; free the",
        ),
        (lambda: cache.swap_out("c"), SpecError, "^name='c': expected a sequence that shares no page"),
        (lambda: cache.swap_out("x"), SpecError, "^name='x': expected the name of a sequence of this allocator"),
        (lambda: cache.swap_out("a"), SpecError, "^name='a': expected a sequence in the pool, but this one is swapped"),
        (lambda: cache.swap_in("b"), SpecError, "^name='b': expected the name of a sequence that is swapped out$"),
        (lambda: cache.swap_in([]), SpecError, r"^name=\[\]: expected a hashable value"),
        (lambda: cache.swap_in("a"), PoolFullError, "^'a' needs 3 more pages of 4 tokens, and 1 of the pool's 6"),
        (lambda: cache.step(["b", "a"]), SpecError, "^name='a': .* is swapped out; swap it in first$"),
        (lambda: cache.fork("a", "d"), SpecError, "^name='a': .* is swapped out; swap it in first$"),
        (lambda: cache.add("a"), SpecError, "^name='a': expected a new name"),
        (lambda: cache.add("d", ["1"] * 5), SpecError, r"^tokens\[0\]='1': expected the id of a token"),
        (lambda: cache.record("c", [1] * 5), SpecError, "^tokens: expected at most the 4 that 'c' has, got 5$"),
    ]
    for call, error, says in refused:
        with pytest.raises(error, match=says):
            call()
        assert state(cache) == before, says
    cache.check(old)
    cache.free("long")
    cache.swap_in("a")
    assert cache.allocator.length("a") == 11


@on_the_cpu
def test_a_step_is_outdated_when_its_sequence_was_elsewhere(framework: Framework) -> None:
    cache = cache_of(framework)
    cache.add("a")
    step = write(framework, cache, "a", 3)
    cache.swap_out("a")
    with pytest.raises(SpecError, match=r"^step: sequence 'a' was swapped out after this step was taken"):
        cache.check(step)
    cache.swap_in("a")
    with pytest.raises(SpecError, match=r"^step: sequence 'a' was swapped in after this step was taken"):
        cache.check(step)


@on_the_cpu
def test_freeing_a_sequence_that_is_elsewhere_frees_its_host_memory(framework: Framework) -> None:
    cache = cache_of(framework)
    cache.add("a")
    write(framework, cache, "a", 3)
    cache.swap_out("a")
    cache.free("a")
    assert not cache._swapped and not cache.allocator.swapped
    assert cache.add("a") == 0


@on_the_cpu
@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("place", ["_to_host", "_from_host", "record"])
def test_a_swap_that_fails_half_way(
    framework: Framework, place: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = cache_of(framework)
    cache.add("a")
    write(framework, cache, "a", 7)
    cache.record("a", range(7))
    bits = content(cache, "a")
    if place != "_to_host":
        cache.swap_out("a")
        cache.allocator.allocate("long", 24)
        cache.free("long")
    before = state(cache)

    def fail(*arguments: Any) -> Any:
        raise error("planted")

    with monkeypatch.context() as patch:
        patch.setattr(cache.allocator if place == "record" else cache, place, fail)
        with pytest.raises(error, match="planted"):
            (cache.swap_out if place == "_to_host" else cache.swap_in)("a")
    assert state(cache) == before
    assert cache.allocator.match(range(7)).tokens == (4 if place == "_to_host" else 0)
    if place == "_to_host":
        cache.swap_out("a")
    cache.swap_in("a")
    assert content(cache, "a") == bits and cache.allocator.match(range(7)).tokens == 4


@pytest.mark.parametrize("run", [1, 2, 3, 4])
def test_pools_of_jax_survive_a_return_that_fails_in_any_of_them(run: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = cache_of(JAX)
    cache.add("a")
    write(JAX, cache, "a", 7)
    bits, count = content(cache, "a"), 0
    cache.swap_out("a")
    original = jax_cache.from_host

    def fail(*arguments: Any) -> Any:
        nonlocal count
        count += 1
        if count == run:
            raise MemoryError("planted")
        return original(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(jax_cache, "from_host", fail)
        with pytest.raises(MemoryError, match="planted"):
            cache.swap_in("a")
    assert not any(pool.is_deleted() for pool in (*cache.k_pages, *cache.v_pages))
    cache.swap_in("a")
    assert content(cache, "a") == bits


def test_pools_of_jax_stay_uncommitted_and_committed_ones_stay_where_they_are() -> None:
    for device in (None, jax.devices("cpu")[0]):
        cache = cache_of(JAX, device=device)
        cache.add("a")
        write(JAX, cache, "a", 7)
        before = [(pool.committed, pool.sharding) for pool in (*cache.k_pages, *cache.v_pages)]
        cache.swap_out("a")
        cache.swap_in("a")
        assert [(pool.committed, pool.sharding) for pool in (*cache.k_pages, *cache.v_pages)] == before


def test_jax_compiles_for_powers_of_two() -> None:
    cache = cache_of(JAX, pages=40)
    jax_cache._put_pages.clear_cache()
    for tokens in range(1, 33):
        cache.add(tokens)
        cache.step([tokens], [tokens])
        cache.swap_out(tokens)
        cache.swap_in(tokens)
        cache.free(tokens)
    assert jax_cache._put_pages._cache_size() <= 2 * 4, "keys and values; 1, 2, 4 and 8 pages"


def test_a_device_of_jax_without_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax_cache, "PINNED", "a kind that no device has")
    cache = cache_of(JAX)
    cache.add("a")
    write(JAX, cache, "a", 7)
    before = content(cache, "a")
    cache.swap_out("a")
    assert all(isinstance(each, np.ndarray) for each in cache._swapped["a"].pages)
    cache.swap_in("a")
    assert content(cache, "a") == before


@pytest.mark.cuda
def test_host_memory_is_pinned_on_a_gpu() -> None:
    cache = cache_of(TORCH_ON_GPU)
    cache.allocator.allocate("a", 7)
    cache.swap_out("a")
    assert all(each.is_pinned() for each in cache._swapped["a"].pages.copies)
