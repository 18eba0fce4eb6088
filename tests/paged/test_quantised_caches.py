"""Caches with quantised pages whose keys are rotated: found by content, swapped, sized, and in pools of others."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from frameworks import BOTH, JAX, TORCH, Framework, as_numpy
from quantised_appends import bits

from attn_core.call.spec import BITS
from attn_core.paged.pools import bytes_per_token

pytestmark = pytest.mark.sampled

SIZES = {"num_layers": 2, "kv_heads": 2, "head_dim": 16, "value_dim": 8}
PAGE_SIZE = 4
QUERY_HEADS = 4
on_the_cpu = pytest.mark.parametrize("framework", BOTH, ids=str)
quantised = pytest.mark.parametrize("kv_dtype", BITS)


def cache_of(framework: Framework, kv_dtype: str) -> Any:
    there = torch.bfloat16 if framework.name == "torch" else jnp.bfloat16
    sizes = {**SIZES, "num_pages": 8, "page_size": PAGE_SIZE, "dtype": there, "kv_dtype": kv_dtype}
    return framework.frontend.PagedKVCache(**sizes)


def angles(framework: Framework) -> tuple[Any, Any]:
    turns = np.random.default_rng(3).uniform(-9, 9, (64, 6))
    return framework.array(np.cos(turns), "float32"), framework.array(np.sin(turns), "float32")


def rows(framework: Framework, layer: int, first: int, stop: int) -> list[Any]:
    """q, k and v of the tokens from ``first`` to ``stop`` of one text."""
    random = np.random.default_rng(layer)
    shapes = (40, QUERY_HEADS, 16), (40, 2, 16), (40, 2, 8)
    return [framework.array(random.standard_normal(shape)[first:stop], "bfloat16") for shape in shapes]


def run(framework: Framework, cache: Any, name: str, stop: int) -> list[np.ndarray]:
    """Writes the text up to ``stop`` into a sequence's pages. Returns the outputs of the new tokens."""
    first, rotary = cache.allocator.length(name), angles(framework)
    step, outputs = cache.step([name], [stop - first]), []
    for layer in range(2):
        q, k, v = rows(framework, layer, first, stop)
        cache.update(layer, k, v, step, rotary=rotary, rotary_interleaved=True)
        positions = np.arange(first, stop, dtype=np.int32)
        q = framework.frontend.apply_rotary(q, *rotary, positions=positions, interleaved=True)
        out = cache.attend(layer, q, step)
        outputs.append(as_numpy(out.float() if framework.name == "torch" else out.astype(jnp.float32)))
    return outputs


def content(cache: Any, name: str) -> list[bytes]:
    """The bits of a sequence's tokens and of their scales, in every layer."""
    pages, length = list(cache.allocator.pages(name)), cache.allocator.length(name)
    arrays = (*cache.k_pages, *cache.v_pages, *cache.k_scales, *cache.v_scales)
    taken = [bits(array)[pages] for array in arrays]
    return [each.reshape(-1, *each.shape[2:])[:length].tobytes() for each in taken]


@quantised
def test_torch_and_jax_store_the_same(kv_dtype: str) -> None:
    caches = [cache_of(framework, kv_dtype) for framework in (TORCH, JAX)]
    for framework, cache in zip((TORCH, JAX), caches, strict=True):
        cache.add("a")
        for stop in (11, 12):
            run(framework, cache, "a", stop)
    assert content(caches[0], "a") == content(caches[1], "a")


@on_the_cpu
@quantised
def test_a_sequence_is_swapped_with_its_scales(framework: Framework, kv_dtype: str) -> None:
    cache, stayed = cache_of(framework, kv_dtype), cache_of(framework, kv_dtype)
    for each in (cache, stayed):
        each.add("a")
        run(framework, each, "a", 11)
    before = content(cache, "a")
    cache.swap_out("a")
    cache.add("b")
    run(framework, cache, "b", 26)  # overwrites the pages
    cache.free("b")
    cache.swap_in("a")
    assert content(cache, "a") == before
    for one, other in zip(run(framework, cache, "a", 12), run(framework, stayed, "a", 12), strict=True):
        np.testing.assert_array_equal(one, other)


@on_the_cpu
@quantised
def test_a_prompt_found_by_content_has_the_same_bits(framework: Framework, kv_dtype: str) -> None:
    cache, alone = cache_of(framework, kv_dtype), cache_of(framework, kv_dtype)
    text = list(range(100, 113))
    cache.add("a", text)
    run(framework, cache, "a", 13)
    cache.record("a", text)
    assert cache.add("b", text) == 12
    alone.add("b")
    run(framework, alone, "b", 12)
    for one, other in zip(run(framework, cache, "b", 13), run(framework, alone, "b", 13), strict=True):
        np.testing.assert_array_equal(one, other)
    assert content(cache, "b") == content(alone, "b")


@on_the_cpu
@quantised
def test_a_pool_has_the_bytes_that_its_size_says(framework: Framework, kv_dtype: str) -> None:
    cache = cache_of(framework, kv_dtype)
    actual = sum(each.nbytes for each in (*cache.k_pages, *cache.v_pages, *cache.k_scales, *cache.v_scales))
    assert actual == 8 * PAGE_SIZE * bytes_per_token(**SIZES, dtype=kv_dtype)
    assert framework.frontend.pages_that_fit(actual, page_size=PAGE_SIZE, **SIZES, dtype=kv_dtype) == 8


@on_the_cpu
@pytest.mark.parametrize("backend", ["math", "sdpa_flash"])
@quantised
def test_a_pool_with_heads_outside(framework: Framework, kv_dtype: str, backend: str) -> None:
    """FlashInfer's order of axes: the append and the attention have the results of our own order."""
    kind = {"float8_e4m3fn": "float8_e4m3fn", "int8": "int8", "int4": "uint8"}[kv_dtype]
    dim = 8 if kv_dtype == "int4" else 16
    table = framework.array(np.array([[4, 1], [0, -1]], np.int32))
    tables = {"block_table": table, "seq_lens": framework.array(np.array([7, 3], np.int32))}
    tables["cu_seqlens_q"] = framework.array(np.array([0, 7, 10], np.int32))
    q, k, _ = (each[:10] for each in rows(framework, 0, 0, 16))
    v = rows(framework, 1, 0, 10)[1]
    results = []
    for layout, shape in (("NHD", (6, 2, PAGE_SIZE, 2, dim)), ("HND", (6, 2, 2, PAGE_SIZE, dim))):
        if framework.name == "torch":
            cache = torch.zeros(shape, dtype=torch.uint8).view(getattr(torch, kind))
        else:
            cache = jnp.zeros(shape, kind)
        pools = framework.frontend.pages_of(cache, layout)
        scales = [framework.array(np.ones((6, PAGE_SIZE, 2), np.float32)) for _ in "kv"]
        names = {"k_scales": scales[0], "v_scales": scales[1]}
        *pools, k_scales, v_scales = framework.frontend.append_kv(*pools, k, v, **tables, **names)
        names = {"k_scales": k_scales, "v_scales": v_scales, "backend": backend}
        out = framework.frontend.paged_attention(q, *pools, **tables, **names)
        results.append(as_numpy(out.float() if framework.name == "torch" else out.astype(jnp.float32)))
    np.testing.assert_array_equal(*results)
    assert np.abs(results[0]).max() > 0.1
