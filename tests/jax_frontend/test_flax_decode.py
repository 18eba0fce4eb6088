"""Tests the Flax layers in decode mode: the cache of Flax's layers, and the numbers of a full causal forward."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

pytest.importorskip("flax")

import jax
import jax.numpy as jnp
from flax import linen as flax_linen
from flax import nnx as flax_nnx
from frameworks import jax_on
from rotary import rope_in_jax

from attn_core import checks, masks
from attn_core.call.checks import CheckWarning
from attn_core.errors import DTypeError, ShapeError, SpecError
from attn_core.expressions import trace_mask
from attn_core.paged.step import Pages
from attn_core.selection import NoBackendError
from jax_frontend import attention, linen, nnx
from jax_frontend.flax import attend as layer_call
from jax_frontend.flax import layer as layer_of_flax

pytestmark = pytest.mark.words

BATCH, SEQ, MAX_LENGTH, HEADS, KV_HEADS, DIM, VALUE_DIM, FEATURES = 2, 7, 11, 6, 3, 4, 8, 13
SIZES = {"num_kv_heads": KV_HEADS, "head_dim": DIM, "value_dim": VALUE_DIM}
TOLERANCE = {"rtol": 1e-5, "atol": 5e-5}
OPTIONS = [
    {},
    {"window": 3, "sinks": True, "sinks_init": flax_linen.initializers.normal(1.0), "softcap": 0.7},
    {"window": (4, 0), "rotary": rope_in_jax, "normalize_qk": True, "scale": 0.8},
]


@pytest.fixture(scope="module")
def on_device(device):
    with jax_on(device):
        yield


everywhere = pytest.mark.usefixtures("on_device")
alike = pytest.mark.on_gpus(only=lambda **_: False)  # flax's layers around calls that other tests make on a GPU
sampled = pytest.mark.sampled


def normal(seed, *shape):
    return jnp.array(np.random.default_rng(seed).standard_normal(shape, np.float32))


X = np.random.default_rng(0).standard_normal((BATCH, SEQ, FEATURES), np.float32)


def randomised(params, seed=9):
    leaves, tree = jax.tree.flatten(params)
    return tree.unflatten([0.5 * normal(seed + i, *leaf.shape) for i, leaf in enumerate(leaves)])


def layers(batch=(BATCH,), max_length=MAX_LENGTH, **options):
    """A linen layer, its twin in decode mode, its parameters and an empty cache."""
    layer = linen.Attention(HEADS, **{**SIZES, "causal": True, **options})
    decoding = layer.clone(decode=True)
    variables = decoding.init(jax.random.key(0), jnp.zeros((*batch, max_length, FEATURES)))
    return layer, decoding, randomised(variables["params"]), variables["cache"]


def in_nnx(params, **options):
    layer = nnx.Attention(HEADS, FEATURES, rngs=flax_nnx.Rngs(0), **{**SIZES, "causal": True, **options})
    state = flax_nnx.state(layer, flax_nnx.Param)
    flax_nnx.replace_by_pure_dict(state, params)
    flax_nnx.update(layer, state)
    return layer


def decoded(decoding, params, cache, x, chunks, fixed=None, jit=True, **call):
    """The outputs of x in chunks, end to end, and the cache behind them; one program for each length of a chunk.

    Args:
        fixed: arguments of every step.
        call: arguments of a step as functions of its first token and of the one behind its last.
    """

    def step(cache, x, **call):
        return decoding.apply({"params": params, "cache": cache}, x, mutable=["cache"], **call, **(fixed or {}))

    step, outs, start = jax.jit(step) if jit else step, [], 0
    for length in chunks:
        part = {name: table(start, start + length) for name, table in call.items()}
        out, updates = step(cache, x[..., start : start + length, :], **part)
        cache, start = updates["cache"], start + length
        outs.append(out)
    return jnp.concatenate(outs, -2), cache


@everywhere
@sampled
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: ",".join(options) or "plain")
def test_decoding_equals_a_full_causal_forward(options):
    chunks = (4, 1, 1, 1)
    layer, decoding, params, cache = layers(**options)
    expected = layer.apply({"params": params}, X)
    out, cache = decoded(decoding, params, cache, X, chunks)
    np.testing.assert_allclose(out, expected, **TOLERANCE)
    assert cache["cache_index"] == SEQ and not np.any(cache["cached_key"][:, SEQ:])
    twin = in_nnx(params, **options, decode=True)
    twin.init_cache((BATCH, MAX_LENGTH, FEATURES))
    step, start = flax_nnx.jit(lambda layer, x: layer(x)), 0
    for length in chunks:
        part = step(twin, X[:, start : start + length])
        np.testing.assert_allclose(part, expected[:, start : start + length], **TOLERANCE)
        start += length
    np.testing.assert_allclose(twin.cached_value[...], cache["cached_value"], **TOLERANCE)


@everywhere
@alike
@pytest.mark.parametrize("normalize_qk", [False, True])
def test_the_cache_and_the_parameters_are_those_of_flax(normalize_qk):
    x, options = jnp.asarray(X[..., :12]), {"normalize_qk": normalize_qk, "decode": True}
    theirs, ours = flax_linen.MultiHeadDotProductAttention(3, **options), linen.Attention(3, **options)
    expected, actual = (layer.init(jax.random.key(0), x) for layer in (theirs, ours))
    jax.tree.map_with_path(_equal, actual, expected)
    nnx_theirs = flax_nnx.MultiHeadAttention(3, 12, **options, rngs=flax_nnx.Rngs(0))
    nnx_ours = nnx.Attention(3, 12, **options, rngs=flax_nnx.Rngs(0))
    for layer in (nnx_theirs, nnx_ours):
        layer.init_cache(x.shape)
    states = [flax_nnx.to_pure_dict(flax_nnx.state(layer)) for layer in (nnx_ours, nnx_theirs)]
    jax.tree.map_with_path(_equal, *states)
    for token in range(3):
        new = x[:, token : token + 1]
        (one, actual_cache), (other, cache) = (
            layer.apply({**expected, "cache": variables["cache"]}, new, mutable=["cache"])
            for layer, variables in ((ours, actual), (theirs, expected))
        )
        actual, expected = {**actual, **actual_cache}, {**expected, **cache}
        np.testing.assert_allclose(one, other, **TOLERANCE)
        np.testing.assert_allclose(nnx_ours(new), nnx_theirs(new), **TOLERANCE)
    jax.tree.map_with_path(partial(_equal, tolerance=TOLERANCE), actual, expected)
    assert nnx_ours.cache_index[...] == nnx_theirs.cache_index[...] == 3


def _equal(path, actual, expected, tolerance=None):
    assert actual.shape == expected.shape and actual.dtype == expected.dtype, path
    np.testing.assert_allclose(actual, expected, **(tolerance or {"rtol": 0}), err_msg=str(path))


SLOPES = normal(4, HEADS)
BIAS, SEEN = normal(3, HEADS, MAX_LENGTH, MAX_LENGTH), np.asarray(normal(5, BATCH, 1, 1, MAX_LENGTH)) > -0.5
RANGES = masks.documents([3, 5, 3])
DOCUMENT = jnp.arange(MAX_LENGTH, dtype=jnp.int32) // 3
# The table of a full forward, of SEQ tokens, and the one of tokens start..stop in decode mode.
TABLES = {
    "mask": (SEEN[..., :SEQ], lambda start, stop: SEEN),
    "bias": (BIAS[:, :SEQ, :SEQ], lambda start, stop: BIAS[:, start:stop]),
    "alibi_slopes": (SLOPES, lambda start, stop: SLOPES),
    "key_ranges": (np.minimum(RANGES[:, :, :SEQ], SEQ), lambda start, stop: RANGES),
}


@everywhere
@alike
@sampled
@pytest.mark.parametrize(
    "names", [("mask", "bias"), ("alibi_slopes",), ("alibi_slopes", "bias"), ("key_ranges",)], ids=str
)
def test_tables_of_a_call_cover_the_whole_cache(names):
    # Sinks see the scores' absolute size, which ALiBi's distances change.
    options = {"sinks": True, "sinks_init": flax_linen.initializers.normal(1.0), "window": 5}
    layer, decoding, params, cache = layers(**options)
    expected = layer.apply({"params": params}, X, **{name: TABLES[name][0] for name in names})
    assert not np.allclose(expected, layer.apply({"params": params}, X), atol=1e-3)
    tables = {name: TABLES[name][1] for name in names}
    # jit does not take numpy's key ranges as they are, which stay on the host.
    out, _ = decoded(decoding, params, cache, X, (4, 1, 1), jit="key_ranges" not in names, **tables)
    np.testing.assert_allclose(out, expected[:, :6], **TOLERANCE)


@everywhere
@alike
@sampled
def test_functions_count_queries_in_the_whole_row():
    layer, decoding, params, cache = layers()
    table = normal(6, HEADS, MAX_LENGTH)
    call = {
        "mask_mod": lambda b, h, q, k, of, table: of[q] == of[k],
        "score_mod": lambda score, b, h, q, k, of, table: score + table[h, q - k],
        "aux": (DOCUMENT, table),
    }
    expected = layer.apply({"params": params}, X, **call)
    assert not np.allclose(expected, layer.apply({"params": params}, X), atol=1e-3)
    out, _ = decoded(decoding, params, cache, X, (4, 1, 1, 1), fixed=call)
    np.testing.assert_allclose(out, expected, **TOLERANCE)


@everywhere
@alike
@sampled
@pytest.mark.parametrize("batch", [(), (2, 3), (1, 2)], ids=str)
def test_a_cache_has_any_number_of_batch_axes(batch):
    layer, decoding, params, cache = layers(batch, rotary=rope_in_jax, window=3)
    x = normal(1, *batch, SEQ, FEATURES)
    assert cache["cached_value"].shape == (*batch, MAX_LENGTH, KV_HEADS, VALUE_DIM)
    mask = jax.random.bernoulli(jax.random.key(2), 0.7, (*batch, 1, 1, MAX_LENGTH))
    expected = layer.apply({"params": params}, x, mask=mask[..., :SEQ])
    out, _ = decoded(decoding, params, cache, x, (7,), mask=lambda start, stop: mask)
    np.testing.assert_allclose(out, expected, **TOLERANCE)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda ahead, new, left: RIGHT(ahead + 1, new, left),
        lambda ahead, new, left: RIGHT(ahead - 1, new, left),
        lambda ahead, new, left: RIGHT(ahead, new, left and left + 1),
        lambda ahead, new, left: RIGHT(ahead, new, None),
    ],
    ids=["hides self", "sees the next place", "wider window", "no window"],
)
def test_a_wrong_range_of_keys_changes_the_numbers(wrong, monkeypatch):
    layer, decoding, params, cache = layers(window=3)
    expected, call = (
        layer.apply({"params": params}, X),
        {"mask": lambda start, stop: np.ones((1, 1, 1, MAX_LENGTH), bool)},
    )
    monkeypatch.setattr(layer_call, "_visible", wrong)
    out, _ = decoded(decoding, params, cache, X, (SEQ,), **call)
    assert not np.allclose(out, expected, atol=1e-3)


RIGHT = layer_call._visible


def test_a_short_window_reads_its_own_keys_alone(monkeypatch):
    seen, attend = [], layer_call.attend_to_heads

    def recording(layer, q, k, v, call, **band):
        if band:  # not the call that initialises
            seen.append((k.shape[1], v.shape[1], call.given["key_ranges"].shape))
        return attend(layer, q, k, v, call, **band)

    monkeypatch.setattr(layer_call, "attend_to_heads", recording)
    _, decoding, params, cache = layers(window=3)
    decoded(decoding, params, cache, X, (5, 1))
    assert seen == [(7, 7, (1, 1, 7, 1, 2)), (3, 3, (1, 1, 3, 1, 2))]


@everywhere
@alike
def test_places_behind_the_index_are_never_read():
    layer, decoding, params, cache = layers()
    expected = layer.apply({"params": params}, X[:, :5])
    stale = {name: jnp.full_like(cache[name], jnp.nan) for name in ("cached_key", "cached_value")}
    out, _ = decoded(decoding, params, {**cache, **stale}, X, (3, 2))
    np.testing.assert_allclose(out, expected, **TOLERANCE)


@everywhere
@alike
@pytest.mark.parametrize(
    ("wrap", "max_length"), [(lambda f: f, SEQ), (jax.checkpoint, MAX_LENGTH)], ids=["plain", "remat"]
)
def test_one_chunk_has_the_gradients_of_the_forward(wrap, max_length):
    layer, decoding, params, cache = layers(max_length=max_length, window=3)

    def loss(apply, *given):
        return jnp.sum(jnp.sin(apply(*given)))

    def chunk(params, cache):
        return decoding.apply({"params": params, "cache": cache}, X, mutable=["cache"])[0]

    expected = jax.jit(jax.grad(partial(loss, lambda params: layer.apply({"params": params}, X))))(params)
    actual = jax.jit(jax.grad(wrap(partial(loss, chunk))))(params, cache)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=2e-4), actual, expected)


@everywhere
@sampled
def test_decoding_runs_in_scans_over_tokens_and_layers():
    class Block(flax_linen.Module):
        decode: bool = False

        @flax_linen.compact
        def __call__(self, x, _):
            return x + linen.Attention(HEADS, **SIZES, causal=True, decode=self.decode)(x), None

    axes = {"variable_axes": {"params": 0, "cache": 0}, "split_rngs": {"params": True}, "length": 3}
    stack = flax_linen.scan(Block, **axes)
    variables = stack(decode=True).init(jax.random.key(0), X, None)
    assert variables["cache"]["Attention_0"]["cache_index"].shape == (3,)
    params = {"params": variables["params"]}
    expected = stack().apply(params, X, None)[0]

    def step(cache, token):
        (out, _), updates = stack(decode=True).apply({**params, **cache}, token[:, None], None, mutable=["cache"])
        return updates, out[:, 0]

    _, out = jax.jit(lambda cache, x: jax.lax.scan(step, cache, x))({"cache": variables["cache"]}, X.swapaxes(0, 1))
    np.testing.assert_allclose(out.swapaxes(0, 1), expected, **TOLERANCE)


@everywhere
@sampled
def test_an_exported_step_decodes_with_any_batch():
    """The index is an array, so one program for several platforms serves every token; it has XLA's operations alone."""
    layer, decoding, params, cache = layers(window=3)
    expected = layer.apply({"params": params}, X)

    def step(cache, x):
        out, updates = decoding.apply({"params": params, "cache": cache}, x, mutable=["cache"])
        return out, updates["cache"]

    scope = jax.export.SymbolicScope()

    def open_batch(array):
        text = ",".join(["b", *map(str, array.shape[1:])])
        shape = jax.export.symbolic_shape(text, scope=scope) if array.ndim else ()
        return jax.ShapeDtypeStruct(shape, array.dtype)

    shapes = jax.tree.map(open_batch, (cache, X[:, :1]))
    exported = jax.export.export(jax.jit(step), platforms=("cpu", "cuda", "tpu"))(*shapes)
    assert "attn_core.callback" not in exported.mlir_module()
    cache = jax.tree.map(lambda array: array[:1] if array.ndim else array, cache)
    for at in range(3):
        out, cache = exported.call(cache, X[:1, at : at + 1])
        np.testing.assert_allclose(out, expected[:1, at : at + 1], **TOLERANCE)


@everywhere
@alike
def test_each_row_of_a_vmap_has_its_own_index():
    layer, decoding, params, cache = layers((), window=3)
    expected = layer.apply({"params": params}, X)

    def step(cache, x):
        return decoding.apply({"params": params, "cache": cache}, x, mutable=["cache"])

    (_, one), (_, other) = step(cache, X[0, :3]), step(cache, X[1, :5])
    rows = jax.tree.map(lambda *leaves: jnp.stack(leaves), one["cache"], other["cache"])
    out, updates = jax.jit(jax.vmap(step))(rows, jnp.stack([X[0, 3:4], X[1, 5:6]]))
    np.testing.assert_allclose(out[:, 0], jnp.stack([expected[0, 3], expected[1, 5]]), **TOLERANCE)
    assert updates["cache"]["cache_index"].tolist() == [4, 6]


@everywhere
@alike
@sampled
def test_nnx_decodes_in_a_scan():
    layer = nnx.Attention(HEADS, FEATURES, rngs=flax_nnx.Rngs(0), causal=True, **SIZES)
    expected = layer(X)
    layer.init_cache((BATCH, MAX_LENGTH, FEATURES))
    layer.set_attributes(decode=True)
    graph, cache, rest = flax_nnx.split(layer, flax_nnx.Cache, ...)

    def step(cache, token):
        layer = flax_nnx.merge(graph, cache, rest)
        out = layer(token[:, None])
        return flax_nnx.state(layer, flax_nnx.Cache), out[:, 0]

    _, out = jax.lax.scan(step, cache, X.swapaxes(0, 1))
    np.testing.assert_allclose(out.swapaxes(0, 1), expected, **TOLERANCE)


@everywhere
@alike
def test_a_narrow_cache_rounds_keys_and_values_alone():
    layer = nnx.Attention(HEADS, FEATURES, rngs=flax_nnx.Rngs(0), causal=True, **SIZES)
    layer.init_cache((BATCH, MAX_LENGTH, FEATURES), jnp.bfloat16)
    out = layer(X, decode=True)
    assert out.dtype == jnp.float32 and layer.cached_key.dtype == jnp.bfloat16
    np.testing.assert_allclose(out, layer(X), rtol=0.05, atol=0.05)
    half = nnx.Attention(HEADS, FEATURES, rngs=flax_nnx.Rngs(0), dtype=jnp.bfloat16, **SIZES)
    half.init_cache((MAX_LENGTH, FEATURES))
    assert half.cached_value.dtype == jnp.bfloat16


def test_a_cache_that_is_full_refuses_tokens_and_stays_as_it_is():
    _, decoding, params, cache = layers()
    cache = {**cache, "cache_index": jnp.array(MAX_LENGTH - 1)}
    from_checkpoint = jax.device_get(cache)  # numpy's arrays
    _, updates = decoding.apply({"params": params, "cache": from_checkpoint}, X[:, :1], mutable=["cache"])
    with pytest.raises(SpecError, match=f"cache_index={MAX_LENGTH}: expected room for 1 new tokens"):
        decoding.apply({"params": params, **updates}, X[:, :1], mutable=["cache"])
    layer = nnx.Attention(HEADS, FEATURES, rngs=flax_nnx.Rngs(0), decode=True, **SIZES)
    layer.init_cache((BATCH, 5, FEATURES))
    layer(X[:, :3])
    before = layer.cached_key[...]
    with pytest.raises(SpecError, match="cache_index=3"):
        layer(X[:, :3])
    with pytest.raises(ShapeError, match="x: expected at most the 5 tokens of the cache, got 6"):
        layer(X[:, :6])
    layer.backend = "sdpa_cudnn"
    with pytest.raises(NoBackendError):
        layer(X[:, :1])
    assert layer.cache_index[...] == 3
    np.testing.assert_array_equal(layer.cached_key[...], before)


def test_a_traced_overflow_overwrites_the_last_places_and_checks_warn():
    _, decoding, params, cache = layers(max_length=4)
    cache = {**cache, "cache_index": jnp.array(4)}

    def step(cache):
        return decoding.apply({"params": params, "cache": cache}, X[:, :1], mutable=["cache"])

    out, updates = jax.jit(step)(cache)
    assert np.isfinite(out).all() and updates["cache"]["cache_index"] == 5
    with checks(True), pytest.warns(CheckWarning, match="cache_index=4: expected room for 1"):
        jax.block_until_ready(jax.jit(lambda cache: step(cache))(cache))
        jax.effects_barrier()


def test_a_linen_layer_without_a_cache():
    layer, decoding, params, _ = layers()
    with pytest.raises(SpecError, match=r"cache: expected apply\(..., mutable=\['cache'\]\) .* has no cache yet"):
        decoding.apply({"params": params}, X)
    # As in Flax: a call without a cache creates one, with the length of x, and sees x as without decode.
    out, updates = decoding.apply({"params": params}, X, mutable=["cache"])
    np.testing.assert_allclose(out, layer.apply({"params": params}, X), **TOLERANCE)
    assert updates["cache"]["cached_key"].shape[1] == SEQ and updates["cache"]["cache_index"] == 0
    with pytest.raises(SpecError, match="appends keys and values to it"):
        decoding.apply({"params": params, **updates}, X[:, :1])


REFUSED = [
    ({}, {"context": X}, SpecError, "context: expected None with decode=True"),
    (
        {},
        {"seq_info": (None, np.array([0, SEQ], np.int32), SEQ)},
        SpecError,
        "seq_info: expected None with decode=True",
    ),
    ({"context_axis": "rows"}, {}, SpecError, "context_axis: expected None with decode=True"),
    ({"causal": False, "window": (3, 2)}, {}, SpecError, r"window=\(3, 2\): expected a right distance of 0"),
    ({}, {"pages": Pages(None, None, None)}, SpecError, "decode=True: expected False with pages"),
    ({}, {"x": X[0]}, ShapeError, r"x: expected the batch axes \[2\] of cached_key, got \[\]"),
    ({}, {"x": X[:1]}, ShapeError, r"x: expected the batch axes \[2\] of cached_key, got \[1\]"),
    ({}, {"mask": np.ones((BATCH, 1, SEQ, SEQ), bool)}, ShapeError, "mask: expected a shape broadcastable to"),
    ({}, {"bias": jnp.ones((SEQ, SEQ))}, ShapeError, "bias: expected a shape broadcastable to"),
    ({}, {"alibi_slopes": jnp.ones((1, 2, 3))}, ShapeError, "alibi_slopes: expected"),
    ({}, {"alibi_slopes": jnp.ones(HEADS + 1)}, ShapeError, r"alibi_slopes: expected \[heads\] = \[6\]"),
    ({}, {"alibi_slopes": jnp.ones(HEADS, int)}, DTypeError, "alibi_slopes: expected one of"),
    ({}, {"alibi_slopes": SLOPES, "bias": jnp.ones((SEQ, SEQ))}, ShapeError, "bias: expected a shape broadcastable"),
    ({}, {"alibi_slopes": SLOPES, "bias": jnp.ones((1, 1), int)}, DTypeError, "bias: expected one of"),
    ({}, {"key_ranges": masks.documents([SEQ])}, ShapeError, "key_ranges: expected shape"),
    ({}, {"key_ranges": RANGES[..., ::-1].copy()}, SpecError, "key_ranges: expected 0 <= start <= stop"),
    ({}, {"mask_mod": trace_mask(lambda b, h, q, k: k <= q)}, SpecError, "mask_mod: expected a function with decode"),
    ({}, {"mask_mod": lambda b, h, q, k, *_: k <= q, "aux": (DOCUMENT,) * 4}, SpecError, "aux: expected at most 3"),
    ({"decode": 1}, {}, SpecError, "decode=1: expected True or False"),
]


@pytest.mark.parametrize(("options", "call", "error", "words"), REFUSED)
def test_refusals_name_the_argument(options, call, error, words):
    _, decoding, params, cache = layers()
    decoding = decoding.clone(**options)
    call = {"x": X, **call}
    with pytest.raises(error, match=words):
        decoding.apply({"params": params, "cache": cache}, **call, mutable=["cache"])
    layer = in_nnx(params)
    layer.init_cache((BATCH, MAX_LENGTH, FEATURES))
    layer.set_attributes(**{"decode": True, **options})
    with pytest.raises(error, match=words):
        layer(**call)


def test_an_nnx_layer_needs_a_cache_of_the_right_shape():
    layer = nnx.Attention(HEADS, FEATURES, rngs=flax_nnx.Rngs(0), **SIZES)
    with pytest.raises(SpecError, match=r"decode=True: expected a cache, got none; call init_cache"):
        layer(X, decode=True)
    for shape in ((BATCH, SEQ), FEATURES, (FEATURES,), (BATCH, -1, FEATURES)):
        with pytest.raises(ShapeError, match="input_shape"):
            layer.init_cache(shape)
    view = flax_nnx.view(layer, decode=True, deterministic=True, batch_size=BATCH, max_length=5)
    assert view.cached_value.shape == (BATCH, 5, KV_HEADS, VALUE_DIM) and layer.cached_key is None
    assert view.decode and view.deterministic and view(X[:, :1]).shape == (BATCH, 1, FEATURES)
    with pytest.raises(SpecError, match="batch_size=2, max_length=None: expected both"):
        flax_nnx.view(layer, decode=True, batch_size=2)
    layer.cached_key = flax_nnx.Cache(jnp.zeros((BATCH, 5, KV_HEADS, DIM + 1)))
    layer.cached_value, layer.cache_index = view.cached_value, view.cache_index
    with pytest.raises(ShapeError, match=r"cached_key: expected the layer's \[batch..., max_length, 3, 4\]"):
        layer(X[:, :1], decode=True)


@sampled
@pytest.mark.parametrize("options", [{}, {"window": 9, "softcap": 0.7, "sinks": True}])
def test_a_decoded_token_has_the_bits_of_its_prompt(options, monkeypatch):
    calls = []

    def watched(q, k, v, **keywords):
        calls.append((q, k, v, keywords, attention(q, k, v, **keywords)))
        return calls[-1][4]

    monkeypatch.setattr(layer_of_flax, "attention", watched)
    _, decoding, params, cache = layers(max_length=90, **options, invariant="prefix", backend="jax_xla")
    x, first = normal(3, BATCH, 75, FEATURES), 0
    for new in (66, 1, 7, 1):  # the last are in the second tile of 64 keys
        part = x[:, first : first + new]
        _, written = decoding.apply({"params": params, "cache": cache}, part, mutable=["cache"])
        cache, first = written["cache"], first + new
    q = jnp.concatenate([call[0] for call in calls], 1)
    _, k, v, keywords, _ = calls[-1]
    same = {name: keywords[name] for name in ("causal", "window", "softcap", "sinks", "backend", "invariant")}
    whole = attention(q, k[:, :first], v[:, :first], **same)
    np.testing.assert_array_equal(jnp.concatenate([call[4] for call in calls], 1), whole)


def test_a_layer_that_promises_equal_bits_in_every_batch_decodes():
    layer, decoding, params, cache = layers(invariant="batch")
    outs, _ = decoded(decoding, params, cache, X, (4, 1, 2))
    np.testing.assert_allclose(outs, layer.apply({"params": params}, X), **TOLERANCE)


def test_a_promise_beside_a_mask_is_refused_with_its_reason():
    _, decoding, params, cache = layers(invariant="batch")
    visible = jnp.ones((BATCH, 1, 1, MAX_LENGTH), bool)
    with pytest.raises(NoBackendError, match="key_ranges with invariant='batch'"):
        decoding.apply({"params": params, "cache": cache}, X[:, :1], mask=visible, mutable=["cache"])


def test_a_view_makes_a_cache_for_a_layer_that_decodes_and_refuses_a_size_for_another() -> None:
    layer = nnx.Attention(4, 32, rngs=flax_nnx.Rngs(0))
    for decode in (None, False):
        with pytest.raises(SpecError, match=r"^batch_size=2: expected decode=True with it"):
            layer.set_view(deterministic=True, decode=decode, batch_size=2, max_length=7)
    assert layer.deterministic is None and not layer.decode  # nothing was set
    layer.set_view(decode=True, batch_size=2, max_length=7)
    assert layer.cached_key.shape == (2, 7, 4, 8)
    layer.set_view(batch_size=3, max_length=5)  # it decodes already
    assert layer.cached_key.shape == (3, 5, 4, 8)
