"""Tests examples/hosts/maxtext_attention.py: MaxText's masks, computed by loops, and refusals by name.

MaxText itself is not installed here; test_signature_of_the_method lists the parameters of its ``apply_attention``.
"""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("jax")
import jax
import jax.numpy as jnp
from reference_calls import reference_call

from attn_core.correctness import reference as truth
from attn_core.errors import ShapeError, SpecError
from examples.hosts.maxtext_attention import apply_attention

BATCH, LENGTH, HEADS, KV_HEADS, DIM = 2, 12, 4, 2, 8
EINSUMS = {"qk_product_einsum": jnp.einsum, "wv_product_einsum": jnp.einsum}
SEGMENTS = np.array([[1, 1, 1, 1, 1, 2, 2, 2, 2, 3, 0, 0], [7, 7, 3, 3, 3, 7, 7, 1, 1, 1, -1, -1]], np.int32)
IMAGES = np.array([[0, 1, 1, 0, 0, 1, 1, 1, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0, 0, 0, 0, 1, 1, 0]], bool)


def op_of(kind="global", **fields):
    config = SimpleNamespace(context_sharding="context", moba=False, enable_dropout=True)
    mesh = SimpleNamespace(shape={"data": 1, "context": 1})
    sizes = {"sliding_window_size": 3, "chunk_attn_window_size": 4, "causal_block_size": 4}
    defaults = {"attn_logits_soft_cap": None, "dropout_rate": 0.0, "kv_quant": None, "config": config, "mesh": mesh}
    return SimpleNamespace(attention_type=SimpleNamespace(value=kind), **{**defaults, **sizes, **fields})


def rows(q_len=LENGTH, kv_len=LENGTH, seed=0):
    draw = np.random.default_rng(seed).normal
    shapes = ((q_len, HEADS), (kv_len, KV_HEADS), (kv_len, KV_HEADS))
    return tuple(draw(size=(BATCH, *shape, DIM)).astype(np.float32) for shape in shapes)


def places(kind, i, j):
    """Whether the query at place i sees the key at place j, before segments."""
    if kind == "full":
        return True
    if kind == "block_diffusion":
        return i // 4 >= j // 4
    near = {"local_sliding": i - j < 3, "chunk": i // 4 == j // 4}.get(kind, True)
    return j <= i and near


def seen_by_loops(kind, q_len, kv_len, start=0, ids=None, images=None):
    seen = np.zeros((BATCH, 1, q_len, kv_len), bool)
    for b, i, j in np.ndindex(BATCH, q_len, kv_len):
        shown = places(kind, i + start, j)
        if ids is not None:
            shown = shown and ids[b, i + start] == ids[b, j] and ids[b, j] >= 0
        if images is not None:
            low, high = sorted((i, j))
            shown = shown or bool(images[b, low : high + 1].all())
        seen[b, 0, i, j] = shown
    return seen


def reference(q, k, v, seen, cap=None, sinks=None):
    """Returns the attention of float64 and its log-sum-exp, with scale 1; 0 and -inf in rows without keys."""
    return truth.forward(*reference_call(q, k, v, mask=seen, sinks=sinks, softcap=cap, scale=1.0))


def call(op, arrays, ids=None, mode="train", **options):
    return apply_attention(op, *map(jnp.asarray, arrays), ids, None, None, mode, **EINSUMS, **options)


@pytest.mark.parametrize("with_ids", [True, False])
@pytest.mark.parametrize("kind", ["global", "mla", "local_sliding", "chunk", "full", "block_diffusion"])
def test_training_sees_the_keys_of_the_attention_type(kind, with_ids):
    arrays, ids = rows(), SEGMENTS if with_ids else None
    sinks, cap = np.array([0.5, -1, 2, 0], np.float32), 3.0
    op = op_of(kind, attn_logits_soft_cap=cap)
    out, *rest = jax.jit(lambda ids, *arrays: call(op, arrays, ids, sinks=jnp.asarray(sinks)))(ids, *arrays)
    assert rest == [None, None]
    seen = seen_by_loops(kind, LENGTH, LENGTH, ids=ids)
    np.testing.assert_allclose(out, reference(*arrays, seen, cap, sinks)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["global", "local_sliding", "full"])
def test_runs_of_images_see_each_other(kind):
    arrays = rows()
    for ids in (None, SEGMENTS):
        out, *_ = call(op_of(kind), arrays, ids, bidirectional_mask=jnp.asarray(IMAGES))
        seen = seen_by_loops(kind, LENGTH, LENGTH, ids=ids, images=IMAGES)
        np.testing.assert_allclose(out, reference(*arrays, seen)[0], rtol=1e-4, atol=1e-5)


def test_documents_do_not_leak_in_gradients():
    """The gradient of a document's output is 0 outside the document."""
    arrays = tuple(map(jnp.asarray, rows()))
    inside = SEGMENTS[0] == 2

    def loss(*arrays):
        return jnp.sum(call(op_of(), arrays, SEGMENTS)[0][0, inside])

    for gradient in jax.grad(loss, argnums=(0, 1, 2))(*arrays):
        assert np.all(gradient[0, ~inside] == 0)
        assert np.all(gradient[1] == 0)
        assert np.any(gradient[0, inside] != 0)


@pytest.mark.parametrize("kind", ["global", "local_sliding", "chunk", "block_diffusion"])
@pytest.mark.parametrize("kv_len", [LENGTH, 10])
def test_a_chunk_of_a_prefill_starts_behind_the_previous_one(kind, kv_len):
    """The cache may have places behind the chunk."""
    arrays, start = rows(4, kv_len), 6
    previous = jnp.zeros((BATCH, start, KV_HEADS, DIM))
    ids = SEGMENTS[:, :kv_len]
    out, *_ = call(op_of(kind), arrays, ids, "prefill", previous_chunk=previous)
    seen = seen_by_loops(kind, 4, kv_len, start, ids)
    np.testing.assert_allclose(out, reference(*arrays, seen)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["global", "local_sliding", "chunk"])
def test_two_parts_of_a_cache_merge_as_in_maxtext(kind):
    ids = np.array([[1] * 7 + [0] * 5, [0] * 12], np.int32)
    parts = [rows(1, LENGTH), rows(1, LENGTH, seed=1)]
    parts[1] = (parts[0][0], *parts[1][1:])
    results = [
        call(op_of(kind), part, jnp.asarray(ids[::flip]), "autoregressive") for part, flip in zip(parts, (1, -1))
    ]
    top = np.maximum(results[0][1], results[1][1])
    total = sum(np.exp(peak - top) * number for _, peak, number in results)
    merged = sum(np.exp(peak - top) / total * out for out, peak, _ in results)
    expected = []
    for part, flip in zip(parts, (1, -1)):
        near = np.array([places(kind, LENGTH - 1, j) for j in range(LENGTH)])
        expected.append(reference(*part, (ids[::flip] == 1)[:, None, None, :] & near))
    lse = np.logaddexp(expected[0][1], expected[1][1])
    with np.errstate(invalid="ignore"):
        weights = [np.nan_to_num(np.exp(each - lse)).swapaxes(1, 2)[..., None] for _, each in expected]
    right = sum(weight * out for weight, (out, _) in zip(weights, expected))
    np.testing.assert_allclose(merged, right, rtol=1e-4, atol=1e-5)


def test_a_quantised_cache_and_an_indexer_mask():
    q, k, v = rows(1)
    hidden = np.where(np.arange(LENGTH) % 3 == 0, -2e38, 0).astype(np.float32)
    indexer = np.broadcast_to(hidden, (BATCH, 1, LENGTH))
    stored = [SimpleNamespace(dequant=lambda array=array: jnp.asarray(array)) for array in (k, v)]
    ids = np.ones((BATCH, LENGTH), np.int32)
    out, *_ = apply_attention(
        op_of(kv_quant=object()), q, *stored, ids, None, None, "autoregressive", indexer_mask=indexer,
        qk_product_einsum=len, wv_product_einsum=len,
    )  # fmt: skip
    seen = np.broadcast_to(hidden == 0, (BATCH, 1, 1, LENGTH))
    np.testing.assert_allclose(out, reference(q, k, v, seen)[0], rtol=1e-4, atol=1e-5)


CONFIG = op_of().config
REFUSED = {
    "compressed_mask": ({}, {"compressed_mask": np.zeros(3)}),
    "use_ragged_attention=True": ({}, {"use_ragged_attention": True, "mode": "autoregressive"}),
    "model_mode='serve'": ({}, {"mode": "serve"}),
    "attention_type=compressed": ({"kind": "compressed"}, {}),
    "sliding_window_size=None": ({"kind": "local_sliding", "sliding_window_size": None}, {}),
    "dropout_rate=0.1": ({"dropout_rate": 0.1}, {}),
    "moba=True": ({"config": SimpleNamespace(**{**vars(CONFIG), "moba": True})}, {}),
    "context_sharding='context'": ({"mesh": SimpleNamespace(shape={"context": 2})}, {}),
    "bidirectional_mask": ({}, {"bidirectional_mask": IMAGES, "mode": "autoregressive"}),
    "decoder_segment_ids=None": ({"kind": "chunk"}, {"mode": "autoregressive", "arrays": rows(1)}),
    "query: expected one token": ({"kind": "chunk"}, {"mode": "autoregressive"}),
    "decoder_segment_ids: expected": ({}, {"ids": SEGMENTS[:, :5]}),
    "decoder_segment_ids_kv": ({}, {"decoder_segment_ids_kv": SEGMENTS}),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_no_kernel_honours_is_refused_by_name(words):
    fields, options = REFUSED[words]
    options = dict(options)
    with pytest.raises((SpecError, ShapeError)) as raised:
        call(op_of(**fields), options.pop("arrays", rows()), options.pop("ids", None), **options)
    assert words in str(raised.value)


@pytest.mark.parametrize("mode", ["train", "autoregressive"])
def test_largest_logits_are_on_the_op(mode):
    """As an ``nnx.Intermediate`` [batch, heads], which MaxText's qk_clip_utils reads."""
    nnx = pytest.importorskip("flax.nnx")
    op, (q, k, v) = op_of(attn_logits_soft_cap=3.0), rows(1 if mode == "autoregressive" else LENGTH)
    usual = call(op, (q, k, v), None, mode=mode)
    assert not hasattr(op, "max_logits")
    results = call(op, (q, k, v), None, mode=mode, record_max_logits=True)
    assert all(one is other or np.array_equal(one, other) for one, other in zip(results, usual, strict=True))
    logits = 3 * np.tanh(np.einsum("bihd,bjhd->bhij", q, k.repeat(HEADS // KV_HEADS, 2)) / 3)
    logits = np.where(np.tri(LENGTH, dtype=bool), logits, -np.inf) if mode == "train" else logits
    assert isinstance(op.max_logits, nnx.Intermediate)
    np.testing.assert_allclose(op.max_logits[...], logits.max((2, 3)), rtol=1e-5)


def test_another_einsum_is_refused():
    with pytest.raises(SpecError, match="wv_product_einsum"):
        apply_attention(
            op_of(), *rows(), None, None, None, "train", qk_product_einsum=jnp.einsum, wv_product_einsum=len
        )


def test_signature_of_the_method():
    """The names and defaults of AttentionOp.apply_attention on MaxText's main branch of August 2026."""
    found = inspect.signature(apply_attention).parameters
    assert list(found) == [
        "op", "query", "key", "value", "decoder_segment_ids", "segment_positions", "lengths", "model_mode",
        "use_ragged_attention", "previous_chunk", "bidirectional_mask", "sinks", "indexer_mask", "compressed_mask",
        "record_max_logits", "decoder_segment_ids_kv", "qk_product_einsum", "wv_product_einsum",
    ]  # fmt: skip
    defaults = [each.default for each in found.values()]
    assert defaults[8:16] == [False, None, None, None, None, None, False, None]
