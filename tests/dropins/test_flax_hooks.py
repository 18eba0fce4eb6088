"""Tests attention_fn inside Flax's layers: the numbers of Flax's attention, every keyword honoured or refused by
name."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import math

import numpy as np
import pytest

pytest.importorskip("flax")

import jax
import jax.numpy as jnp
from flax import linen, nnx
from frameworks import jax_on

from attn_core import SeqInfo
from attn_core.errors import ShapeError, SpecError
from jax_frontend.flax.hook import attention_fn

pytestmark = [pytest.mark.sampled, pytest.mark.words]

BATCH, LENGTH, KV_LENGTH, HEADS, DIM = 2, 5, 7, 3, 11
TOLERANCE = {"rtol": 1e-5, "atol": 2e-5}


@pytest.fixture(scope="module")
def on_device(device):
    with jax_on(device):
        yield


everywhere = pytest.mark.usefixtures("on_device")
alike = pytest.mark.on_gpus(only=lambda **_: False)  # flax's layers around calls that other tests make on a GPU


def normal(seed, *shape, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape).astype(dtype)


def heads(batch=(BATCH,), q_len=LENGTH, kv_len=KV_LENGTH, kv_heads=HEADS, dtype=jnp.float32):
    query = normal(0, *batch, q_len, HEADS, DIM, dtype=dtype)
    return query, *(normal(seed, *batch, kv_len, kv_heads, DIM, dtype=dtype) for seed in (1, 2))


def some_mask(*shape, dtype=jnp.float32):
    """A 0/1 mask, as Flax creates them, in which every query sees the first key."""
    return jax.random.bernoulli(jax.random.key(3), 0.6, shape).at[..., 0].set(True).astype(dtype)


class _AnyName(dict):
    def __contains__(self, name):
        return True


class _AsksForEverything(inspect.Signature):
    """A signature that accepts every name: linen passes only the keywords that it finds, so here it passes all."""

    parameters = property(lambda self: _AnyName())


class Recorder:
    __signature__ = _AsksForEverything()

    def __call__(self, query, key, value, **keywords):
        self.keywords = keywords
        return query


def passed_by(host):
    """The keywords that a Flax layer of this version passes to its attention_fn."""
    recorder, x = Recorder(), normal(0, BATCH, LENGTH, HEADS * DIM)
    if host == "linen":
        layer = linen.MultiHeadDotProductAttention(HEADS, attention_fn=recorder)
        layer.init_with_output(jax.random.key(0), x, sow_weights=True)
    else:
        layer = nnx.MultiHeadAttention(HEADS, HEADS * DIM, decode=False, attention_fn=recorder, rngs=nnx.Rngs(0))
        known = inspect.signature(layer.__call__).parameters
        positions = {"input_positions": jnp.arange(LENGTH)} if "input_positions" in known else {}
        layer(x, sow_weights=True, **positions)
    return recorder.keywords


def turned(query, key, positions):
    """A rotary embedding: mixes the channels of each head by the position of the token."""
    angles = (0.3 * positions)[..., None, None]  # [batch, length, 1, 1]
    return tuple(x * jnp.cos(angles) + x[..., ::-1] * jnp.sin(angles) for x in (query, key))


# For every keyword: a value, the other arguments, and the effect: "as linen" or "as nnx" (the number that Flax
# computes,
# and not the one without the keyword), "changes" (another result), "same" (no effect), or the words of the refusal.
DROPPING = {"dropout_rate": 0.5, "broadcast_dropout": False, "deterministic": False}
KEYWORDS = [
    ("bias", normal(4, HEADS, LENGTH, KV_LENGTH), {}, "as linen"),
    ("bias", normal(4, BATCH, 1, LENGTH, 1) * normal(5, 1, HEADS, 1, KV_LENGTH), {}, "as nnx"),
    ("mask", some_mask(BATCH, 1, LENGTH, KV_LENGTH), {}, "as linen"),
    ("mask", some_mask(BATCH, HEADS, 1, KV_LENGTH, dtype=bool), {}, "as nnx"),
    ("mask", some_mask(LENGTH, KV_LENGTH, dtype=jnp.int32), {}, "as linen"),
    ("is_causal", True, {}, "as nnx"),
    ("dtype", jnp.bfloat16, {}, "as linen"),
    ("promote_dtype", lambda arrays, dtype: tuple(array.astype(jnp.bfloat16) for array in arrays), {}, "as nnx"),
    ("broadcast_dropout", True, {**DROPPING, "dropout_rng": jax.random.key(5)}, "broadcast_dropout=True"),
    ("broadcast_dropout", True, {}, "same"),
    ("dropout_rate", 0.5, {**DROPPING, "dropout_rng": jax.random.key(5)}, "changes"),
    ("dropout_rate", 1.5, {**DROPPING, "dropout_rng": jax.random.key(5)}, "dropout=1.5"),
    ("dropout_rng", None, DROPPING, "dropout_rng=None"),
    ("dropout_rng", jax.random.key(5), DROPPING, "changes"),
    ("deterministic", True, {**DROPPING, "dropout_rng": jax.random.key(5)}, "same"),
    ("deterministic", False, {**DROPPING, "dropout_rng": jax.random.key(5)}, "changes"),
    ("precision", jax.lax.Precision.HIGHEST, {}, "same"),
    ("precision", "high", {}, "same"),
    ("precision", "precise", {}, "precision='precise'"),
    ("precision", jax.lax.DotAlgorithmPreset.F32_F32_F32, {"dtype": jnp.bfloat16}, "precision="),
    ("precision", jax.lax.Precision.DEFAULT, {}, "same"),
    ("force_fp32_for_softmax", True, {}, "same"),
    ("module", linen.Dense(1), {}, "sow_weights=True"),
    ("einsum_dot_general", jax.lax.dot_general, {}, "einsum_dot_general"),
    ("qk_attn_weights_einsum", jnp.einsum, {}, "qk_attn_weights_einsum"),
    ("attn_weights_value_einsum", jnp.einsum, {}, "attn_weights_value_einsum"),
    ("input_positions", jnp.arange(LENGTH), {}, "input_positions: expected None without a rotary embedding"),
    ("input_positions", None, {}, "same"),
]


@pytest.mark.parametrize("host", ["linen", "nnx"])
def test_every_keyword_of_flax_has_a_case(host):
    flax_function = (linen if host == "linen" else nnx).dot_product_attention
    arrays = {"query", "key", "value"}
    theirs = set(inspect.signature(flax_function).parameters) | set(passed_by(host))
    ours = inspect.signature(attention_fn()).parameters
    assert theirs <= set(ours)
    assert {name for name, *_ in KEYWORDS} == set(ours) - arrays
    assert all(parameter.kind is parameter.POSITIONAL_OR_KEYWORD for parameter in ours.values())


@everywhere
@pytest.mark.parametrize(("name", "value", "companions", "effect"), KEYWORDS)
def test_a_keyword_is_honoured_or_refused_by_name(name, value, companions, effect):
    arrays, hook = heads(), attention_fn()
    keywords = {**companions, name: value}
    if effect not in ("as linen", "as nnx", "changes", "same"):
        with pytest.raises(SpecError, match=effect):
            hook(*arrays, **keywords)
        return
    actual, plain = hook(*arrays, **keywords), hook(*arrays)
    differs = actual.dtype != plain.dtype or not np.allclose(actual, plain, atol=1e-4)
    assert differs == (effect != "same")
    if effect.startswith("as "):
        host = {"as linen": linen, "as nnx": nnx}[effect]
        expected = host.dot_product_attention(*arrays, **keywords)
        assert actual.dtype == expected.dtype
        loose = {"rtol": 0.02, "atol": 0.02} if actual.dtype == jnp.bfloat16 else TOLERANCE
        np.testing.assert_allclose(np.float32(actual), np.float32(expected), **loose)


def test_positional_order_equals_that_of_flax():
    for function in (linen.dot_product_attention, nnx.dot_product_attention):
        theirs = list(inspect.signature(function).parameters)[:11]
        assert theirs == list(inspect.signature(attention_fn()).parameters)[:11]


@everywhere
@alike
@pytest.mark.parametrize("batch", [(), (2,), (2, 3), (2, 1, 3), (0,)])
@pytest.mark.parametrize("mask_batch", ["full", "ones", "first", "none"])
def test_any_number_of_batch_axes(batch, mask_batch):
    ones = (1,) * len(batch)
    lead = {"full": batch, "ones": ones, "first": batch[:1] + ones[1:], "none": ()}[mask_batch]
    mask = some_mask(*lead, 1, LENGTH, KV_LENGTH)
    bias = normal(4, *lead, HEADS, LENGTH, KV_LENGTH)
    arrays = heads(batch)
    actual = attention_fn()(*arrays, mask=mask, bias=bias)
    assert actual.shape == arrays[0].shape
    np.testing.assert_allclose(actual, linen.dot_product_attention(*arrays, mask=mask, bias=bias), **TOLERANCE)


@everywhere
def test_a_query_that_sees_no_key_gives_zero():
    mask = some_mask(BATCH, 1, LENGTH, KV_LENGTH).at[:, :, 2].set(0)
    out = attention_fn()(*heads(), mask=mask)
    assert not out[:, 2].any() and out[:, [0, 1, 3, 4]].all()


def test_shapes_that_do_not_fit_are_named():
    query, key, value = heads()
    with pytest.raises(ShapeError, match="mask: expected batch axes"):
        attention_fn()(query, key, value, mask=some_mask(BATCH + 1, 1, LENGTH, KV_LENGTH))
    with pytest.raises(ShapeError, match="bias: expected at most 4 axes"):
        attention_fn()(query, key, value, bias=normal(0, 1, 1, 1, LENGTH, KV_LENGTH))
    with pytest.raises(ShapeError, match="key: expected the batch axes"):
        attention_fn()(query, key[:1], value)
    with pytest.raises(ShapeError, match="query: expected"):
        attention_fn()(query[0, 0], key, value)


@everywhere
@pytest.mark.parametrize("masked", [False, True])
def test_a_linen_layer_computes_the_same(masked):
    x, context = normal(0, BATCH, LENGTH, HEADS * DIM), normal(1, BATCH, KV_LENGTH, 13)
    mask = some_mask(BATCH, HEADS, LENGTH, KV_LENGTH) if masked else None
    theirs = linen.MultiHeadDotProductAttention(HEADS)
    ours = linen.MultiHeadDotProductAttention(HEADS, attention_fn=attention_fn())
    expected, variables = theirs.init_with_output(jax.random.key(0), x, context, mask=mask)
    np.testing.assert_allclose(jax.jit(ours.apply)(variables, x, context, mask=mask), expected, **TOLERANCE)

    def loss(layer):
        return jax.grad(lambda variables: jnp.sum(layer.apply(variables, x, context, mask=mask) ** 2))(variables)

    for actual, desired in zip(jax.tree.leaves(loss(ours)), jax.tree.leaves(loss(theirs)), strict=True):
        np.testing.assert_allclose(actual, desired, rtol=1e-4, atol=1e-4)


@everywhere
def test_linen_decodes_token_by_token():
    x = normal(0, BATCH, LENGTH, HEADS * DIM)
    full = linen.MultiHeadDotProductAttention(HEADS)
    expected, variables = full.init_with_output(jax.random.key(0), x, mask=linen.make_causal_mask(x[..., 0]))
    layer = linen.MultiHeadDotProductAttention(HEADS, decode=True, attention_fn=attention_fn())
    cache = layer.init(jax.random.key(0), x)["cache"]
    step = jax.jit(lambda cache, token: layer.apply({**variables, "cache": cache}, token, mutable=["cache"]))
    for position in range(LENGTH):
        out, updated = step(cache, x[:, position : position + 1])
        cache = updated["cache"]
        np.testing.assert_allclose(out[:, 0], expected[:, position], **TOLERANCE)


@everywhere
@pytest.mark.parametrize("kv_heads", [1, HEADS])
@pytest.mark.parametrize("causal", [False, True])
def test_an_nnx_layer_computes_the_same(kv_heads, causal):
    x = normal(0, BATCH, LENGTH, HEADS * DIM)
    layer = nnx.MultiHeadAttention(HEADS, HEADS * DIM, num_kv_heads=kv_heads, decode=False, rngs=nnx.Rngs(0))
    mask = some_mask(BATCH, HEADS, LENGTH, LENGTH)
    expected = layer(x, mask=mask, is_causal=causal)
    layer.attention_fn = attention_fn()
    actual = nnx.jit(lambda layer, x: layer(x, mask=mask, is_causal=causal))(layer, x)
    np.testing.assert_allclose(actual, expected, **TOLERANCE)


@everywhere
@alike
def test_nnx_decodes_token_by_token():
    x = normal(0, BATCH, LENGTH, HEADS * DIM)
    layer = nnx.MultiHeadAttention(HEADS, HEADS * DIM, decode=False, rngs=nnx.Rngs(0), attention_fn=attention_fn())
    expected = layer(x, is_causal=True)
    layer.init_cache(x.shape)
    for position in range(LENGTH):
        out = layer(x[:, position : position + 1], decode=True)
        np.testing.assert_allclose(out[:, 0], expected[:, position], **TOLERANCE)


def test_is_causal_with_a_cache_never_means_the_first_key_alone():
    query, key, value = heads(q_len=1)
    mask = jnp.ones((BATCH, 1, 1, KV_LENGTH))
    with pytest.raises(SpecError, match=r"is_causal=True with 1 query, 7 keys and a mask"):
        attention_fn()(query, key, value, mask=mask, is_causal=True)
    for alignment, keys in (("top_left", 1), ("bottom_right", KV_LENGTH)):
        out = attention_fn(alignment=alignment)(query, key, value, mask=mask, is_causal=True)
        np.testing.assert_allclose(out, attention_fn()(query, key[:, :keys], value[:, :keys]), **TOLERANCE)
    layer = nnx.MultiHeadAttention(HEADS, HEADS * DIM, decode=True, attention_fn=attention_fn(), rngs=nnx.Rngs(0))
    x = normal(0, BATCH, LENGTH, HEADS * DIM)
    expected = layer(x, is_causal=True, decode=False)
    layer.init_cache(x.shape)
    try:
        decoded = [layer(x[:, at : at + 1], is_causal=True)[:, 0] for at in range(LENGTH)]
    except SpecError:  # flax 0.12.8
        return
    np.testing.assert_allclose(jnp.stack(decoded, axis=1), expected, **TOLERANCE)


@everywhere
@alike
@pytest.mark.parametrize("host", ["linen", "nnx"])
def test_layers_refuse_features_that_no_kernel_has(host):
    x, rng = normal(0, BATCH, LENGTH, HEADS * DIM), {"dropout": jax.random.key(1), "params": jax.random.key(0)}

    def call(sow=False, **options):
        options |= {"attention_fn": attention_fn(), "deterministic": False}
        if host == "linen":
            return linen.MultiHeadDotProductAttention(HEADS, **options).init_with_output(rng, x, sow_weights=sow)[0]
        layer = nnx.MultiHeadAttention(HEADS, HEADS * DIM, decode=False, rngs=nnx.Rngs(0), **options)
        return layer(x, sow_weights=sow)

    with pytest.raises(SpecError, match="broadcast_dropout=True"):
        call(dropout_rate=0.5)
    with pytest.raises(SpecError, match="sow_weights=True"):
        call(sow=True)
    with pytest.raises(SpecError, match="precision="), jax.default_matmul_precision("default"):
        call(precision="highest")
    dropped = call(dropout_rate=0.5, broadcast_dropout=False)
    assert not np.allclose(dropped, call(), atol=1e-4)


@everywhere
@alike
def test_options_of_the_factory_reach_the_kernel():
    arrays = heads(kv_len=LENGTH)
    plain = attention_fn()(*arrays)
    options = [{"causal": True}, {"window": (1, 1)}, {"causal": True, "window": 2}, {"softcap": 0.5}, {"scale": 0.9}]
    options += [{"alibi_slopes": jnp.arange(1.0, HEADS + 1)}, {"sinks": jnp.ones(HEADS)}]
    results = [attention_fn(**chosen)(*arrays) for chosen in options]
    for chosen, result in zip(options, results, strict=True):
        assert not np.allclose(result, plain, atol=1e-4), chosen
    rows, columns = np.arange(LENGTH)[:, None], np.arange(LENGTH)[None, :]
    seen = jnp.asarray((columns <= rows) & (columns > rows - 2))
    np.testing.assert_allclose(results[2], attention_fn()(*arrays, mask=seen), **TOLERANCE)


@everywhere
@alike
def test_a_missing_alignment_is_refused_if_it_matters():
    arrays = heads()
    for options in ({"causal": True}, {"window": (1, 1)}, {"alibi_slopes": jnp.ones(HEADS)}):
        with pytest.raises(SpecError, match="alignment=None"):
            attention_fn(**options)(*arrays)
    bottom = attention_fn(causal=True, alignment="bottom_right")(*arrays)
    top = attention_fn(causal=True, alignment="top_left")(*arrays)
    np.testing.assert_allclose(top, attention_fn()(*arrays, is_causal=True), **TOLERANCE)
    assert not np.allclose(bottom, top, atol=1e-4)


@pytest.mark.parametrize("batch", [(), (2,), (2, 3)])
def test_rotary_uses_the_positions_of_the_call(batch):
    query, key, value = heads(batch, kv_len=LENGTH)
    full = (*batch, LENGTH)
    positions = jnp.arange(math.prod(full)).reshape(full) % 11
    hook, plain = attention_fn(rotary=turned), attention_fn()
    for given, meant in ((positions, positions), (positions.reshape(-1)[-LENGTH:],) * 2, (None, jnp.arange(LENGTH))):
        expected = plain(*turned(query, key, jnp.broadcast_to(meant, full)), value)
        np.testing.assert_allclose(hook(query, key, value, input_positions=given), expected, **TOLERANCE)
    assert not np.allclose(hook(query, key, value), plain(query, key, value), atol=1e-3)
    assert hook(*heads(batch, kv_len=LENGTH, dtype=jnp.bfloat16)).dtype == jnp.bfloat16


def test_rotary_positions_start_at_each_document():
    info = SeqInfo.from_lengths([2, 3])
    query, key, value = heads((1,), kv_len=LENGTH)
    actual = attention_fn(rotary=turned, seq_info=info)(query, key, value)
    positions = jnp.asarray([[0, 1, 0, 1, 2]])
    expected = attention_fn(seq_info=info)(*turned(query, key, positions), value)
    np.testing.assert_allclose(actual, expected, **TOLERANCE)


def test_positions_that_do_not_fit_are_named():
    with pytest.raises(SpecError, match=r"rotary: expected as many keys as queries, got 5 queries and 7 keys"):
        attention_fn(rotary=turned)(*heads())
    for wrong in (jnp.arange(LENGTH + 1), jnp.zeros((BATCH + 1, LENGTH)), jnp.zeros((1, BATCH, LENGTH))):
        with pytest.raises(ShapeError, match=r"input_positions: expected \[batch\.\.\., length\] = \[2, 5\], got"):
            attention_fn(rotary=turned)(*heads(kv_len=LENGTH), input_positions=wrong)


def test_an_nnx_layer_passes_its_positions_on():
    hook = attention_fn(rotary=turned)
    layer = nnx.MultiHeadAttention(HEADS, HEADS * DIM, decode=False, attention_fn=hook, rngs=nnx.Rngs(0))
    if "input_positions" not in inspect.signature(layer.__call__).parameters:  # flax before 0.12.9
        with pytest.raises(TypeError, match="input_positions"):
            layer(normal(0, BATCH, LENGTH, HEADS * DIM), input_positions=jnp.arange(LENGTH))
        return
    x = normal(0, BATCH, LENGTH, HEADS * DIM)
    counted = layer(x)
    np.testing.assert_array_equal(layer(x, input_positions=jnp.arange(LENGTH)), counted)
    assert not np.allclose(layer(x, input_positions=2 * jnp.arange(LENGTH)), counted, atol=1e-3)


def test_hooks_with_equal_options_are_equal():
    slopes = jnp.ones(HEADS)
    assert attention_fn(window=(1, 2)) == attention_fn(window=(1, 2)) != attention_fn(window=(1, 3))
    assert hash(attention_fn(alibi_slopes=slopes)) == hash(attention_fn(alibi_slopes=slopes))
    assert attention_fn(alibi_slopes=slopes) != attention_fn(alibi_slopes=jnp.ones(HEADS))
    assert attention_fn(rotary=turned) == attention_fn(rotary=turned) != attention_fn()


@alike
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"q_segment_ids": 1}, r"^q_segment_ids: expected seq_info=; SeqInfo\.from_lengths.* else a mask of equal seg"),
        ({"softmax_scale": 1.0}, "^softmax_scale: expected scale=; the same value$"),
        ({"sofcap": 50.0, "causal": True}, r"'sofcap'; did you mean softcap=\?"),
        ({"key_ranges": 1}, "'key_ranges'; expected one of causal, alignment, window"),
    ],
)
def test_an_unknown_option_names_the_word_to_use(options, says):
    with pytest.raises(TypeError, match=says):
        attention_fn(**options)


@alike
def test_the_options_are_the_signature_and_copies_are_equal():
    assert {"causal", "rotary", "invariant"} <= inspect.signature(attention_fn).parameters.keys()
    made = attention_fn(causal=True, softcap=50.0)
    assert copy.copy(made) == made and dataclasses.replace(made, causal=False) == attention_fn(softcap=50.0)
