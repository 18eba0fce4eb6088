"""Tests the linen and NNX attention layers: equal to Flax's and to each other, with every option applied."""

from __future__ import annotations

import dataclasses
import inspect
import pickle

import numpy as np
import pytest

pytest.importorskip("flax")

import jax
import jax.numpy as jnp
from flax import linen as flax_linen
from flax import nnx as flax_nnx
from frameworks import jax_on
from rotary import rope_in_jax

from attn_core import masks
from attn_core.call.key_ranges import visible_in_ranges
from attn_core.call.seq_info import SeqInfo
from attn_core.errors import ShapeError, SpecError
from jax_frontend import linen, nnx
from jax_frontend.flax import layer as flax_layer

pytestmark = [pytest.mark.sampled, pytest.mark.words]

BATCH, SEQ, KV_SEQ, HEADS, KV_HEADS, DIM, VALUE_DIM, FEATURES, OUT = 2, 7, 5, 6, 3, 4, 8, 13, 11
SIZES = {"num_kv_heads": KV_HEADS, "head_dim": DIM, "value_dim": VALUE_DIM, "out_features": OUT}
TOLERANCE = {"rtol": 1e-5, "atol": 5e-5}


@pytest.fixture(scope="module")
def on_device(device):
    with jax_on(device):
        yield


everywhere = pytest.mark.usefixtures("on_device")
alike = pytest.mark.on_gpus(only=lambda **_: False)  # flax's layers around calls that other tests make on a GPU


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


OPTIONS = [
    {},
    {"causal": True, "window": 3},
    {"window": (2, 1), "softcap": 0.7},
    {"causal": True, "alignment": "top_left", "scale": 0.8},
    {"sinks": True, "sinks_init": flax_linen.initializers.normal(1.0), "use_bias": False},
    {"rotary": rope_in_jax, "causal": True},
]


def randomised(params, seed=9):
    """The same tree with new random values in every leaf, biases and sinks included."""
    leaves, tree = jax.tree.flatten(params)
    return tree.unflatten([0.5 * normal(seed + i, *leaf.shape) for i, leaf in enumerate(leaves)])


def linen_layer(x, context=None, **options):
    layer = linen.Attention(HEADS, **{**SIZES, **options})
    return layer, {"params": randomised(layer.init(jax.random.key(0), x, context)["params"])}


def nnx_layer(params, in_features=FEATURES, **options):
    """An NNX layer with the parameters of a linen layer."""
    layer = nnx.Attention(HEADS, in_features, rngs=flax_nnx.Rngs(0), **{**SIZES, **options})
    state = flax_nnx.state(layer, flax_nnx.Param)
    flax_nnx.replace_by_pure_dict(state, params["params"])
    flax_nnx.update(layer, state)
    return layer


@everywhere
@pytest.mark.on_gpus(only=lambda options, **_: "softcap" in options)
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: ",".join(options) or "plain")
def test_linen_and_nnx_agree_forward_and_backward(options):
    x = normal(0, BATCH, SEQ, FEATURES)
    layer, params = linen_layer(x, **options)
    twin = nnx_layer(params, **options)
    value, grads = jax.jit(jax.value_and_grad(lambda p: jnp.sum(jnp.sin(layer.apply(p, x)))))(params)
    twin_value, twin_grads = flax_nnx.jit(flax_nnx.value_and_grad(lambda m: jnp.sum(jnp.sin(m(x)))))(twin)
    np.testing.assert_allclose(value, twin_value, **TOLERANCE)
    twin_grads = flax_nnx.to_pure_dict(twin_grads)
    assert ("sink_logits" in twin_grads) == options.get("sinks", False)
    assert np.abs(grads["params"].get("sink_logits", 1.0)).min() > 0
    assert jax.tree.structure(grads["params"]) == jax.tree.structure(twin_grads)
    for actual, desired in zip(jax.tree.leaves(grads["params"]), jax.tree.leaves(twin_grads), strict=True):
        np.testing.assert_allclose(actual, desired, **TOLERANCE)


@everywhere
@pytest.mark.parametrize("cross", [False, True])
def test_parameters_and_results_equal_those_of_flax(cross):
    x, context = normal(0, BATCH, SEQ, HEADS * DIM), normal(1, BATCH, KV_SEQ, FEATURES) if cross else None
    theirs = flax_linen.MultiHeadDotProductAttention(HEADS)
    mask = jax.random.bernoulli(jax.random.key(2), 0.6, (BATCH, 1, SEQ, KV_SEQ if cross else SEQ)).at[..., 0].set(True)
    expected, params = theirs.init_with_output(jax.random.key(0), x, context, mask=mask)
    ours = linen.Attention(HEADS)
    fresh = ours.init(jax.random.key(0), x, context)
    for actual, desired in zip(jax.tree.leaves_with_path(fresh), jax.tree.leaves_with_path(params), strict=True):
        assert actual[0] == desired[0]
        np.testing.assert_array_equal(actual[1], desired[1])
    np.testing.assert_allclose(ours.apply(params, x, context, mask=mask), expected, **TOLERANCE)

    in_kv = {"in_kv_features": FEATURES} if cross else {}
    nnx_theirs = flax_nnx.MultiHeadAttention(HEADS, HEADS * DIM, decode=False, rngs=flax_nnx.Rngs(0), **in_kv)
    nnx_ours = nnx.Attention(HEADS, HEADS * DIM, rngs=flax_nnx.Rngs(0), **in_kv)
    for name in ("query", "key", "value", "out"):
        np.testing.assert_array_equal(getattr(nnx_ours, name).kernel[...], getattr(nnx_theirs, name).kernel[...])
    np.testing.assert_allclose(nnx_ours(x, context, mask=mask), nnx_theirs(x, context, mask=mask), **TOLERANCE)


@everywhere
@pytest.mark.on_gpus(only=lambda options, **_: "softcap" in options)
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: ",".join(options) or "plain")
def test_packed_documents_equal_separate_rows(options):
    lengths = [3, 0, 5, 1]
    documents = [normal(seed, 1, length, FEATURES) for seed, length in enumerate(lengths)]
    packed = jnp.concatenate(documents, axis=1)
    info = SeqInfo.from_lengths(lengths, array=jnp.asarray)
    layer, params = linen_layer(documents[0], **options)
    apart = jnp.concatenate([layer.apply(params, row) for row in documents if row.size], axis=1)
    apply = jax.jit(lambda params, x, info: layer.apply(params, x, seq_info=info))
    np.testing.assert_allclose(apply(params, packed, info), apart, **TOLERANCE)
    np.testing.assert_allclose(apply(params, packed[0], info), apart[0], **TOLERANCE)
    twin = flax_nnx.jit(lambda layer, x, info: layer(x, seq_info=info))
    np.testing.assert_allclose(twin(nnx_layer(params, **options), packed[0], info), apart[0], **TOLERANCE)
    triple = (None, info.cu_seqlens_q, info.max_len_q)
    np.testing.assert_allclose(layer.apply(params, packed, seq_info=triple), apart, **TOLERANCE)


@everywhere
def test_masks_from_flaxs_helpers_work():
    x = normal(1, BATCH, SEQ, FEATURES)
    mask = flax_linen.make_causal_mask(jnp.ones((BATCH, SEQ)))
    assert mask.dtype == jnp.float32
    layer, params = linen_layer(x)
    expected = layer.apply(params, x, mask=mask.astype(bool))
    np.testing.assert_array_equal(layer.apply(params, x, mask=mask), expected)
    np.testing.assert_array_equal(nnx_layer(params)(x, mask=mask), nnx_layer(params)(x, mask=mask.astype(bool)))
    assert np.abs(expected - layer.apply(params, x)).max() > 0.01


@everywhere
@alike
def test_packed_cross_attention_equals_separate_rows():
    x, context = normal(0, 5, FEATURES), normal(1, 9, FEATURES)
    info = SeqInfo.from_lengths([2, 3], [5, 4])
    layer, params = linen_layer(x[None], context[None])
    actual = layer.apply(params, x, context, seq_info=info)
    pairs = [(x[None, :2], context[None, :5]), (x[None, 2:], context[None, 5:])]
    apart = jnp.concatenate([layer.apply(params, *pair)[0] for pair in pairs])
    np.testing.assert_allclose(actual, apart, **TOLERANCE)
    np.testing.assert_allclose(nnx_layer(params)(x, context, seq_info=info), apart, **TOLERANCE)


@everywhere
@alike
def test_rotary_receives_positions_and_is_applied():
    x, calls = normal(0, BATCH, SEQ, FEATURES), []

    def recording(q, k, positions):
        calls.append((q.shape, k.shape, np.asarray(positions)))
        return rope_in_jax(q, k, positions)

    layer, params = linen_layer(x, rotary=recording)
    counted = layer.apply(params, x)
    assert calls[-1][:2] == ((BATCH, SEQ, HEADS, DIM), (BATCH, SEQ, KV_HEADS, DIM))
    np.testing.assert_array_equal(calls[-1][2], np.tile(np.arange(SEQ), (BATCH, 1)))
    layer.apply(params, x.reshape(-1, FEATURES), seq_info=SeqInfo.from_lengths([3, 0, 10, 1]))
    np.testing.assert_array_equal(calls[-1][2], [[*range(3), *range(10), 0]])
    plain = linen.Attention(HEADS, **SIZES).apply(params, x)
    assert not np.allclose(counted, plain, atol=1e-3)
    shifted = layer.apply(params, x, positions=jnp.arange(SEQ) + 40)  # only differences of positions matter
    np.testing.assert_allclose(shifted, counted, rtol=1e-3, atol=1e-4)
    stretched = layer.apply(params, x, positions=jnp.stack([jnp.arange(SEQ), 2 * jnp.arange(SEQ)]))
    np.testing.assert_allclose(stretched[0], counted[0], **TOLERANCE)
    assert not np.allclose(stretched[1], counted[1], atol=1e-3)


@everywhere
@alike
def test_rotary_in_float32_keeps_a_bfloat16_layer_bfloat16():
    x = normal(0, BATCH, SEQ, FEATURES)
    layer, params = linen_layer(x, rotary=rope_in_jax, dtype=jnp.bfloat16)
    assert layer.apply(params, x).dtype == jnp.bfloat16
    assert nnx_layer(params, rotary=rope_in_jax, dtype=jnp.bfloat16)(x).dtype == jnp.bfloat16


# Each option and call argument, and the keyword of jax_frontend.attention that must receive it unchanged.
PASSED = {
    "causal": True,
    "alignment": "top_left",
    "window": (4, 2),
    "softcap": 3.5,
    "scale": 0.125,
    "bitwise_deterministic": True,
    "backend": ("math", "jax_xla"),
}
RANGES = jnp.asarray(masks.prefix_lm([3], SEQ))
CALLED = {
    "mask": jnp.ones((SEQ, SEQ), bool),
    "key_ranges": RANGES,
    "mask_mod": lambda b, h, q, k: k <= q,
    "score_mod": lambda score, b, h, q, k: score * 2,
    "bias": normal(3, SEQ, SEQ),
    "alibi_slopes": normal(4, HEADS),
}


@pytest.mark.parametrize("name", [*PASSED, *CALLED])
def test_every_option_reaches_attention(name, monkeypatch):
    seen = {}

    def recorder(q, k, v, **keywords):
        seen.update(keywords)
        return jnp.zeros((*q.shape[:-1], v.shape[-1]))

    monkeypatch.setattr(flax_layer, "attention", recorder)
    x, option = normal(0, BATCH, SEQ, FEATURES), {name: PASSED[name]} if name in PASSED else {}
    call = {name: CALLED[name]} if name in CALLED else {}
    keyword = {"bitwise_deterministic": "deterministic"}.get(name, name)
    linen.Attention(HEADS, **SIZES, **option).init_with_output(jax.random.key(0), x, **call)
    assert _same(seen[keyword], {**option, **call}[name])
    seen.clear()
    nnx.Attention(HEADS, FEATURES, rngs=flax_nnx.Rngs(0), **SIZES, **option)(x, **call)
    assert _same(seen[keyword], {**option, **call}[name])


def test_key_ranges_hide_what_their_mask_hides():
    x, seen = normal(0, BATCH, SEQ, FEATURES), jnp.asarray(visible_in_ranges(RANGES, SEQ, HEADS))
    layer, params = linen_layer(x)

    def loss(params, **call):
        out = layer.apply(params, x, **call)
        return (out**2).sum(), out

    (_, out), gradients = jax.value_and_grad(loss, has_aux=True)(params, key_ranges=RANGES)
    (_, expected), wanted = jax.value_and_grad(loss, has_aux=True)(params, mask=seen)
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-5)
    assert not np.allclose(out, layer.apply(params, x), atol=1e-3)
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-3), gradients, wanted)
    same = nnx_layer(params)(x, key_ranges=RANGES)
    np.testing.assert_allclose(same, out, rtol=1e-4, atol=1e-5)


def test_functions_and_their_arrays():
    x, of = normal(0, BATCH, SEQ, FEATURES), jnp.arange(SEQ, dtype=jnp.int32) // 3
    layer, params = linen_layer(x)
    call = {"mask_mod": lambda b, h, q, k, of: of[q] == of[k], "aux": (of,)}
    expected = layer.apply(params, x, mask=of[:, None] == of)
    np.testing.assert_allclose(layer.apply(params, x, **call), expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(nnx_layer(params)(x, **call), expected, rtol=1e-4, atol=1e-5)


@everywhere
@alike
@pytest.mark.parametrize("batch", [(), (2, 3), (1, 2)], ids=str)
def test_any_number_of_batch_axes_equals_one(batch):
    """Each call runs on rows that are folded into one batch axis, with each of its tables."""
    rows, options = int(np.prod(batch)), {"rotary": rope_in_jax, "causal": True}
    x = normal(0, *batch, SEQ, FEATURES)
    layer, params = linen_layer(x.reshape(rows, SEQ, FEATURES), **options)
    ranges = masks.prefix_lm([1 + row for row in range(rows)], SEQ)
    tables = {
        "mask": normal(1, *batch, 1, SEQ, SEQ) > -1,
        "bias": normal(2, *batch, HEADS, 1, SEQ),
        "alibi_slopes": normal(3, *batch, HEADS),
        "key_ranges": ranges.reshape(*batch, *ranges.shape[1:]),
        "positions": jax.random.randint(jax.random.key(4), (*batch, SEQ), 0, 20),
    }

    def folded(array):
        return array.reshape(rows, *array.shape[len(batch) :])

    expected = layer.apply(params, folded(x), **{name: folded(table) for name, table in tables.items()})
    actual = layer.apply(params, x, **tables)
    assert actual.shape == (*batch, SEQ, OUT)
    np.testing.assert_allclose(folded(actual), expected, **TOLERANCE)
    np.testing.assert_allclose(nnx_layer(params, **options)(x, **tables), actual, **TOLERANCE)
    shared = {"mask": tables["mask"][(0,) * len(batch)], "bias": tables["bias"][(0,) * len(batch)]}
    shared |= {"key_ranges": ranges[:1], "alibi_slopes": normal(3, HEADS), "positions": jnp.arange(SEQ)}
    expected = layer.apply(params, folded(x), **shared)
    np.testing.assert_allclose(folded(layer.apply(params, x, **shared)), expected, **TOLERANCE)


@everywhere
@alike
def test_cross_attention_without_a_batch_and_with_normalised_heads():
    x, context = normal(0, SEQ, HEADS * DIM), normal(1, KV_SEQ, FEATURES)
    theirs = flax_linen.MultiHeadDotProductAttention(HEADS, normalize_qk=True)
    params = {"params": randomised(theirs.init(jax.random.key(0), x, context)["params"])}
    ours = linen.Attention(HEADS, normalize_qk=True)
    expected = theirs.apply(params, x, context)
    np.testing.assert_allclose(ours.apply(params, x, context), expected, **TOLERANCE)
    assert not np.allclose(linen.Attention(HEADS).apply(params, x, context), expected, atol=1e-3)


def _same(actual, given):
    return np.array_equal(actual, given) if isinstance(given, jax.Array) else actual == given


def test_both_layers_have_the_same_options():
    of_linen = {field.name for field in dataclasses.fields(linen.Attention)} - {"parent", "name"}
    of_nnx = set(inspect.signature(nnx.Attention.__init__).parameters)
    assert of_linen == of_nnx - {"self", "in_features", "in_kv_features", "rngs", "keep_rngs"}
    calls = [set(inspect.signature(layer.__call__).parameters) for layer in (linen.Attention, nnx.Attention)]
    assert calls[0] - {"dropout_rng"} == calls[1] - {"rngs", "decode"}  # as in Flax


@everywhere
def test_dropout_follows_the_rules_of_flax():
    x = normal(0, BATCH, SEQ, FEATURES)
    plain, params = linen_layer(x)
    expected = plain.apply(params, x)
    layer = linen.Attention(HEADS, **SIZES, dropout_rate=0.4)
    with pytest.raises(ValueError, match="deterministic"):
        layer.apply(params, x)
    np.testing.assert_allclose(layer.apply(params, x, deterministic=True), expected, **TOLERANCE)
    first, again, other = (
        layer.apply(params, x, deterministic=False, rngs={"dropout": jax.random.key(seed)}) for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(first, again)
    assert not np.allclose(first, expected, atol=1e-3) and not np.allclose(first, other, atol=1e-3)
    given = layer.apply(params, x, deterministic=False, dropout_rng=jax.random.key(7))
    assert not np.allclose(given, first, atol=1e-3)

    twin = nnx_layer(params, dropout_rate=0.4)
    with pytest.raises(SpecError, match="deterministic=None"):
        twin(x)
    twin.eval()
    np.testing.assert_allclose(twin(x), expected, **TOLERANCE)
    twin.train()
    assert not np.allclose(twin(x), twin(x), atol=1e-3)  # the layer's own stream of random numbers advances
    first, again = (twin(x, rngs=flax_nnx.Rngs(dropout=3)) for _ in range(2))
    np.testing.assert_array_equal(first, again)
    with pytest.raises(SpecError, match="keep_rngs=False"):
        nnx_layer(params, dropout_rate=0.4, deterministic=False, keep_rngs=False)(x)


@pytest.mark.parametrize(
    ("options", "call", "error", "words"),
    [
        ({"num_kv_heads": 4}, {}, ShapeError, "num_kv_heads=4"),
        ({"head_dim": None}, {}, ShapeError, "needs head_dim="),
        ({"head_dim": 0}, {}, ShapeError, "head_dim=0"),
        ({"window": 3}, {}, SpecError, "window=3"),
        ({"softcap": -1.0}, {}, SpecError, "softcap=-1.0"),
        ({"dropout_rate": -0.5, "deterministic": False}, {}, SpecError, "dropout=-0.5"),
        ({"backend": "sdpa"}, {}, SpecError, "backend='sdpa'"),
        ({}, {"positions": jnp.arange(SEQ)}, SpecError, "positions: expected None"),
        ({"rotary": rope_in_jax}, {"positions": jnp.arange(SEQ + 1)}, ShapeError, "positions: expected"),
        ({"rotary": rope_in_jax}, {"context": normal(1, BATCH, KV_SEQ, FEATURES)}, SpecError, "rotary: expected self-"),
        ({}, {"context": normal(1, BATCH + 1, KV_SEQ, FEATURES)}, ShapeError, "context: expected"),
        ({}, {"seq_info": SeqInfo.from_lengths([SEQ])}, ShapeError, "one row of packed documents"),
    ],
)
def test_refusals_name_the_argument(options, call, error, words):
    x = normal(0, BATCH, SEQ, FEATURES)
    rngs = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    with pytest.raises(error, match=words):
        linen.Attention(HEADS, **{**SIZES, **options}).init_with_output(rngs, x, **call)
    with pytest.raises(error, match=words):
        nnx.Attention(HEADS, FEATURES, rngs=flax_nnx.Rngs(0), **{**SIZES, **options})(x, **call)


def test_inputs_of_a_wrong_shape_are_named():
    layer = nnx.Attention(HEADS, FEATURES, rngs=flax_nnx.Rngs(0), **SIZES)
    with pytest.raises(ShapeError, match="x: expected the layer's 13 features"):
        layer(normal(0, BATCH, SEQ, FEATURES + 1))
    with pytest.raises(ShapeError, match=r"x: expected \[..., seq, features\]"):
        linen.Attention(HEADS, **SIZES).init(jax.random.key(0), normal(0, FEATURES))
    x, more = normal(0, 3, BATCH, SEQ, FEATURES), {"rotary": rope_in_jax}
    with pytest.raises(ShapeError, match="with seq_info"):
        layer(x, seq_info=SeqInfo.from_lengths([SEQ]))
    for call, words in (
        ({"context": x[0]}, "context: expected the layout and batch of x"),
        ({"mask": jnp.ones((BATCH, 3, 1, SEQ, SEQ), bool)}, r"mask: expected batch axes broadcastable to \[3, 2\]"),
        ({"bias": jnp.ones((1, 1, 1, 1, SEQ, SEQ))}, "bias: expected at most 5 axes"),
        ({"alibi_slopes": jnp.ones((BATCH, HEADS))}, r"alibi_slopes: expected \[heads\] or \[batch..., heads\]"),
        ({"key_ranges": np.zeros((6, 1, SEQ, 1, 2), np.int32)}, r"key_ranges: expected \[batch..., kv_heads or 1"),
        ({"positions": jnp.zeros((BATCH, 1, SEQ), int)}, r"positions: expected \[batch..., length\] = \[3, 2, 7\]"),
    ):
        with pytest.raises(ShapeError, match=words):
            nnx.Attention(HEADS, FEATURES, rngs=flax_nnx.Rngs(0), **SIZES, **more)(x, **call)


@everywhere
@alike
def test_vmap_over_layers_and_remat():
    x = normal(0, BATCH, SEQ, FEATURES)
    layer, params = linen_layer(x, causal=True)
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, 2 * leaf]), params)
    actual = jax.vmap(layer.apply, in_axes=(0, None))(stacked, x)
    np.testing.assert_allclose(actual[0], layer.apply(params, x), **TOLERANCE)
    remat = flax_linen.remat(linen.Attention)(HEADS, causal=True, **SIZES)
    desired, again = (jax.grad(lambda p, m=m: jnp.sum(m.apply(p, x) ** 2))(params) for m in (layer, remat))
    # The gradient of the key projection's bias is 0 but for rounding, which is relative to the largest gradient.
    largest = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(desired))
    tolerance = TOLERANCE | {"atol": TOLERANCE["atol"] * max(largest, 1.0)}
    for left, right in zip(jax.tree.leaves(desired), jax.tree.leaves(again), strict=True):
        np.testing.assert_allclose(left, right, **tolerance)


def test_two_nnx_layers_differ_in_their_parameters_alone() -> None:
    """Whatever functions initialised them: they have one structure, and a layer can be pickled."""
    normal = flax_nnx.initializers.normal
    one, other = (
        nnx.Attention(2, 8, kernel_init=normal(0.02), sinks=True, sinks_init=normal(1.0), rngs=flax_nnx.Rngs(seed))
        for seed in (0, 1)
    )
    assert flax_nnx.graphdef(one) == flax_nnx.graphdef(other)
    mean = jax.tree.map(lambda a, b: (a + b) / 2, flax_nnx.state(one), flax_nnx.state(other))
    assert jax.tree.structure(mean) == jax.tree.structure(flax_nnx.state(one))
    again = pickle.loads(pickle.dumps(one))
    x = jnp.ones((1, 3, 8))
    np.testing.assert_array_equal(again(x), one(x))
