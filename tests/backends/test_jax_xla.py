"""Tests jax_xla against the float64 reference: every feature, the lowering paths, and the cost of tracing."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
import jax.numpy as jnp
import xla_compiler
from callers_view import callers_results
from oracle_cases import fill

from attn_core.backends import jax_xla
from attn_core.backends.jax_xla import tiles, whole
from attn_core.backends.jax_xla.tiles import BlockSizes
from attn_core.backends.shared.in_jax import safe_offsets
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Gradients, Inputs
from attn_core.correctness import reference

pytestmark = pytest.mark.sampled

TOLERANCE = {"float64": 1e-12, "float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}
LSE_TOLERANCE = {"float64": 1e-12, "float32": 2e-5, "float16": 2e-4, "bfloat16": 2e-4}

DENSE = AttentionSpec(
    batch=2, q_len=13, kv_len=17, num_heads=6, num_kv_heads=2, head_dim=11, value_dim=11, dtype="float32"
)
LENGTHS = ((5, 0, 7, 3, 8), (7, 4, 0, 5, 3))  # the query and key lengths of each document
PACKED = replace(DENSE, batch=1, q_len=23, kv_len=19, documents=5, max_len_q=8, max_len_k=7)

CASES = {
    "plain": DENSE,
    "one query": replace(DENSE, q_len=1, causal=True),
    "causal": replace(DENSE, causal=True),
    "causal, top left": replace(DENSE, causal=True, alignment="top_left"),
    "causal, rows that see nothing": replace(DENSE, q_len=17, kv_len=13, causal=True),
    "window": replace(DENSE, window=(3, 2)),
    "window, top left": replace(DENSE, window=(3, 2), alignment="top_left"),
    "window, one side": replace(DENSE, q_len=17, window=(None, 2)),
    "window, rows that see nothing": replace(DENSE, q_len=29, window=(1, 1), alignment="top_left"),
    "window, far": replace(DENSE, window=(2**40, 2**40)),
    "softcap": replace(DENSE, softcap=1.5, scale=0.9),
    "value_dim": replace(DENSE, value_dim=5),
    "mask": replace(DENSE, mask_shape=(2, 6, 13, 17)),
    "mask of keys": replace(DENSE, mask_shape=(2, 1, 1, 17)),
    "bias": replace(DENSE, bias_shape=(2, 6, 13, 17), bias_gradient=True),
    "bias of heads": replace(DENSE, bias_shape=(1, 6, 1, 17), bias_gradient=True, mask_shape=(2, 1, 13, 1)),
    "bias of rows": replace(DENSE, bias_shape=(1, 1, 13, 1), bias_gradient=True, softcap=2.0),
    "alibi": replace(DENSE, alibi_shape=(6,), causal=True),
    "alibi of batch": replace(DENSE, alibi_shape=(2, 6), alignment="top_left"),
    "sinks": replace(DENSE, sinks=True, mask_shape=(2, 1, 13, 17)),
    "sinks, rows that see nothing": replace(DENSE, q_len=17, kv_len=13, causal=True, sinks=True),
    "dropout": replace(DENSE, dropout=0.3, sinks=True),
    "packed": PACKED,
    "packed, causal": replace(PACKED, causal=True),
    "packed, window": replace(PACKED, window=(2, 1), alignment="top_left"),
    "packed, everything": replace(
        PACKED,
        causal=True,
        window=(4, 0),
        softcap=3.0,
        value_dim=7,
        alibi_shape=(6,),
        bias_shape=(1, 6, 23, 19),
        bias_gradient=True,
        mask_shape=(1, 1, 23, 19),
        sinks=True,
        dropout=0.2,
    ),
}


def make_inputs(spec: AttentionSpec, seed: int = 0) -> Inputs:
    """Random numpy inputs of a spec. The first row of a mask sees nothing, and a seventh of a bias is -inf."""
    inputs = fill(spec, seed, *LENGTHS).inputs
    if inputs.mask is not None:
        inputs.mask[..., :1, :] &= spec.mask_shape[2] == 1
    if inputs.bias is not None:
        inputs.bias.flat[::7] = -np.inf
    return inputs._replace(rng=np.asarray([2**32 - 5, 11], np.uint32) if spec.dropout else None)


def on_device(spec: AttentionSpec, inputs: Inputs) -> Inputs:
    return Inputs(
        *(
            None if array is None else jnp.asarray(array, spec.dtype if array.dtype == np.float64 else array.dtype)
            for array in inputs
        )
    )


@partial(jax.jit, static_argnums=0)
def run_both(spec: AttentionSpec, inputs: Inputs, dout: Any, dlse: Any) -> tuple[Any, ...]:
    out, lse = jax_xla.forward(spec, inputs)
    return out, lse, *jax_xla.backward(spec, inputs, out, lse, dout, dlse)


def compare(spec: AttentionSpec, seed: int = 0) -> None:
    inputs = make_inputs(spec, seed)
    random = np.random.default_rng(seed + 1)
    dout = np.asarray(jnp.asarray(random.standard_normal(spec.out_shape), spec.dtype), np.float64)
    dlse = random.standard_normal(spec.lse_shape)
    out, lse = reference.forward(spec, inputs)
    expected = (out, lse, *reference.backward(spec, inputs, out, lse, dout, dlse))
    got = run_both(spec, on_device(spec, inputs), jnp.asarray(dout, spec.dtype), jnp.asarray(dlse, spec.lse_dtype))
    lse, gradients = callers_results(spec, inputs, got[1], Gradients(*got[2:]), dlse)
    shown = {"lse": lse, "dsinks": gradients.dsinks}
    for name, actual, right in zip(("out", "lse", *Gradients._fields), got, expected, strict=True):
        if right is None:
            assert actual is None, name
            continue
        assert actual.shape == right.shape, name
        assert actual.dtype == (spec.lse_dtype if name == "lse" else spec.dtype), name
        tolerance = LSE_TOLERANCE[spec.dtype] if name == "lse" else TOLERANCE[spec.dtype] * max(1, abs(right).max())
        actual = np.asarray(shown.get(name, actual), np.float64)
        np.testing.assert_allclose(actual, right, rtol=0, atol=tolerance, err_msg=name)


@pytest.fixture(params=["few queries", "whole", "blocked"])
def path(request, monkeypatch):
    """The algorithm of a case."""
    monkeypatch.setattr(jax_xla, "MAX_SCORES", 0 if request.param == "blocked" else 2**40)
    monkeypatch.setattr(whole, "FEW_QUERIES", 2**10 if request.param == "few queries" else 0)
    return request.param


def on_path(path: str, spec: AttentionSpec) -> AttentionSpec:
    """The spec, once jit has forgotten the other paths' programs."""
    jax.clear_caches()
    chosen = jax_xla.lower(spec)["path"]
    assert chosen == ("whole" if path == "few queries" and spec.packed else path)
    return spec


@pytest.mark.parametrize("name", CASES)
def test_float32_matches_the_reference(name, path):
    compare(on_path(path, CASES[name]))


@pytest.mark.parametrize("name", ["causal", "packed, everything", "one query"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_matches_the_reference(name, dtype, path):
    compare(on_path(path, replace(CASES[name], dtype=dtype)))


@pytest.mark.parametrize("name", ["causal", "packed, everything", "window, rows that see nothing", "bias of heads"])
def test_float64_matches_the_reference(name, path):
    with jax.enable_x64(True):
        compare(on_path(path, replace(CASES[name], dtype="float64")))


@pytest.mark.parametrize("name", ["one query", "mask of keys", "sinks", "bias of heads", "alibi"])
@pytest.mark.parametrize("heads", [2, 6])
def test_few_queries_match_the_reference(name, heads):
    """Few queries read keys and values in place: of all kv heads in one product, or in bfloat16 head by head."""
    shapes = {
        field: (*shape[:2], min(shape[2], 3), shape[3])
        for field in ("mask_shape", "bias_shape")
        if (shape := getattr(CASES[name], field))
    }
    spec = replace(CASES[name], q_len=3, num_kv_heads=heads, **shapes)
    compare(spec)
    compare(replace(spec, dtype="bfloat16"))


@pytest.mark.parametrize("needs_backward", [False, True])
@pytest.mark.parametrize("name", [name for name, spec in CASES.items() if not spec.dropout])
def test_as_many_kv_heads_as_query_heads_match_the_reference(name, needs_backward, monkeypatch):
    """A forward alone then has one axis of heads."""
    monkeypatch.setattr(whole, "FEW_QUERIES", 0)
    compare(replace(CASES[name], num_kv_heads=6, needs_backward=needs_backward))


@pytest.mark.parametrize("name", ["value_dim", "bias of rows", "alibi of batch", "one query"])
def test_long_rows_of_bfloat16_match_the_reference(name, monkeypatch):
    monkeypatch.setattr(whole, "FEW_QUERIES", 0)
    monkeypatch.setattr(whole, "LONG_ROWS", 1)
    compare(replace(CASES[name], num_kv_heads=6, dtype="bfloat16", deterministic=True))  # a new spec, which jit traces


@pytest.mark.parametrize("name", ["packed, everything", "bias of heads", "window, rows that see nothing", "sinks"])
def test_results_do_not_depend_on_the_block_size(name, monkeypatch):
    """The blocks are far smaller than the lengths, and the last one is ragged. Every feature crosses their borders."""
    monkeypatch.setattr(jax_xla, "LARGEST_BLOCKS", {"cpu": BlockSizes(5, 3), "any": BlockSizes(7, 4)})
    monkeypatch.setattr(jax_xla, "MAX_SCORES", 0)
    monkeypatch.setattr(whole, "FEW_QUERIES", 0)
    compare(replace(CASES[name], deterministic=True))  # a new spec, so that jit traces the small blocks


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"q_len": 17, "causal": True},
        {"causal": True, "alignment": "top_left"},
        {"q_len": 1, "causal": True},  # the only query stands last and sees every key
        {"q_len": 17, "causal": True, "window": (3, None)},
        {"q_len": 17, "window": (None, 2)},
        {"window": (20, 20)},
        {"dtype": "bfloat16"},
        {"causal": True},  # the diagonal ends at the bottom right
        {"q_len": 29, "window": (1, 1), "alignment": "top_left"},  # late rows see nothing
        {"softcap": 3.0},
        {"mask_shape": (1, 1, 13, 17)},
        {"bias_shape": (1, 1, 13, 17)},
        {"alibi_shape": (6,)},
        {"sinks": True},
        {"dropout": 0.1},
        {"value_dim": 7},
        {"dtype": "float16"},
        {"dtype": "float64"},
        {"batch": 1, "documents": 2},
    ],
)
def test_small_calls_have_no_loop(changes):
    few = changes.get("q_len", 13) <= 16 and "documents" not in changes
    assert jax_xla.lower(replace(DENSE, **changes))["path"] == ("few queries" if few else "whole")
    if few:
        shapes = {name: (1, 1, 20, 20) for name in changes if name in ("mask_shape", "bias_shape")}
        assert jax_xla.lower(replace(DENSE, **{**changes, "q_len": 20, "kv_len": 20, **shapes}))["path"] == "whole"


def test_few_queries_have_no_loop_at_any_length():
    assert jax_xla.lower(replace(DENSE, q_len=16, kv_len=2**20))["path"] == "few queries"


@pytest.mark.parametrize(
    ("changes", "small"),
    [
        ({}, True),
        ({"causal": True}, False),
        ({"window": (64, None)}, False),
        ({"q_len": 2048, "kv_len": 256, "causal": True}, True),  # one block of keys
        ({"batch": 1, "num_heads": 12, "documents": 2}, False),
        ({"mask_shape": (1, 1, 1, 768)}, True),
    ],
)
def test_blocks_of_large_calls_have_something_to_skip(changes, small):
    """If no block is hidden, one matrix of all scores is faster up to larger sizes, and with a backward yet larger."""
    spec = replace(DENSE, **{"q_len": 768, "kv_len": 768, **changes})
    assert jax_xla.lower(spec)["path"] == ("whole" if small else "blocked")
    longer = replace(spec, q_len=2 * spec.q_len, needs_backward=True)
    assert jax_xla.lower(longer)["path"] == ("whole" if small else "blocked")
    assert jax_xla.lower(replace(longer, needs_backward=False))["path"] == "blocked"


@pytest.mark.parametrize("changes", [{"q_len": 1024, "kv_len": 1024}, {"q_len": 17, "kv_len": 2**20}])
def test_large_calls_run_in_blocks(changes):
    assert jax_xla.lower(replace(DENSE, **changes))["path"] == "blocked"


def test_blocks_divide_the_length_evenly():
    spec = replace(DENSE, q_len=257, kv_len=5)
    assert tiles.block_sizes(spec, BlockSizes(256, 256)) == (129, 5)
    assert jax_xla.lower(spec)["blocks"] == {"cpu": (129, 5), "any": (257, 5)}


@pytest.fixture(params=["cpu", "other devices"])
def program_for(request, monkeypatch):
    """Runs what a program for a CPU runs, and what one for another device runs, both on this CPU."""
    if request.param != "cpu":
        monkeypatch.setattr(jax.lax, "platform_dependent", lambda *args, default, **_: default(*args))
    jax.clear_caches()
    yield request.param
    jax.clear_caches()


def run_poisoned(spec: AttentionSpec, poison: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The forward and the gradients before and after ``poison`` has changed some arrays."""
    inputs = make_inputs(spec)._asdict()
    dout = np.random.default_rng(3).standard_normal(spec.out_shape)
    results = []
    for change in (lambda inputs, dout: None, poison):
        change(inputs, dout)
        run = run_both(spec, on_device(spec, Inputs(**inputs)), jnp.asarray(dout, spec.dtype), None)
        results.append(tuple(np.asarray(array, np.float32) for array in run if array is not None))
    return results[0], results[1]


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("name", ["packed, causal", "packed, everything"])
def test_nan_stays_in_its_document(name, value, path, program_for):
    """A document full of NaN or Inf leaves the others bit-identical; dbias and dsinks are sums over all documents."""
    spec = on_path(path, CASES[name])

    def poison(inputs, dout):
        for array in (inputs["q"], dout):
            array[: LENGTHS[0][0]] = value
        for array in (inputs["k"], inputs["v"]):
            array[: LENGTHS[1][0]] = value

    clean, poisoned = run_poisoned(spec, poison)
    firsts = (LENGTHS[0][0], None, LENGTHS[0][0], LENGTHS[1][0], LENGTHS[1][0])
    for before, after, first in zip(clean[:5], poisoned[:5], firsts, strict=True):
        start = (slice(None), slice(LENGTHS[0][0], None)) if first is None else slice(first, None)
        np.testing.assert_array_equal(before[start], after[start])
        assert not np.isnan(before).any()
    assert np.isnan(poisoned[0][: LENGTHS[0][0]]).any()


@pytest.mark.parametrize("name", ["causal, top left", "window, top left", "mask of keys"])
@pytest.mark.parametrize("q_len", [3, 29])
def test_hidden_keys_do_not_affect_the_results(name, q_len, path, program_for):
    """A NaN in v reaches only the rows that see it, and only its channel. A NaN in k reaches only the rows that see
    it. Few queries read keys and values in place, unless there is a NaN."""
    spec = on_path(path, replace(CASES[name], num_kv_heads=6, q_len=q_len))
    seen = np.broadcast_to(reference.visible(spec, make_inputs(spec).mask), (spec.batch, 6, spec.q_len, spec.kv_len))

    def poison(inputs, dout):
        inputs["v"][1, 9, :, 4] = np.nan
        inputs["k"][0, 8] = np.nan

    (out, *_), (poisoned, *_) = run_poisoned(spec, poison)
    expected = out.copy()
    expected[1, :, :, 4][seen[1, :, :, 9].T] = np.nan
    expected[0][seen[0, :, :, 8].T] = np.nan
    np.testing.assert_array_equal(poisoned, expected)


@pytest.mark.parametrize(
    ("given", "safe"),
    [
        ([0, 4, 4, 9], [0, 4, 4, 9]),
        ([3, 4, 2, 7], [0, 4, 4, 9]),
        ([-5, 100, 2, 2**31 - 1], [0, 9, 9, 9]),
        ([0, -(2**31), 6, 0], [0, 0, 6, 9]),
    ],
)
def test_offsets_on_the_device_are_made_safe(given, safe):
    assert safe_offsets(jnp.asarray(given, jnp.int32), 9).tolist() == safe


def long_spec(tokens: int, **changes: Any) -> AttentionSpec:
    heads = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "value_dim": 64}
    return AttentionSpec(batch=1, q_len=tokens, kv_len=tokens, dtype="bfloat16", **heads, **changes)


def abstract(spec: AttentionSpec) -> tuple[Any, ...]:
    """The arguments of ``run_both`` as shapes and dtypes."""
    rows = () if spec.packed else (spec.batch,)
    q, k = (
        jax.ShapeDtypeStruct((*rows, spec.q_len, heads, spec.head_dim), spec.dtype)
        for heads in (spec.num_heads, spec.num_kv_heads)
    )
    offsets = jax.ShapeDtypeStruct((spec.documents + 1,), jnp.int32) if spec.documents else None
    inputs = Inputs(q, k, k, cu_seqlens_q=offsets, cu_seqlens_k=offsets)
    return inputs, q, jax.ShapeDtypeStruct(spec.lse_shape, jnp.float32)


@pytest.mark.parametrize("changes", [{"causal": True}, {"documents": 33, "causal": True, "softcap": 30.0}])
def test_long_sequences_need_no_score_matrix(changes):
    """At 16k tokens there is no q_len x kv_len array, and the program is no larger than at 2k tokens."""
    specs = {tokens: long_spec(tokens, **changes) for tokens in (2048, 16384)}
    usual = xla_compiler.as_users_have_it()
    compiled = {tokens: run_both.lower(spec, *abstract(spec)).compile(usual) for tokens, spec in specs.items()}
    memory = {tokens: program.memory_analysis().temp_size_in_bytes for tokens, program in compiled.items()}
    assert memory[16384] < 16384 * 16384, memory  # bytes: a quarter of one head's float32 scores, and there are 4 heads
    assert memory[16384] < 9 * memory[2048], memory  # linear in the tokens
    sizes = {tokens: len(program.as_text()) for tokens, program in compiled.items()}
    assert sizes[16384] < 1.2 * sizes[2048], sizes


def test_a_nan_in_a_key_stays_in_its_head(program_for):
    """Few queries multiply the keys of all kv heads in one product."""
    spec = replace(CASES["one query"], num_kv_heads=6)

    def poison(inputs, dout):
        inputs["k"][0, 8, 2] = np.nan

    (out, *_), (poisoned, *_) = run_poisoned(spec, poison)
    expected = out.copy()
    expected[0, :, 2] = np.nan
    np.testing.assert_array_equal(poisoned, expected)


@pytest.mark.parametrize("name", ["packed, everything", "causal, top left"])
def test_vmap_scan_and_remat_equal_single_calls(name):
    """vmap, scan and checkpoint equal one call at a time. The test for finite values stays one branch under vmap."""
    spec = CASES[name]
    arrays = [on_device(spec, make_inputs(spec, seed)) for seed in range(3)]
    shared = {field: getattr(arrays[0], field) for field in ("rng", "cu_seqlens_q", "cu_seqlens_k")}
    own = [inputs._replace(**dict.fromkeys(shared)) for inputs in arrays]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *own)

    def call(inputs: Inputs) -> Any:
        inputs = inputs._replace(**shared)
        out, lse = jax_xla.forward(spec, inputs)
        return out, jax_xla.backward(spec, inputs, out, lse, out, lse * 0.0 if spec.sinks else None)

    expected = [jax.jit(call)(inputs) for inputs in arrays]
    batched = jax.jit(jax.vmap(call))
    _, scanned = jax.jit(lambda xs: jax.lax.scan(lambda carry, x: (carry, jax.checkpoint(call)(x)), 0, xs))(stacked)
    for got in (batched(stacked), scanned):
        for index, right in enumerate(expected):
            for actual, desired in zip(jax.tree.leaves(got), jax.tree.leaves(right), strict=True):
                np.testing.assert_allclose(actual[index], desired, rtol=1e-5, atol=1e-5)
    traced = str(jax.make_jaxpr(jax.vmap(call))(stacked))
    assert traced.count(" cond[") == str(jax.make_jaxpr(call)(arrays[0])).count(" cond[")


def test_inside_shard_map():
    """jax.shard_map checks over which mesh axes the carry of each loop varies."""
    mesh = jax.make_mesh((1,), ("x",))
    spec = replace(DENSE, batch=1, softcap=5.0)
    inputs = on_device(spec, make_inputs(spec))
    rows = jax.sharding.PartitionSpec("x", None, None, None)
    q, k, v = (jax.device_put(array, jax.NamedSharding(mesh, rows)) for array in inputs[:3])

    def call(q: Any, k: Any, v: Any) -> Any:
        out, lse = jax_xla.forward(spec, Inputs(q, k, v))
        return (out, *jax_xla.backward(spec, Inputs(q, k, v), out, lse, out, None)[:3])

    got = jax.jit(jax.shard_map(call, mesh=mesh, in_specs=rows, out_specs=rows))(q, k, v)
    for actual, desired in zip(got, jax.jit(call)(*inputs[:3]), strict=True):
        np.testing.assert_allclose(actual, desired, rtol=1e-6, atol=1e-6)


def test_the_mask_probe_sees_the_visible_set():
    assert jax_xla.probe() == jax.__version__


@pytest.mark.parametrize("options", [{"softcap": 5.0, "causal": True}, {"causal": True}], ids=["softcap", "causal"])
def test_the_callers_strict_promotion_settings_do_not_matter(options):
    spec = replace(DENSE, q_len=17, needs_backward=True, **options)
    q, k, v = (jnp.ones((spec.batch, n, h, spec.head_dim), spec.dtype) for n, h in ((17, 6), (17, 2), (17, 2)))
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        out, lse = jax.jit(partial(jax_xla.forward, spec))(Inputs(q, k, v))
        jax.jit(partial(jax_xla.backward, spec))(Inputs(q, k, v), out, lse, out, lse)
