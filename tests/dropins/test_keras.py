"""Tests examples/hosts/keras_attention.py: the function by signature and numbers, and Keras's layers if installed."""

from __future__ import annotations

import inspect
import os

import numpy as np
import pytest

pytest.importorskip("jax")
import jax
import jax.numpy as jnp
from reference_calls import attended

from attn_core.errors import DTypeError, ShapeError, SpecError
from examples.hosts.keras_attention import dot_product_attention, installed

BATCH, Q_LEN, KV_LEN, HEADS, KV_HEADS, DIM = 2, 5, 7, 4, 2, 8


def rows(seed=0):
    draw = np.random.default_rng(seed).normal
    shapes = ((Q_LEN, HEADS), (KV_LEN, KV_HEADS), (KV_LEN, KV_HEADS))
    return tuple(draw(size=(BATCH, *shape, DIM)).astype(np.float32) for shape in shapes)


def reference(q, k, v, bias=None, mask=None, scale=None, is_causal=False, attn_logits_soft_cap=None, **rest):
    """Returns the attention of float64, with 0 in rows without keys."""
    seen = np.tri(Q_LEN, KV_LEN, dtype=bool) if is_causal else np.ones((Q_LEN, KV_LEN), bool)
    seen = np.broadcast_to(seen if mask is None else seen & (mask != 0), (BATCH, 1, Q_LEN, KV_LEN))
    bias = None if bias is None else np.broadcast_to(bias, (BATCH, HEADS, Q_LEN, KV_LEN))
    return attended(q, k, v, mask=seen, bias=bias, scale=scale, softcap=attn_logits_soft_cap)


MASK = np.random.default_rng(1).random((BATCH, 1, Q_LEN, KV_LEN)) < 0.5
MASK[0, 0, 2] = False  # a query without keys
CALLS = {
    "plain": {},
    "scale": {"scale": 0.3},
    "causal": {"is_causal": True},
    "cap": {"attn_logits_soft_cap": 0.7},
    "mask": {"mask": MASK},
    "mask of numbers": {"mask": MASK.astype(np.float32)},
    "mask of two axes": {"mask": MASK[1, 0]},
    "bias": {"bias": np.random.default_rng(2).normal(size=(1, HEADS, Q_LEN, KV_LEN))},
    "all": {"mask": MASK, "bias": np.ones((Q_LEN, 1)), "is_causal": True, "attn_logits_soft_cap": 2.0, "scale": 1.5},
    "flash": {"flash_attention": True},
    "no flash": {"flash_attention": False, "is_causal": True},
}


@pytest.mark.parametrize("name", CALLS)
def test_results_equal_those_of_float64(name):
    out = dot_product_attention(*rows(), **CALLS[name])
    np.testing.assert_allclose(out, reference(*rows(), **CALLS[name]), rtol=1e-4, atol=1e-5)


def test_dtypes_promote():
    q, k, v = rows()
    out = dot_product_attention(jnp.asarray(q, jnp.bfloat16), jnp.asarray(k, jnp.float16), jnp.asarray(v, jnp.float16))
    assert out.dtype == jnp.float32


def test_what_is_no_attention_is_refused_by_name():
    q, k, v = rows()
    with pytest.raises(ShapeError, match=r"key: `dot_product_attention` only supports 4D inputs"):
        dot_product_attention(q, k[0], v)
    with pytest.raises(SpecError, match="is_causal"):
        dot_product_attention(q, k, v, is_causal="yes")
    with pytest.raises(SpecError, match="flash_attention"):
        dot_product_attention(q, k, v, flash_attention="yes")
    with pytest.raises(DTypeError, match="int32"):
        dot_product_attention(*(np.ones((1, 2, 2, 4), np.int32),) * 3)


def test_signature():
    """The parameters of keras.ops.dot_product_attention in Keras 3.10 to 3.15."""
    found = inspect.signature(dot_product_attention).parameters
    assert {name: each.default for name, each in found.items()} == {
        **dict.fromkeys(("query", "key", "value"), inspect.Parameter.empty),
        **{"bias": None, "mask": None, "scale": None, "is_causal": False},
        **{"flash_attention": None, "attn_logits_soft_cap": None},
    }


@pytest.fixture
def keras():
    os.environ.setdefault("KERAS_BACKEND", "jax")
    module = pytest.importorskip("keras")
    if module.backend.backend() != "jax":
        pytest.skip("Keras runs on another backend")
    return module


def test_signature_is_that_of_keras(keras):
    found, theirs = (
        inspect.signature(each).parameters for each in (dot_product_attention, keras.ops.dot_product_attention)
    )
    assert [(each.name, each.default) for each in found.values()] == [
        (each.name, each.default) for each in theirs.values()
    ]


def test_layers_run_on_it_inside_the_block(keras, monkeypatch):
    layers = (keras.layers.MultiHeadAttention(4, 8), keras.layers.GroupQueryAttention(8, 4, 2))
    x = jax.random.normal(jax.random.key(0), (2, 6, 16))
    before = [layer(x, x, use_causal_mask=True) for layer in layers]
    place = keras.src.backend.jax.nn
    theirs = place.dot_product_attention
    with installed(), installed():
        assert place.dot_product_attention is dot_product_attention
        monkeypatch.setattr(jax.nn, "dot_product_attention", None)  # which Keras's own function would call
        after = [layer(x, x, use_causal_mask=True) for layer in layers]
    assert place.dot_product_attention is theirs
    for one, other in zip(after, before, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
