"""Tests keys and values in pages: every backend that claims them against the float64 reference, in both frontends.

Everything outside the sequences is NaN (``paged_cases``), so a key read from a wrong place shows in the result.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("torch")
import torch
from both_frontends import DEVICES, FRAMEWORKS, module_on, reachable, same_bits, target
from frameworks import BOTH, EVERYWHERE, TORCH, Framework, as_numpy, empty_plan_caches, jax_on, replaced, spied
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_cases import (
    PagedCall,
    conforms,
    explained,
    judge,
    make_paged,
    most_shared,
    paged_backends,
    paged_calls,
    paged_signatures,
    run,
    torch_arguments,
    without_answers,
)

import jax_frontend
import torch_frontend
from attn_core import NoBackendError, backends, explain
from attn_core.call.tensors import PagedInputs
from attn_core.correctness.reference import append, gather_pages

pytestmark = pytest.mark.sampled

CLAIMED = [
    pytest.param(name, device, marks=(pytest.mark.cuda,) if device == "cuda" else (), id=f"{name}-{device}")
    for name, device in paged_backends()
]
PAGE_SIZES = {"flash2": (256, 512)}
"""For backends that accept only a few of the drawn calls; the others run every drawn call."""


def claims_or_skip(framework: str, backend: str, device: str) -> Any:
    """The backend's claims; skips with the reason if the backend cannot be reached from here."""
    if reason := reachable(framework, backend, device):
        pytest.skip(reason)
    return module_on(backend, device).forward_claims


def call_or_skip(framework: str, backend: str, device: str, *lengths: Any, **fields: Any) -> PagedCall:
    """A call in a dtype and in sizes that the backend accepts; skips with the reason if it accepts none."""
    claims = claims_or_skip(framework, backend, device)
    if fields.get("dtype", "float32") not in claims.dtypes:
        fields["dtype"] = claims.dtypes[0]
    if device == "cuda":
        fields |= {"head_dim": 64, "value_dim": 64}
    fields["page_size"] = PAGE_SIZES.get(backend, (fields.get("page_size", 4),))[0]
    call = make_paged(*lengths, **fields)
    if reasons := explain(call.spec, target(framework, device), backend).reasons(backend):
        pytest.skip("; ".join(reasons))
    return call


# Claims


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize(("backend", "device"), CLAIMED)
def test_drawn_calls_match_the_claims(backend: str, device: str, framework: str) -> None:
    claims, ran = claims_or_skip(framework, backend, device), []
    compiles = framework == "jax"
    drawn = (paged_signatures if compiles else paged_calls)(claims, device == "cuda")
    if not compiles:
        drawn = paged_calls(claims, device == "cuda", PAGE_SIZES.get(backend, ()))

    @settings(max_examples=settings().max_examples // (3 if compiles else 1))
    @given(call=drawn)
    def every_call(call: PagedCall) -> None:
        ran.append(conforms(framework, call, backend, device))

    every_call()
    if not (compiles and backend in PAGE_SIZES):  # few of the signatures have one of its page sizes
        assert sum(ran) > len(ran) / 4, "too few of the drawn calls were run to mean anything"


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("backend", "device"), CLAIMED)
def test_every_claimed_dtype_matches_the_reference(backend: str, device: str, dtype: str) -> None:
    framework = module_on(backend, device).framework
    call = call_or_skip(framework, backend, device, (9, 300, 1, 0), (2, 7, 1, 0), dtype=dtype, return_lse=True)
    assert conforms(framework, call, backend, device)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("device", DEVICES)
def test_automatic_choice(device: str, framework: str) -> None:
    """Some backend runs every call, and runs it correctly."""
    for fields in ({}, {"softcap": 2.0, "sinks": True, "return_lse": True}, {"dtype": "float16", "page_size": 256}):
        call = make_paged((7, 3, 300), (1, 3, 2), **fields, head_dim=64, value_dim=64)
        selection = explained(framework, call, None, device)
        assert selection.backend is not None, str(selection)
        verdict = judge(call, run(framework, call, None, device))
        assert verdict.ok, f"{selection.backend}: {verdict}"


@settings(max_examples=30)
@given(st.one_of(paged_signatures(module_on("math", "cpu").forward_claims)))
def test_math_gives_both_frameworks_the_same_bits(call: PagedCall) -> None:
    assert same_bits(run("torch", call, "math"), run("jax", call, "math")) == []


@given(paged_calls(module_on("math", "cpu").forward_claims))
def test_the_frontend_builds_the_spec_of_a_call(call: PagedCall) -> None:
    assert explained("torch", call).spec == call.spec


def test_both_frontends_build_the_same_spec() -> None:
    for call in (
        make_paged((5, 2), window=3, sinks=True),
        make_paged((5, 2), (3, 2), bound=4, softcap=2.0, scale=0.3, return_lse=True),
        make_paged((5, 2), (3, 2), causal=False, window=(1, None), dtype="bfloat16", host_tables=True),
    ):
        assert explained("torch", call).spec == explained("jax", call).spec == call.spec


# Explanations


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("device", DEVICES)
def test_explain_has_a_reason_for_every_backend_except_the_selected_one(device: str, framework: str) -> None:
    selection = explained(framework, make_paged((5, 2), (3, 2)), None, device)
    assert sorted(selection.considered) == sorted(backends.names())
    claimed = {name for name, _ in paged_backends(device)}
    for name in backends.names():
        if name not in claimed:
            assert selection.reasons(name), name
    where = target(framework, device)
    for name in backends.names():
        module = module_on(name, device)
        reachable_without_pages = framework == module.framework and not explain(plain(), where).reasons(name)
        if reachable_without_pages and not module.forward_claims.paged:
            reasons = selection.reasons(name)
            assert any(why.startswith("keys and values in pages of 4: ") for why in reasons), (name, reasons)
    assert f"{selection.backend}" in str(selection)


def plain() -> Any:
    """A dense call of the same sizes."""
    spec = make_paged((5, 2), (3, 2)).spec
    return replace(spec, paged=None)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_backend_without_pages_is_refused_with_its_reason(framework: str) -> None:
    with pytest.raises(NoBackendError, match="keys and values in pages of 4: FlexAttention on CPU has none"):
        run(framework, make_paged((5, 2), (3, 2)), "flex")


def test_use_backend_chooses_the_backend() -> None:
    call = make_paged((5, 2), (3, 2))
    expected = {name: run("jax", call, name) for name in ("math", "jax_xla")}
    for name in expected:
        with jax_frontend.use_backend(name):
            assert explained("jax", call).backend == name
            assert same_bits(run("jax", replace(call, host_tables=True)), expected[name]) == []
    with torch_frontend.use_backend("flex"), pytest.raises(NoBackendError, match="keys and values in pages"):
        run("torch", call)
    with torch_frontend.use_backend("flex", "math"):
        assert same_bits(run("torch", call), expected["math"]) == []


# Meaning


ALONE = ({"window": 5}, {}, {"softcap": 1.5, "sinks": True}, {"window": (3, None)})
EACH_ALONE = [  # JAX on the CPU compiles for each sequence's shape, so jax_xla runs only one case
    pytest.param(*entry.values, fields, framework, marks=entry.marks, id=f"{entry.id}-{framework}-{fields}")
    for entry in CLAIMED
    for framework in FRAMEWORKS
    for fields in ALONE[: 1 if (framework, entry.values[1]) == ("jax", "cpu") else None]
]


@pytest.mark.parametrize(("backend", "device", "fields", "framework"), EACH_ALONE)
def test_results_equal_attention_on_each_sequence(backend: str, device: str, fields: Any, framework: str) -> None:
    """The same as ``attention`` on each sequence's own keys, one sequence at a time."""
    call = call_or_skip(framework, backend, device, (11, 6), (4, 6), **fields)
    out = run(framework, call, backend, device)["out"]
    spec, inputs = gather_pages(call.spec, call.inputs)
    f = next(each for each in BOTH if each.name == framework)
    offsets = zip(np.split(np.arange(10), [4]), np.split(np.arange(17), [11]), strict=True)
    rough = 2e-2 if spec.dtype in ("bfloat16", "float16") else 5e-6
    with jax_on("cpu"):
        sinks = {} if inputs.sinks is None else {"sinks": f.array(inputs.sinks, spec.dtype)}
        for queries, keys in offsets:
            parts = (f.array(array[at][None], spec.dtype) for array, at in zip(inputs[:3], (queries, keys, keys)))
            alone = f.frontend.attention(*parts, causal=True, window=call.window, softcap=spec.softcap, **sinks)
            np.testing.assert_allclose(out[queries].astype(np.float32), as_numpy(alone)[0], atol=rough, rtol=rough)


@pytest.mark.on_gpus(only=lambda chunk, **_: chunk == 2)
@pytest.mark.parametrize("chunk", [1, 2, 5])
@pytest.mark.parametrize("framework", EVERYWHERE, ids=str)
def test_a_prefill_in_chunks_equals_one_prefill(framework: Framework, chunk: int) -> None:
    """A cache fed in chunks, with other sequences in between, gives the result of dense attention on the whole
    sequence."""
    heads, kv_heads, dim, lengths = 4, 2, 16, {"a": 10, "b": 7}
    random, rough = np.random.default_rng(chunk), 3e-6 if framework.device == "cpu" else 1e-4
    with framework.as_default():
        cache = framework.frontend.PagedKVCache(
            num_layers=2, num_pages=8, page_size=3, kv_heads=kv_heads, head_dim=dim, device=_device(framework)
        )
        tokens = {
            name: [random.standard_normal((n, h, dim)).astype(np.float32) for h in (heads, kv_heads, kv_heads)]
            for name, n in lengths.items()
        }
        for name in lengths:
            cache.add(name)
        made: dict[str, list[Any]] = {name: [] for name in lengths}
        for start in range(0, max(lengths.values()), chunk):
            names = [name for name, length in lengths.items() if start < length]
            parts = {name: [array[start : start + chunk] for array in tokens[name]] for name in names}
            step = cache.step(names, [len(parts[name][0]) for name in names])
            q, k, v = (framework.array(np.concatenate([parts[name][at] for name in names])) for at in range(3))
            for layer in range(2):
                cache.update(layer, k * (layer + 1), v, step)
            rows = np.split(as_numpy(cache.attend(1, q, step)), np.cumsum([len(parts[name][0]) for name in names]))
            for name, part in zip(names, rows):
                made[name].append(part)
        for name, (q, k, v) in tokens.items():
            dense = framework.frontend.attention(*(framework.array(x[None]) for x in (q, 2 * k, v)), causal=True)
            np.testing.assert_allclose(np.concatenate(made[name]), as_numpy(dense)[0], atol=rough, rtol=rough)
    assert cache.allocator.report().waste < cache.allocator.page_size * len(lengths)
    assert "2 layers, 2 sequences" in repr(cache)


def _device(framework: Framework) -> Any:
    return framework.device if framework.name == "torch" else None


@pytest.mark.parametrize("framework", EVERYWHERE, ids=str)
def test_a_cache_copies_shared_pages_before_writing_and_reuses_freed_pages(framework: Framework) -> None:
    """Forks with a common beginning continue separately; a freed page full of NaN serves another sequence."""
    with framework.as_default():
        cache = framework.frontend.PagedKVCache(
            num_layers=1, num_pages=4, page_size=4, kv_heads=1, head_dim=16, value_dim=16, device=_device(framework)
        )

        def append_tokens(names: list[str], values: list[float], width: int | None = None) -> np.ndarray:
            """Appends one token to each sequence, with a key of zeros so that the output is the mean of the values."""
            step = cache.step(names, width=width)
            v = np.repeat(np.array(values, np.float32), 16).reshape(len(names), 1, 16)
            cache.update(0, framework.array(np.zeros_like(v)), framework.array(v), step)
            return as_numpy(cache.attend(0, framework.array(np.zeros_like(v)), step))[:, 0, 0]

        cache.add("poison")
        for _ in range(16):
            append_tokens(["poison"], [np.nan])
        assert cache.allocator.report().free == 0
        cache.free("poison")
        cache.add("a")
        assert append_tokens(["a"], [1.0]).tolist() == [1.0]
        assert append_tokens(["a"], [3.0]).tolist() == [2.0]
        cache.fork("a", "b")
        cache.fork("a", "c", 1)
        assert cache.allocator.report().shared == 1
        np.testing.assert_allclose(append_tokens(["b", "a", "c"], [5.0, 11.0, 7.0]), [3.0, 5.0, 4.0], rtol=1e-5)
        np.testing.assert_allclose(append_tokens(["a", "c"], [1.0, 1.0], width=3), [4.0, 3.0], rtol=1e-5)
        assert cache.allocator.report().shared == 0
        cache.free("a")
        cache.add("d")
        np.testing.assert_allclose(append_tokens(["d", "b"], [2.0, 3.0]), [2.0, 3.0], rtol=1e-5)


# The append


@st.composite
def appends(draw: Any) -> PagedCall:
    page_size = draw(st.sampled_from((1, 3, 16)))
    lengths = draw(st.lists(st.integers(1, 30), min_size=1, max_size=4))
    new = None if draw(st.booleans()) else [draw(st.integers(0, n)) for n in lengths]
    heads = draw(st.sampled_from(((1, 8, 8), (3, 5, 16))))
    sizes = dict(zip(("num_kv_heads", "head_dim", "value_dim"), heads))
    dtype = draw(st.sampled_from(("float32", "bfloat16", "float16")))
    layout = draw(st.sampled_from(("contiguous", "heads_outside", "one_tensor", "interleaved")))
    passing = {"layout": layout, "host_tables": draw(st.booleans()), "seed": draw(st.integers(0, 99))}
    return make_paged(lengths, new, page_size=page_size, num_heads=heads[0], **sizes, dtype=dtype, **passing)


def new_tokens(call: PagedCall) -> tuple[np.ndarray, np.ndarray]:
    random, spec = np.random.default_rng(call.seed + 1), call.spec
    return tuple(random.integers(-99, 99, (spec.q_len, spec.num_kv_heads, d)) for d in (spec.head_dim, spec.value_dim))


def appended(call: PagedCall, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The pools after the reference's append."""
    cu = call.inputs.cu_seqlens_q
    cu = np.arange(len(call.inputs.seq_lens) + 1) if cu is None else cu
    pools = ((call.inputs.k, k), (call.inputs.v, v))
    return tuple(append(pool, new, call.inputs.block_table, call.inputs.seq_lens, cu) for pool, new in pools)


@pytest.mark.parametrize("framework", EVERYWHERE, ids=str)
def test_append_writes_only_the_new_tokens(framework: Framework) -> None:
    on_jax = framework.name == "jax"

    @settings(max_examples=8 if on_jax else settings().max_examples)
    @given(appends())
    def every_append(call: PagedCall) -> None:
        k, v = new_tokens(call)
        arrays = [framework.array(array, call.spec.dtype) for array in (call.inputs.k, call.inputs.v, k, v)]
        if not on_jax:
            arrays[:2] = torch_arguments(call, framework.device)[0][1:]
        tables = {n: t if t is None or call.host_tables else framework.array(t) for n, t in call.tables.items()}
        places = [array.data_ptr() for array in arrays[:2]] if not on_jax else []
        actual = framework.frontend.append_kv(*arrays, **tables)
        for pool, expected in zip(actual, appended(call, k, v)):
            np.testing.assert_array_equal(as_numpy(pool), expected.astype(np.float32))
        if not on_jax:
            assert all(one is other for one, other in zip(actual, arrays))
            assert [pool.data_ptr() for pool in actual] == places

    with framework.as_default():
        every_append()


@pytest.mark.parametrize("framework", EVERYWHERE[1::2], ids=str)
def test_jax_appends_in_place(framework: Framework) -> None:
    call = make_paged((5, 2), (3, 2))
    with jax_on(framework.device):
        pools = [framework.array(np.nan_to_num(pool), "float32") for pool in (call.inputs.k, call.inputs.v)]
        before = [pool.unsafe_buffer_pointer() for pool in pools]
        k, v = (framework.array(new, "float32") for new in new_tokens(call))
        actual = jax_frontend.append_kv(*pools, k, v, **call.tables)
        assert [pool.unsafe_buffer_pointer() for pool in actual] == before
        assert all(pool.is_deleted() for pool in pools), "a pool that was passed on is gone"
        assert not k.is_deleted() and not v.is_deleted()


def test_traced_tokens_without_a_place_are_not_written() -> None:
    """Inside jit nothing can raise, and nothing may be written elsewhere."""
    pool = jnp.zeros((3, 2, 1, 1))
    new = jnp.arange(1.0, 5.0).reshape(4, 1, 1)
    appended = jax.jit(
        lambda table, lengths: jax_frontend.append_kv(pool, pool, new, new, block_table=table, seq_lens=lengths)
    )
    cases = (
        ([[0, 1], [2, -1], [-1, -1], [3, 3]], [3, 2, 1, 1], {(1, 0): 1, (2, 1): 2}),
        ([[0, 1]] * 4, [5, 0, -3, 4], {(1, 1): 4}),
        ([[2**31 - 1, -(2**31)]] * 4, [1, 2, 3, 4], {}),
    )
    for table, lengths, places in cases:
        actual, _ = appended(jnp.array(table, jnp.int32), jnp.array(lengths, jnp.int32))
        expected = np.zeros((3, 2, 1, 1))
        for place, value in places.items():
            expected[place] = value
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("framework", EVERYWHERE, ids=str)
def test_append_of_no_tokens(framework: Framework) -> None:
    call = make_paged((5, 2), (0, 0))
    with framework.as_default():
        pools = [framework.array(pool, "float32") for pool in (call.inputs.k, call.inputs.v)]
        k, v = (framework.array(new, "float32") for new in new_tokens(call))
        for pool, before in zip(framework.frontend.append_kv(*pools, k, v, **call.tables), call.inputs[1:3]):
            np.testing.assert_array_equal(as_numpy(pool), before.astype(np.float32))


# Empty calls


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize(("backend", "device"), CLAIMED)
def test_without_keys_the_output_is_0_and_the_lse_is_minus_infinity(backend: str, device: str, framework: str) -> None:
    call = call_or_skip(framework, backend, device, (3, 0, 5), (2, 0, 1), return_lse=True, window=(None, None))
    inputs = call.inputs._replace(seq_lens=np.array([3, 0, 1], np.int32))
    call = replace(call, inputs=inputs, spec=replace(call.spec, causal=False))
    actual = run(framework, call, backend, device)
    assert judge(call, actual).ok
    if device == "cpu":  # more new tokens than keys: the first rows see nothing
        short = call_or_skip(framework, backend, device, (2, 0, 1, 9), (5, 3, 1, 2), return_lse=True)
        assert judge(short, run(framework, short, backend, device)).ok
    beyond = call_or_skip(framework, backend, device, (6, 5), (1, 1), return_lse=True, causal=False, window=(0, 0))
    assert judge(beyond, run(framework, beyond, backend, device)).ok


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("lengths, new", [((), None), ((0, 0), (0, 0)), ((4, 0), (0, 0))], ids=str)
def test_calls_without_queries(device: str, framework: str, lengths: Any, new: Any) -> None:
    call = make_paged(lengths, new, return_lse=True)
    actual = run(framework, call, None, device)
    assert actual["out"].shape == (0, 4, 8) and actual["lse"].shape == (4, 0)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("device", DEVICES)
def test_empty_pools_and_tables(device: str, framework: str) -> None:
    for fields in ({"wider": 0}, {"spare": 0}):
        call = make_paged((0, 0), (0, 0), **fields, return_lse=True)
        assert run(framework, call, None, device)["out"].shape == (0, 4, 8)


# Wrong tables that the host cannot check


LIES: dict[str, dict[str, Any]] = {
    "pages beyond the pool": {"block_table": [[9, 10**6, 2**31 - 1], [12, 99, 7], [0, 1, 9]]},
    "pages below it": {"block_table": [[-1, -2, -(2**31)], [-1, -1, -1], [0, -5, -1]]},
    "lengths beyond the table": {"seq_lens": [10**6, 2**31 - 1, 13]},
    "negative lengths": {"seq_lens": [-1, -(2**31), -7]},
    "fewer tokens than queries": {"seq_lens": [1, 0, 2]},
    "offsets beyond the queries": {"cu_seqlens_q": [0, 500, 10**6, 2**31 - 1]},
    "offsets that go back": {"cu_seqlens_q": [7, 3, -2, -(2**31)]},
    "everything": {
        "block_table": [[2**31 - 1, -(2**31), 50], [-9, 9, 9], [8, 8, 8]],
        "seq_lens": [2**31 - 1, -(2**31), 999],
        "cu_seqlens_q": [2**31 - 1, -(2**31), 99, -1],
    },
}


def with_wrong_tables(call: PagedCall, lie: str) -> PagedCall:
    """The call with tables that no call can have, and finite numbers all over the pool."""
    tables = {name: np.array(table, np.int32) for name, table in LIES[lie].items()}
    if "block_table" in tables:
        width = call.spec.paged.width
        tables["block_table"] = np.resize(tables["block_table"], (3, width)).astype(np.int32)
    return replace(without_answers(call), inputs=without_answers(call).inputs._replace(**tables))


LIED_TO = [  # of JAX's own backends below: an array of JAX is no slice of another array
    pytest.param(*entry.values, lie, new, marks=entry.marks, id=f"{entry.id}-{lie}-{'prefill' if new else 'decode'}")
    for entry in CLAIMED
    for lie in LIES
    for new in (None, (4, 1, 3))
    if entry.values[1] == "cuda"
    and module_on(*entry.values).framework == "torch"
    and (new or "cu_seqlens_q" not in LIES[lie] or len(LIES[lie]) > 1)
]


@pytest.mark.parametrize(("backend", "device", "lie", "new"), LIED_TO)
def test_wrong_tables_on_a_gpu_never_read_outside_the_pool(backend: str, device: str, lie: str, new: Any) -> None:
    """The pool is the middle of a tensor that is NaN on both sides, so a read outside would show."""
    call = with_wrong_tables(call_or_skip("torch", backend, device, (9, 5, 7), new, return_lse=True), lie)
    if new is None:
        call = replace(call, inputs=call.inputs._replace(cu_seqlens_q=None))
    (q, *pools), tables = torch_arguments(call, device)
    pools = [amid_nan(pool) for pool in pools]
    out, lse = torch_frontend.paged_attention(q, *pools, **tables, causal=True, return_lse=True, backend=backend)
    torch.cuda.synchronize()
    assert out.isfinite().all(), "NaN from outside the pool, or from memory that nobody wrote"
    assert not lse.isnan().any()


def amid_nan(pool: torch.Tensor) -> torch.Tensor:
    """The same pool between as many pages of NaN on both sides."""
    wide = pool.new_full((3 * len(pool), *pool.shape[1:]), torch.nan)
    wide[len(pool) : 2 * len(pool)] = pool
    return wide[len(pool) : 2 * len(pool)]


@pytest.mark.cuda
@pytest.mark.parametrize("lie", LIES)
def test_appends_on_a_gpu_never_write_outside_the_pool(lie: str) -> None:
    call = with_wrong_tables(make_paged((9, 5, 7), (4, 1, 3)), lie)
    (_, *pools), tables = torch_arguments(call, "cuda")
    pools = [amid_nan(pool) for pool in pools]
    whole = [pool._base for pool in pools]
    k, v = (torch.tensor(new, dtype=torch.float32, device="cuda") for new in new_tokens(call))
    torch_frontend.append_kv(*pools, k, v, **tables)
    torch.cuda.synchronize()
    for wide, pool in zip(whole, pools):
        assert wide[: len(pool)].isnan().all() and wide[2 * len(pool) :].isnan().all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("new", [None, (4, 1, 3)], ids=["decode", "prefill"])
def test_wrong_traced_tables_never_read_outside_the_pool(device: str, new: Any) -> None:
    backend = "jax_xla"
    call = call_or_skip("jax", backend, device, (9, 5, 7), new, return_lse=True)
    for lie in LIES:
        if new is not None or set(LIES[lie]) != {"cu_seqlens_q"}:
            wrong = with_wrong_tables(call, lie)
            wrong = wrong if new else replace(wrong, inputs=wrong.inputs._replace(cu_seqlens_q=None))
            actual = run("jax", wrong, backend, device)
            assert np.isfinite(actual["out"].astype(np.float32)).all() and not np.isnan(actual["lse"]).any(), lie


def test_a_bridged_kernel_on_the_cpu_refuses_wrong_tables() -> None:
    """It sees the tables, also inside jit, and names the fault."""
    for lie, name in (("pages beyond the pool", "block_table"), ("negative lengths", "seq_lens")):
        with pytest.raises(Exception, match=rf"{name}\["):
            run("jax", with_wrong_tables(make_paged((9, 5, 7), (4, 1, 3)), lie), "math")


# The suite must be able to fail


def misread(**changes: Any) -> Any:
    return lambda spec, inputs: (replace(spec, **{name: change(spec) for name, change in changes.items()}), inputs)


def swapped_rows(spec: Any, inputs: PagedInputs) -> tuple[Any, PagedInputs]:
    table = inputs.block_table
    return spec, inputs._replace(block_table=table[::-1] if isinstance(table, jax.Array) else table.flip(0))


def one_token_short(spec: Any, inputs: PagedInputs) -> tuple[Any, PagedInputs]:
    return spec, inputs._replace(seq_lens=inputs.seq_lens - 1)


def swapped_heads(spec: Any, inputs: PagedInputs) -> tuple[Any, PagedInputs]:
    pools = (pool[:, :, ::-1] if isinstance(pool, jax.Array) else pool.flip(2) for pool in inputs[1:3])
    return spec, inputs._replace(**dict(zip(("k", "v"), pools)))


def aligned_at_the_top_left(spec: Any, inputs: PagedInputs) -> tuple[Any, PagedInputs]:
    wrong = copy(spec)
    object.__setattr__(wrong, "alignment", "top_left")  # a paged spec refuses it
    return wrong, inputs


FAULTS: dict[str, Any] = {
    "window one wider": misread(window=lambda spec: (spec.window[0] + 1, spec.window[1])),
    "window one narrower": misread(window=lambda spec: (spec.window[0] - 1, spec.window[1])),
    "diagonal one off": misread(causal=lambda spec: False, window=lambda spec: (spec.window[0], 1)),
    "scale one percent off": misread(scale=lambda spec: spec.scale * 1.01),
    "softcap forgotten": misread(softcap=lambda spec: None),
    "kv heads of the wrong groups": swapped_heads,
    "rows of the table swapped": swapped_rows,
    "one token short": one_token_short,
}


@contextmanager
def planted_fault(backend: str, device: str, fault: Any) -> Iterator[None]:
    """A backend that misreads its calls."""
    record = module_on(backend, device)
    forward = record.forward

    def misreading(spec: Any, inputs: Any, *into: Any) -> Any:  # backends that gather call themselves on dense keys
        return forward(*(fault(spec, inputs) if spec.paged else (spec, inputs)), *into)

    # Without its shortcut torch's calls take the forward, too.
    pages = record.pages and replace(record.pages, shortcut=lambda spec: None)
    with replaced(record, forward=misreading, pages=pages):
        yield


FEW_FAULTS = ("window one wider", "rows of the table swapped")
"""For XLA on the CPU, which needs seconds to compile each."""
PLANTED = [
    pytest.param(*entry.values, name, marks=entry.marks, id=f"{entry.id}-{name}")
    for entry in CLAIMED
    for name in (FEW_FAULTS if entry.values == ("jax_xla", "cpu") else FAULTS)
]


@pytest.mark.parametrize(("backend", "device", "name"), PLANTED)
def test_planted_faults_are_caught(backend: str, device: str, name: str) -> None:
    framework = module_on(backend, device).framework
    peaked = {"scale": 1.0, "softcap": 20.0, "window": 9, "dtype": "float32" if device == "cpu" else "float16"}
    if peaked["dtype"] not in claims_or_skip(framework, backend, device).dtypes:
        peaked["dtype"] = module_on(backend, device).forward_claims.dtypes[0]
    call = call_or_skip(framework, backend, device, (23, 21), (7, 5), return_lse=True, **peaked)
    call = without_answers(call)  # a NaN would show with any bound
    with planted_fault(backend, device, FAULTS[name]):
        verdict = judge(call, run(framework, call, backend, device))
    assert {quantity.name for quantity in verdict.quantities if quantity.use > 1} == {"out", "lse"}, verdict
    healthy = judge(call, run(framework, call, backend, device))
    assert healthy.ok, healthy


@pytest.mark.parametrize("backend", ["math", "sdpa_flash"])
def test_a_diagonal_at_the_other_end_is_found(backend: str) -> None:
    """With more new tokens than keys the first rows see nothing. With the fault they see keys."""
    call = without_answers(call_or_skip("torch", backend, "cpu", (2, 0, 1, 9), (5, 3, 1, 2), return_lse=True))
    with planted_fault(backend, "cpu", aligned_at_the_top_left):
        verdict = judge(call, run("torch", call, backend))
    assert {quantity.name for quantity in verdict.quantities if quantity.use > 1} == {"out", "lse"}, verdict
    healthy = judge(call, run("torch", call, backend))
    assert healthy.ok, healthy


def test_one_token_too_many_reads_nan() -> None:
    """The NaN behind the end of a sequence shows in the result."""
    call = make_paged((5, 6), (2, 2), causal=False)
    with planted_fault("math", "cpu", lambda spec, inputs: (spec, inputs._replace(seq_lens=inputs.seq_lens + 1))):
        assert np.isnan(run("torch", call, "math")["out"]).any()


@pytest.mark.parametrize("framework", EVERYWHERE, ids=str)
def test_shared_pages_are_read_by_both(framework: Framework) -> None:
    lengths, page_size = (12, 10), 4
    assert most_shared(lengths, page_size) == 3
    backend = "math" if framework is TORCH else None
    for shared in (1, 2, 3):
        call = make_paged(lengths, (2, 3), page_size=page_size, shared=shared, head_dim=64, value_dim=64)
        assert (call.inputs.block_table[0, :shared] == call.inputs.block_table[1, :shared]).all()
        assert judge(call, run(framework.name, call, backend, framework.device)).ok


def test_the_explained_backend_runs() -> None:
    call = make_paged((5, 2), (3, 2))
    empty_plan_caches(programs=False)
    with spied() as ran:
        run("torch", call)
    empty_plan_caches(programs=False)
    assert ran[0] == explained("torch", call).backend
