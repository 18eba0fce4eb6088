"""Tests that pools of other libraries are read and written in place, in every layout."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from frameworks import BOTH, JAX, TORCH, TORCH_ON_GPU, Framework
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_cases import PagedCall, make_paged
from torch.profiler import ProfilerActivity, profile

import jax_frontend
import torch_frontend
from attn_core import ShapeError, SpecError
from attn_core.backends.shared import pages as quantised_pages
from attn_core.backends.shared.pages import pools
from attn_core.call.tensors import PagedInputs

pytestmark = pytest.mark.sampled

FORMS: dict[str, tuple[str, Callable[[np.ndarray, np.ndarray], Any]]] = {
    "NHD": ("NHD", lambda k, v: (k, v)),
    "HND": ("HND", lambda k, v: (k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3))),
    "flashinfer NHD": ("NHD", lambda k, v: np.stack((k, v), 1)),
    "flashinfer HND": ("HND", lambda k, v: np.stack((k, v), 1).transpose(0, 1, 3, 2, 4)),
    "vllm": ("vllm", lambda k, v: np.stack((k, v), 1)),
    "vllm, pairs first": ("vllm", lambda k, v: np.stack((k, v), 0)),
    "vllm, split": ("vllm", lambda k, v: (k, v)),
    "interleaved": ("interleaved", lambda k, v: np.stack((k, v), 3).reshape(*k.shape[:2], -1, k.shape[3])),
    "heads first": ("heads_first", lambda k, v: (k.transpose(2, 0, 1, 3), v.transpose(2, 0, 1, 3))),
}
"""The names of layouts, and functions that lay out our pools so, by hand."""


def dense(f: Framework, cache: Any) -> Any:
    """The same numbers as dense arrays of a framework."""
    if isinstance(cache, tuple):
        return tuple(dense(f, each) for each in cache)
    return f.array(np.ascontiguousarray(cache), "float32")


as_torch, as_jax = partial(dense, TORCH), partial(dense, JAX)


def drawn(data: Any) -> PagedCall:
    page_size = data.draw(st.sampled_from((1, 3, 4)))
    lengths = data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=3))
    new = data.draw(st.sampled_from((None, [min(n, 3) for n in lengths])))
    # NaN in every slot without a token: a wrong stride would read it
    return make_paged(lengths, new, page_size=page_size, spare=3, num_kv_heads=data.draw(st.sampled_from((1, 2))))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("backend", ["sdpa_flash", "math"])
@settings(max_examples=8)
@given(st.data())
def test_a_pool_of_another_layout_gives_the_same_bits_in_torch(backend: str, form: str, data: Any) -> None:
    call = drawn(data)
    layout, lay_out = FORMS[form]
    q = torch.tensor(call.inputs.q, dtype=torch.float32)
    tables, options = TORCH.arrays(call.tables), {"backend": backend, "return_lse": True}
    cache = as_torch(lay_out(call.inputs.k, call.inputs.v))
    k, v = torch_frontend.pages_of(cache, layout)
    memory = {each.untyped_storage().data_ptr() for each in (cache if isinstance(cache, tuple) else (cache,))}
    assert {each.untyped_storage().data_ptr() for each in (k, v)} == memory
    expected = torch_frontend.paged_attention(q, *as_torch((call.inputs.k, call.inputs.v)), **tables, **options)
    for one, other in zip(torch_frontend.paged_attention(q, k, v, **tables, **options), expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("backend", ["jax_xla", "math"])
def test_a_pool_of_another_layout_gives_the_same_bits_in_jax(backend: str, form: str) -> None:
    layout, lay_out = FORMS[form]
    call = make_paged((9, 5, 1), (3, 1, 0))
    q, tables = as_jax(call.inputs.q), JAX.arrays(call.tables)
    cache = as_jax(lay_out(call.inputs.k, call.inputs.v))

    def attend(q: Any, cache: Any, tables: Any, layout: str) -> Any:
        views = jax_frontend.pages_of(cache, layout)
        return jax_frontend.paged_attention(q, *views, **tables, backend=backend, return_lse=True)

    expected = attend(q, as_jax((call.inputs.k, call.inputs.v)), tables, "NHD")
    for run in (attend, jax.jit(attend, static_argnums=3)):
        for one, other in zip(run(q, cache, tables, layout), expected, strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("new", [None, (3, 0, 4, 2)])
def test_an_append_writes_into_the_cache_itself(new: Any, form: str) -> None:
    layout, lay_out = FORMS[form]
    call = make_paged((9, 4, 30, 7), new)
    tables = TORCH.arrays(call.tables)
    tokens = 4 if new is None else sum(new)
    k, v = torch.randn(2, tokens, 2, 8)
    expected = torch_frontend.append_kv(*as_torch((call.inputs.k, call.inputs.v)), k, v, **tables)
    cache = as_torch(lay_out(call.inputs.k, call.inputs.v))
    torch_frontend.append_kv(*torch_frontend.pages_of(cache, layout), k, v, **tables)
    written = as_torch(lay_out(*(each.numpy() for each in expected)))
    for one, other in zip(*(each if isinstance(each, tuple) else (each,) for each in (cache, written)), strict=True):
        np.testing.assert_array_equal(one.numpy(), other.numpy())
    appended = jax_frontend.append_kv(
        *jax_frontend.pages_of(as_jax(lay_out(call.inputs.k, call.inputs.v)), layout),
        *map(jnp.asarray, (k.numpy(), v.numpy())),
        **JAX.arrays(call.tables),
    )
    for one, other in zip(appended, expected, strict=True):
        np.testing.assert_array_equal(one, other.numpy())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("new", [None, (3, 0, 4, 2)])
def test_a_device_reads_and_writes_another_layout(new: Any, form: str, device: str) -> None:
    """In half precision, on the kernels that selection picks, which read views of the cache in place on a GPU."""
    layout, lay_out = FORMS[form]
    call = make_paged((90, 4, 300, 7), new, page_size=16, head_dim=64, value_dim=64, dtype="bfloat16")
    tables = (TORCH if device == "cpu" else TORCH_ON_GPU).arrays(call.tables)
    tokens = 4 if new is None else sum(new)
    torch.manual_seed(0)
    q, k, v = (torch.randn(tokens, heads, 64).to(device, torch.bfloat16) for heads in (4, 2, 2))
    pools, cache = (
        tuple(each.to(device, torch.bfloat16) for each in (pair if isinstance(pair, tuple) else (pair,)))
        for pair in (as_torch((call.inputs.k, call.inputs.v)), as_torch(lay_out(call.inputs.k, call.inputs.v)))
    )
    views = torch_frontend.pages_of(cache if len(cache) == 2 else cache[0], layout)
    memory = {each.untyped_storage().data_ptr() for each in cache}
    assert {each.untyped_storage().data_ptr() for each in views} == memory
    results = []
    for each in (pools, views):
        torch_frontend.append_kv(*each, k, v, **tables)
        for _ in range(2):  # the second call repeats the launches of the first
            out, lse = torch_frontend.paged_attention(q, *each, **tables, return_lse=True)
        results.append((out, lse, *each))
    for plain, seen in zip(*results, strict=True):
        torch.testing.assert_close(seen, plain, rtol=0, atol=0, equal_nan=True)
    assert results[0][0].isfinite().all()


# Nothing as large as the pool is allocated.

LARGE = (512, 16, 2, 32)


def most_allocated(run: Callable[[], Any]) -> int:
    """The most bytes that one operation of torch allocated."""
    run()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        run()
    return max((event.cpu_memory_usage for event in recorded.events()), default=0)  # type: ignore[union-attr]


def decoding(views: tuple[torch.Tensor, torch.Tensor], new: Any, backend: str | None) -> Callable[[], Any]:
    lengths = torch.tensor([20, 9], dtype=torch.int32)
    tables = {"block_table": torch.tensor([[3, 7, -1], [5, -1, -1]], dtype=torch.int32), "seq_lens": lengths}
    offsets = None if new is None else torch.tensor([0, *np.cumsum(new)], dtype=torch.int32)
    q = torch.randn(2 if new is None else sum(new), 4, 32)
    return lambda: torch_frontend.paged_attention(q, *views, **tables, cu_seqlens_q=offsets, backend=backend)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("new", [None, (3, 2)])
@pytest.mark.parametrize("backend", [None, "sdpa_flash", "math"])
def test_no_backend_on_a_cpu_copies_the_pool(backend: str | None, new: Any, form: str) -> None:
    layout, lay_out = FORMS[form]
    views = torch_frontend.pages_of(as_torch(lay_out(*np.zeros((2, *LARGE), np.float32))), layout)
    assert most_allocated(decoding(views, new, backend)) < views[0].nbytes / 8
    lengths = torch.tensor([20, 9], dtype=torch.int32)
    tables = {"block_table": torch.tensor([[3, 7], [5, -1]], dtype=torch.int32), "seq_lens": lengths}
    token = torch.randn(2, 2, 32)
    assert most_allocated(lambda: torch_frontend.append_kv(*views, token, token, **tables)) < views[0].nbytes / 8


def test_a_copy_of_the_pool_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    slots = quantised_pages._slots
    monkeypatch.setattr(quantised_pages, "_slots", lambda pool, *place: slots(pool.contiguous(), *place))
    views = torch_frontend.pages_of(torch.zeros(512, 2, 16, 2, 32), "NHD")
    assert most_allocated(decoding(views, (3, 2), "math")) >= views[0].nbytes


@pytest.mark.parametrize("form", FORMS)
def test_xla_reads_the_pool_in_place_on_its_own_backend(form: str) -> None:
    layout, lay_out = FORMS[form]
    cache = as_jax(lay_out(*np.zeros((2, *LARGE), np.float32)))
    tables = jnp.array([[3, 7], [5, -1]], jnp.int32), jnp.array([20, 9], jnp.int32)

    def attend(cache: Any, q: Any, table: Any, lengths: Any) -> Any:
        views = jax_frontend.pages_of(cache, layout)
        return jax_frontend.paged_attention(q, *views, block_table=table, seq_lens=lengths, backend="jax_xla")

    program = jax.jit(attend).lower(cache, jnp.ones((2, 4, 32)), *tables).compile()
    assert program.memory_analysis().temp_size_in_bytes < 4 * np.prod(LARGE) / 8


# Faults and bad input


@pytest.mark.parametrize("fault", ["keys for values", "heads for slots"])
def test_a_wrong_view_changes_the_result(fault: str) -> None:
    call = make_paged((9, 5), page_size=2, num_kv_heads=2)  # page_size and kv_heads agree, so no shape tells
    q, tables = torch.tensor(call.inputs.q, dtype=torch.float32), TORCH.arrays(call.tables)
    cache = as_torch(np.stack((call.inputs.k, call.inputs.v), 1))
    right = torch_frontend.paged_attention(q, *torch_frontend.pages_of(cache, "NHD"), **tables)
    if fault == "heads for slots":
        wrong = torch_frontend.pages_of(cache, "HND")
    else:
        wrong = torch_frontend.pages_of(cache.flip(1), "NHD")
    assert not torch.equal(torch_frontend.paged_attention(q, *wrong, **tables), right)


BAD: dict[str, tuple[Any, Any, type[Exception], str]] = {
    "unknown layout": ((6, 2, 4, 2, 8), "nhd", SpecError, "layout='nhd': expected one of 'NHD', 'HND'"),
    "no text": ((6, 2, 4, 2, 8), 7, SpecError, "layout=7: expected one of"),
    "too few axes": ((6, 4, 2, 8), "NHD", ShapeError, r"cache: expected \[pages, 2, size, heads, dim\] for"),
    "no pair": ((6, 3, 4, 2, 8), "HND", ShapeError, r"got shape \[6, 3, 4, 2, 8\]"),
    "two readings": ((2, 2, 4, 2, 8), "vllm", ShapeError, "pass layout='NHD' if the pages come first, or the pair"),
    "odd heads": ((6, 4, 3, 8), "interleaved", ShapeError, r"2 \* heads"),
    "one array": ((6, 4, 2, 8), "heads_first", SpecError, r"expected a pair \(keys, values\)"),
    "two arrays": (((6, 4, 2, 8),) * 2, "interleaved", SpecError, "expected one array with keys and values, got two"),
    "a pair of five axes": (((6, 4, 2, 8), (6, 2, 4, 2, 8)), "NHD", ShapeError, r"cache\[1\]: expected \[pages, size"),
    "nothing": (None, "NHD", TypeError, "cache: expected a"),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("f", BOTH, ids=str)
def test_bad_input_is_one_clear_error(f: Framework, name: str) -> None:
    shape, layout, kind, text = BAD[name]
    cache = shape
    if shape is not None:
        cache = tuple(f.zeros(*each) for each in shape) if isinstance(shape[0], tuple) else f.zeros(*shape)
    with pytest.raises(kind, match=text):
        f.frontend.pages_of(cache, layout)


def test_a_pool_that_a_gpu_kernel_cannot_read_is_refused_rather_than_copied() -> None:
    table, lengths = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    cache = torch.zeros(6, 4, 4, 9, dtype=torch.float16)  # rows of 18 bytes
    k, v = torch_frontend.pages_of(cache, "interleaved")
    with pytest.raises(ShapeError, match=r"k_pages: expected dense channels, and strides .* a pool is never copied"):
        pools(PagedInputs(torch.zeros(1, 2, 9), k, v, table, lengths))
    k, v = torch_frontend.pages_of(torch.zeros(6, 4, 4, 8, dtype=torch.float16), "interleaved")
    assert all(map(operator.is_, pools(PagedInputs(torch.zeros(1, 2, 8), k, v, table, lengths)), (k, v)))
