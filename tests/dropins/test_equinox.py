"""Tests equinox's MultiheadAttention through jax_frontend.equinox.attend: the layer's own numbers, and our options."""

from __future__ import annotations

import inspect

import numpy as np
import pytest

pytest.importorskip("equinox")

import equinox as eqx
import jax
import jax.numpy as jnp

from attn_core import NoBackendError, SeqInfo, masks
from attn_core.errors import ShapeError, SpecError
from jax_frontend.equinox import attend

pytestmark = pytest.mark.sampled

Q_LEN, KV_LEN, HEADS = 5, 7, 3
SIZES = {"query_size": 12, "key_size": 10, "value_size": 8, "output_size": 11, "qk_size": 5, "vo_size": 6}
BIASES = {f"use_{name}_bias": True for name in ("query", "key", "value", "output")}
TOLERANCE = {"rtol": 1e-5, "atol": 2e-6}


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def layer_of(**options):
    return eqx.nn.MultiheadAttention(HEADS, **{"query_size": 12, **options}, key=jax.random.key(9))


def rows(layer, q_len=Q_LEN, kv_len=KV_LEN):
    lengths = ((q_len, layer.query_size), (kv_len, layer.key_size), (kv_len, layer.value_size))
    return tuple(normal(seed, *shape) for seed, shape in enumerate(lengths))


def some_mask(*shape):
    """A mask under which every query sees the first key."""
    return jax.random.bernoulli(jax.random.key(3), 0.6, shape).at[..., 0].set(True)


def turned(query, key, value):
    """What ``process_heads`` may do: it changes each of the three in its own way."""
    return query * 2, jnp.roll(key, 1, axis=0), value[..., ::-1]


LAYERS = {"plain": {}, "all sizes": SIZES, "biases": {**SIZES, **BIASES}}
CALLS = {
    "no mask": {},
    "mask": {"mask": some_mask(Q_LEN, KV_LEN)},
    "mask of each head": {"mask": some_mask(HEADS, Q_LEN, KV_LEN)},
    "0/1 mask": {"mask": some_mask(Q_LEN, KV_LEN).astype(jnp.int32)},
    "process_heads": {"process_heads": turned},
    "process_heads and mask": {"process_heads": turned, "mask": some_mask(HEADS, Q_LEN, KV_LEN)},
    "inference": {"inference": True, "key": jax.random.key(1)},
}


@pytest.mark.parametrize(
    ("kind", "call"),
    [*(("biases", name) for name in CALLS), ("plain", "mask"), ("all sizes", "process_heads and mask")],
)
def test_results_equal_those_of_the_layer(kind, call):
    layer, options = layer_of(**LAYERS[kind], dropout_p=0.5 if call == "inference" else 0.0), CALLS[call]
    given = rows(layer)
    out = attend(layer, *given, **options)
    assert out.shape == (Q_LEN, layer.output_size)
    np.testing.assert_allclose(out, layer(*given, **options), **TOLERANCE)


def test_every_argument_of_the_layer_is_accepted():
    theirs = list(inspect.signature(layer_of().__call__).parameters.values())
    ours = list(inspect.signature(attend).parameters.values())[1:]
    assert [(one.name, one.kind, one.default) for one in theirs[:4]] == [
        (one.name, one.kind, one.default) for one in ours[:4]
    ]
    assert {one.name for one in theirs} <= {one.name for one in ours}
    assert not any(one.kind is one.VAR_KEYWORD for one in (*theirs, *ours))


def test_gradients_of_a_batch_under_jit_equal_those_of_the_layer():
    layer, mask = layer_of(**LAYERS["biases"]), some_mask(Q_LEN, KV_LEN)
    batch = tuple(jnp.stack([array, 1 - array, array[::-1]]) for array in rows(layer))

    def gradients(function):
        def loss(layer, batch):
            out = jax.vmap(lambda *row: function(layer, *row, mask))(*batch)
            return jnp.sum(out**2), out

        return eqx.filter_jit(eqx.filter_value_and_grad(loss, has_aux=True))(layer, batch)

    (_, out), actual = gradients(attend)
    (_, desired), expected = gradients(lambda layer, *given: layer(*given))
    np.testing.assert_allclose(out, desired, **TOLERANCE)
    leaves = [jax.tree.leaves(eqx.filter(tree, eqx.is_array)) for tree in (actual, expected)]
    assert len(leaves[0]) == 8
    for got, right in zip(*leaves, strict=True):
        np.testing.assert_allclose(got, right, rtol=1e-4, atol=1e-4)


def test_half_precision_inputs_give_half_precision_outputs():
    layer = layer_of(dtype=jnp.bfloat16)
    given = tuple(array.astype(jnp.bfloat16) for array in rows(layer))
    out = attend(layer, *given)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.float32(out), np.float32(layer(*given)), rtol=0.03, atol=0.03)


def test_a_query_without_keys_gives_the_output_bias():
    layer = layer_of(**BIASES)
    out = attend(layer, *rows(layer), some_mask(Q_LEN, KV_LEN).at[2].set(False))
    np.testing.assert_array_equal(out[2], layer.output_proj.bias)
    assert not np.allclose(out[1], out[2], atol=1e-3)


# Dropout


@pytest.mark.parametrize(
    ("in_layer", "in_call", "drops"),
    [(False, None, True), (False, False, True), (True, False, True), (True, None, False), (False, True, False)],
)
def test_inference_switches_dropout_off_as_in_the_layer(in_layer, in_call, drops):
    layer = layer_of(dropout_p=0.5, inference=in_layer)
    given, key = rows(layer), jax.random.key(1)
    for function in (attend, lambda layer, *given, **options: layer(*given, **options)):
        plain = function(layer, *given, inference=True)
        assert np.allclose(function(layer, *given, key=key, inference=in_call), plain) != drops
    if drops:
        with pytest.raises(SpecError, match=r"key=None: expected a PRNG key for dropout_p=0\.5"):
            attend(layer, *given, inference=in_call)


def test_the_deprecated_argument_works_as_in_the_layer():
    layer = layer_of(dropout_p=0.5)
    with pytest.warns(UserWarning, match="deprecated"):
        out = attend(layer, *rows(layer), deterministic=True)
    np.testing.assert_array_equal(out, attend(layer, *rows(layer), inference=True))


def test_dropped_weights_depend_on_the_key_of_each_row_and_keep_the_mean():
    layer = layer_of(dropout_p=0.25, query_size=HEADS * 4)
    identity = jnp.eye(HEADS * 4)
    layer = eqx.tree_at(lambda it: (it.value_proj.weight, it.output_proj.weight), layer, (identity, identity))
    query, key_, _ = rows(layer, 64, 64)
    value = jnp.ones((64, HEADS * 4))
    keys = jax.random.split(jax.random.key(0), 3)
    out = jax.vmap(lambda key: attend(layer, query, key_, value, key=key))(keys)
    # A weight dropped or kept adds about 1 / 64. Programs of three rows and of one row may round differently.
    np.testing.assert_allclose(out[1], attend(layer, query, key_, value, key=keys[1]), **TOLERANCE)
    assert not np.allclose(out[0], out[1], atol=1e-3)
    assert float(out.mean()) == pytest.approx(1.0, abs=0.02)


def test_a_rate_that_is_traced_is_refused():
    layer = layer_of(dropout_p=0.5)
    traced = eqx.tree_at(lambda it: it.dropout.p, layer, jnp.asarray(0.5))
    with pytest.raises(SpecError, match=r"layer\.dropout\.p: expected a Python number"):
        attend(traced, *rows(layer), key=jax.random.key(0))


# Our options


def test_options_are_passed_to_attention():
    layer = layer_of()
    given = rows(layer, Q_LEN, Q_LEN)
    row, column = np.arange(Q_LEN)[:, None], np.arange(Q_LEN)
    document = np.asarray([0, 0, 1, 1, 1])
    visible = {
        "causal": ({"causal": True}, column <= row),
        "window": ({"causal": True, "window": 2}, (column <= row) & (column > row - 2)),
        "seq_info": ({"seq_info": SeqInfo.from_lengths([2, 3])}, document[:, None] == document),
        "key_ranges": ({"key_ranges": masks.documents([2, 3])}, document[:, None] == document),
        "mask_mod": ({"mask_mod": lambda b, h, q, k: k <= q}, column <= row),
        "aux": (
            {"mask_mod": lambda b, h, q, k, of: of[q] == of[k], "aux": (document,)},
            document[:, None] == document,
        ),
        "bias": ({"bias": jnp.where(column <= row, 0.0, -jnp.inf)}, column <= row),
    }
    for name, (options, mask) in visible.items():
        np.testing.assert_allclose(
            attend(layer, *given, **options), layer(*given, jnp.asarray(mask)), **TOLERANCE, err_msg=name
        )
    plain = attend(layer, *given)
    for options in ({"softcap": 0.1}, {"scale": 3.0}, {"alibi_slopes": jnp.ones(HEADS)}, {"sinks": jnp.ones(HEADS)}):
        assert not np.allclose(attend(layer, *given, **options), plain, atol=1e-4), options
    np.testing.assert_allclose(attend(layer, *given, backend="math", bitwise_deterministic=True), plain, **TOLERANCE)
    with pytest.raises(NoBackendError, match="softcap"):
        attend(layer, *given, softcap=2.0, backend="sdpa_flash")
    bottom, top = (attend(layer, *rows(layer), causal=True, alignment=where) for where in ("bottom_right", "top_left"))
    assert not np.allclose(bottom, top, atol=1e-4)


REFUSED = {
    "a batch": (lambda layer: {"query": normal(0, 2, Q_LEN, 12)}, r"query: expected \[length, query_size\] = .*vmap"),
    "features": (
        lambda layer: {"value": normal(0, KV_LEN, 5)},
        r"value: expected \[length, value_size\] = \[length, 8\]",
    ),
    "lengths": (lambda layer: {"value": normal(0, 4, 8)}, r"value: expected the length of key_ \(7\), got 4"),
    "mask": (lambda layer: {"mask": some_mask(1, KV_LEN)}, r"mask: expected \[q_len, kv_len\] = \[5, 7\] or"),
    "bias": (lambda layer: {"bias": normal(0, 2, Q_LEN, KV_LEN)}, r"bias: expected .* got \[2, 5, 7\]"),
    "process_heads": (
        lambda layer: {"process_heads": lambda q, k, v: (q[:2], k, v)},
        r"process_heads: expected query heads of \[5, 3, 5\], got \[2, 3, 5\]",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_arguments_that_do_not_fit_are_named(name):
    layer = layer_of(**SIZES)
    change, words = REFUSED[name]
    with pytest.raises(ShapeError, match=words):
        attend(layer, **{**dict(zip(("query", "key_", "value"), rows(layer), strict=True)), **change(layer)})
