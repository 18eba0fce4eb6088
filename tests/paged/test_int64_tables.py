"""int64 tables of paged calls: the bits of int32 tables, in both frontends, eager and compiled."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")
from frameworks import BOTH, JAX, Framework, as_numpy
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_cases import PagedCall, make_paged
from torch._subclasses import FakeTensorMode

import jax_frontend
import torch_frontend
from attn_core import SpecError
from torch_frontend.dispatch.prepared import find
from torch_frontend.paged import paged_calls

pytestmark = pytest.mark.sampled

CALLS = {"decode": make_paged((5, 9, 1), None), "prefill": make_paged((5, 9, 7), (5, 2, 0), window=3)}


def tables(call: PagedCall, array: Any = None, kind: str = "int64") -> dict[str, Any]:
    """The tables of a call in a dtype; array: makes an array of a framework of one in numpy."""
    wide = {name: None if each is None else each.astype(kind) for name, each in call.tables.items()}
    return wide if array is None else {name: None if each is None else array(each) for name, each in wide.items()}


def attended(f: Framework, call: PagedCall, where: dict[str, Any], **options: Any) -> np.ndarray:
    q, k, v = (f.array(array, "float32") for array in call.inputs[:3])
    return as_numpy(f.frontend.paged_attention(q, k, v, **where, window=call.window, **options))


@pytest.mark.parametrize("backend", [None, "math"])
@pytest.mark.parametrize("f", BOTH, ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_they_give_the_bits_of_int32(name: str, f: Framework, backend: str | None) -> None:
    call = CALLS[name]
    expected = attended(f, call, tables(call, kind="int32"), backend=backend)
    assert np.array_equal(attended(f, call, tables(call), backend=backend), expected)
    with jax.enable_x64(f is JAX):
        for mixed in ({}, {"seq_lens": f.array(call.inputs.seq_lens)}):
            where = {**tables(call, f.array), **mixed}
            assert where["block_table"].dtype == (jnp.int64 if f is JAX else torch.int64)
            assert np.array_equal(attended(f, call, where, backend=backend), expected)
            selection = f.frontend.explain_paged(*(f.array(a, "float32") for a in call.inputs[:3]), **where)
            assert selection.backend


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_any_call_of_torch(data: Any) -> None:
    lengths = data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=4))
    new = data.draw(st.none() | st.tuples(*(st.integers(0, length) for length in lengths)))
    call = make_paged(lengths, new, page_size=data.draw(st.sampled_from((1, 3, 16))))
    if call.spec.q_len:
        where = tables(call, data.draw(st.sampled_from((None, torch.tensor))))
        assert np.array_equal(attended(BOTH[0], call, where), attended(BOTH[0], call, tables(call, kind="int32")))


@pytest.mark.parametrize("name", CALLS)
def test_compiled(name: str) -> None:
    call = CALLS[name]
    expected = attended(BOTH[0], call, tables(call, torch.tensor, "int32"))
    q, k, v = (torch.tensor(array, dtype=torch.float32) for array in call.inputs[:3])
    compiled = torch.compile(torch_frontend.paged_attention, fullgraph=True, backend="aot_eager")
    assert np.array_equal(compiled(q, k, v, **tables(call, torch.tensor), window=call.window), expected)
    with FakeTensorMode() as mode:
        fake = {
            key: each if each is None else mode.from_tensor(each) for key, each in tables(call, torch.tensor).items()
        }
        out = torch_frontend.paged_attention(*(mode.from_tensor(each) for each in (q, k, v)), **fake)
    assert out.shape == expected.shape
    with jax.enable_x64(True):
        arrays = [jnp.asarray(array, jnp.float32) for array in call.inputs[:3]]
        run = jax.jit(lambda arrays, where: jax_frontend.paged_attention(*arrays, **where, window=call.window))
        same = attended(JAX, call, tables(call, jnp.asarray, "int32"))
        assert np.array_equal(run(arrays, tables(call, jnp.asarray)), same)


def test_values_beyond_int32_are_refused_by_name() -> None:
    call = CALLS["prefill"]
    for name, at in (("block_table", (0, 2)), ("seq_lens", (1,)), ("cu_seqlens_q", (3,))):
        wide = tables(call)
        wide[name][at] = 2**32 + 1
        says = rf"^{name}\[{', '.join(map(str, at))}\]=4294967297: expected -2147483648 to 2147483647, a value of int32"
        for array in (None, torch.tensor):
            where = wide if array is None else {key: array(each) for key, each in wide.items()}
            with pytest.raises(SpecError, match=says):
                attended(BOTH[0], call, where)
        with pytest.raises(SpecError, match=says):
            attended(JAX, call, wide)


def test_traced_values_beyond_int32_are_clamped() -> None:
    """2^32 + 1 would become page 1 if its last bits were taken."""
    call = make_paged((3,), None, page_size=4, spare=3)
    with jax.enable_x64(True):
        random = np.random.default_rng(0)
        arrays = [jnp.asarray(random.standard_normal(array.shape), jnp.float32) for array in call.inputs[:3]]

        def run(page: int, length: int = 3) -> Any:
            where = {"block_table": jnp.asarray([[page, 0]]), "seq_lens": jnp.asarray([length])}
            return np.asarray(
                jax.jit(lambda where: jax_frontend.paged_attention(*arrays, **where, backend="jax_xla"))(where)
            )

        last = call.inputs.k.shape[0] - 1
        assert np.array_equal(run(2**32 + 1), run(last)) and not np.array_equal(run(2**32 + 1), run(1))
        assert np.array_equal(run(-(2**32) + 1), run(0)) and np.array_equal(run(1, 2**32 + 3), run(1, 8))


def test_prepared_calls_leave_them_to_the_general_one() -> None:
    call = CALLS["decode"]
    q, k, v = (torch.tensor(array, dtype=torch.float32) for array in call.inputs[:3])
    options = (True, None, None, None, False, False, None, None)
    for kind, fits in (("int32", True), ("int64", False)):
        table, lengths, _ = tables(call, torch.tensor, kind).values()
        run = find(paged_calls.prepare_call, q, k, v, (table, lengths, None), options, None)
        assert (run is not None) == fits


@pytest.mark.parametrize("f", BOTH, ids=str)
def test_a_step_with_int64_tables(f: Framework) -> None:
    """Steps that callers build themselves, for a cache."""
    cache = f.frontend.PagedKVCache(num_layers=1, num_pages=4, page_size=4, kv_heads=2, head_dim=8)
    cache.add("a")
    step = cache.step(["a"], 3)
    wide = step._replace(
        **{name: None if t is None else as_numpy(t).astype(np.int64) for name, t in step.tables.items()}
    )
    random = np.random.default_rng(0)
    q, k, v = (f.array(random.standard_normal((3, heads, 8)), "float32") for heads in (4, 2, 2))
    cache.update(0, k, v, wide)
    assert np.array_equal(as_numpy(cache.attend(0, q, wide)), as_numpy(cache.attend(0, q, step)))
