"""Tests examples/hosts/transformer_engine_attention.py against float64, with masks computed by loops.

Transformer Engine is not installed here: enumerations and descriptors are stand-ins with its members and fields.
"""

from __future__ import annotations

import enum
import inspect
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("jax")
import jax
import jax.numpy as jnp

from attn_core.errors import ShapeError, SpecError
from examples.hosts.transformer_engine_attention import fused_attn

BATCH, LENGTH, HEADS, KV_HEADS, DIM = 2, 12, 4, 2, 8
NONE = np.zeros(0)
TYPES = ("PADDING_MASK", "PADDING_CAUSAL_MASK", "PADDING_CAUSAL_BOTTOM_RIGHT_MASK")
Masks = enum.Enum("AttnMaskType", ["NO_MASK", "CAUSAL_MASK", "CAUSAL_BOTTOM_RIGHT_MASK", *TYPES])


def descriptor(**pairs):
    names = ("seqlens", "seq_offsets", "segment_ids", "segment_pos")
    return SimpleNamespace(**{name: pairs.get(name, (NONE, NONE)) for name in names})


def rows(q_len=LENGTH, kv_len=LENGTH, kv_heads=KV_HEADS):
    draw = np.random.default_rng(0).normal
    shapes = ((q_len, HEADS), (kv_len, kv_heads), (kv_len, kv_heads))
    return tuple(draw(size=(BATCH, *shape, DIM)).astype(np.float32) for shape in shapes)


def reference(q, k, v, seen, bias=0.0, sinks=None, scale=0.3):
    """Written out, so that a wrong reference of ``attn_core`` shows here."""
    group = HEADS // k.shape[2]
    q, k, v = (np.float64(array) for array in (q, np.repeat(k, group, 2), np.repeat(v, group, 2)))
    weights = np.where(seen[:, None], np.exp(np.einsum("bqhd,bkhd->bhqk", q, k) * scale + bias), 0)
    total = weights.sum(-1, keepdims=True) + (0 if sinks is None else np.exp(np.float64(sinks))[:, None, None])
    return np.einsum("bhqk,bkhd->bqhd", weights / np.where(total == 0, 1, total), v)


def seen_by_loops(segments, mask_type, q_len, kv_len, window=(-1, -1)):
    """segments: for each row ``(first query, queries, first key, keys)`` of each segment."""
    seen = np.zeros((BATCH, q_len, kv_len), bool)
    for b, row in enumerate(segments):
        for first_q, queries, first_k, keys in row:
            for i, j in np.ndindex(queries, keys):
                place = i + (keys - queries if "BOTTOM_RIGHT" in mask_type else 0)
                inside = (window[0] < 0 or j >= place - window[0]) and (window[1] < 0 or j <= place + window[1])
                seen[b, first_q + i, first_k + j] = inside and ("CAUSAL" not in mask_type or j <= place)
    return seen


def call(qkv, described=None, mask_type="NO_MASK", layout="BSHD_BSHD_BSHD", **options):
    named = {"bias": None, "seed": None, "bias_type": "NO_BIAS", "softmax": "VANILLA_SOFTMAX", "dropout": 0.0}
    named |= {"training": True} | {name: options.pop(name) for name in (*named, "training") if name in options}
    return fused_attn(
        tuple(map(jnp.asarray, qkv)), named["bias"], described, named["seed"], named["bias_type"], Masks[mask_type],
        layout, named["softmax"], 0.3, named["dropout"], named["training"], **options,
    )  # fmt: skip


# Two rows of packed segments, with gaps between them, and a segment without keys.
PACKED = ([(0, 4, 0, 3), (5, 3, 3, 5), (8, 3, 10, 2)], [(2, 5, 1, 7), (8, 2, 9, 0)])


def packed_as(form, segments, lengths):
    """Describes segments by lengths and offsets, or by ids and positions."""
    sides = ([], [])
    for side, length in enumerate(lengths):
        counts, starts = np.full((BATCH, 3), -1, np.int32), np.full((BATCH, 4), -1, np.int32)
        ids, places = np.zeros((2, BATCH, length), np.int32)
        for b, row in enumerate(segments):
            for number, segment in enumerate(row):
                start, count = segment[2 * side : 2 * side + 2]
                counts[b, number], starts[b, number] = count, start
                ids[b, start : start + count], places[b, start : start + count] = number + 1, np.arange(count)
        sides[side].extend((counts, starts, ids, places))
    counts, starts, ids, places = zip(*sides, strict=True)
    if form == "offsets":
        return descriptor(seqlens=counts, seq_offsets=starts)
    return descriptor(segment_ids=ids, segment_pos=places)


@pytest.mark.parametrize("mask_type", TYPES)
@pytest.mark.parametrize("form", ["offsets", "ids"])
@pytest.mark.parametrize("window", [None, (2, 1)])
def test_packed_segments_with_gaps(form, mask_type, window):
    arrays, described = rows(), packed_as(form, PACKED, (LENGTH, LENGTH))
    out = jax.jit(
        lambda arrays, pairs: call(
            arrays, SimpleNamespace(**pairs), mask_type, "THD_THD_THD", max_segments_per_seq=3, window_size=window
        )
    )(arrays, vars(described))
    seen = seen_by_loops(PACKED, mask_type, LENGTH, LENGTH, window or (-1, -1))
    np.testing.assert_allclose(out, reference(*arrays, seen), rtol=1e-4, atol=1e-5)
    assert np.all(np.asarray(out)[~seen.any(-1)] == 0)


@pytest.mark.parametrize("mask_type", TYPES)
def test_padded_rows(mask_type):
    arrays = rows(6, 9)
    lengths = (np.array([4, 6], np.int32), np.array([7, 2], np.int32))
    out = call(arrays, descriptor(seqlens=lengths), mask_type)
    segments = [[(0, queries, 0, keys)] for queries, keys in zip(*lengths, strict=True)]
    np.testing.assert_allclose(out, reference(*arrays, seen_by_loops(segments, mask_type, 6, 9)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mask_type", ["NO_MASK", "CAUSAL_MASK", "CAUSAL_BOTTOM_RIGHT_MASK"])
@pytest.mark.parametrize("window", [None, (2, -1)])
def test_rows_without_padding(mask_type, window):
    arrays = rows(6, 9)
    out = call(arrays, None, mask_type, window_size=window)
    seen = seen_by_loops([[(0, 6, 0, 9)]] * BATCH, mask_type, 6, 9, window or (-1, -1))
    np.testing.assert_allclose(out, reference(*arrays, seen), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layout", ["BS3HD", "BSHD_BS2HD", "T3HD", "THD_T2HD"])
def test_packed_layouts(layout):
    q, k, v = rows(kv_heads=HEADS)
    qkv = (np.stack((q, k, v), 2),) if "3HD" in layout else (q, np.stack((k, v), 2))
    segments = [[(0, LENGTH, 0, LENGTH)]] * BATCH
    described = packed_as("ids", segments, (LENGTH, LENGTH))
    seen = seen_by_loops(segments, "PADDING_CAUSAL_MASK", LENGTH, LENGTH)
    out = call(qkv, described, "PADDING_CAUSAL_MASK", layout)
    np.testing.assert_allclose(out, reference(q, k, v, seen), rtol=1e-4, atol=1e-5)


def test_biases_and_softmaxes():
    arrays, seen = rows(), np.ones((BATCH, LENGTH, LENGTH), bool)
    bias = np.random.default_rng(1).normal(size=(1, HEADS, LENGTH, LENGTH)).astype(np.float32)
    sinks = np.array([0.5, -1, 2, 0], np.float32)
    for options, expected in (
        ({"bias": bias, "bias_type": "POST_SCALE_BIAS"}, {"bias": bias}),
        ({"bias": bias, "bias_type": "PRE_SCALE_BIAS"}, {"bias": bias * 0.3}),
        ({"softmax": "OFF_BY_ONE_SOFTMAX"}, {"sinks": np.zeros(HEADS)}),
        ({"softmax": "LEARNABLE_SOFTMAX", "softmax_offset": sinks.reshape(1, HEADS, 1, 1)}, {"sinks": sinks}),
    ):
        np.testing.assert_allclose(call(arrays, **options), reference(*arrays, seen, **expected), rtol=1e-4, atol=1e-5)


def test_dropout_in_training_only():
    arrays, seed = rows(), jnp.array([[1, 2], [3, 4]], jnp.uint32)
    plain = call(arrays)
    np.testing.assert_array_equal(call(arrays, dropout=0.5, seed=seed, training=False), plain)
    dropped = call(arrays, dropout=0.5, seed=seed)
    assert not np.allclose(dropped, plain)
    np.testing.assert_array_equal(call(arrays, dropout=0.5, seed=seed[0]), dropped)
    with pytest.raises(SpecError, match="seed=None"):
        call(arrays, dropout=0.5)


REFUSED = {
    "score_mod: expected None": {"score_mod": len},
    "stripe_size: expected None": {"stripe_size": 1},
    "context_parallel_axis='cp'": {"context_parallel_axis": "cp"},
    "context_parallel_causal_load_balanced=True": {"context_parallel_causal_load_balanced": True},
    "context_parallel_strategy=": {"context_parallel_strategy": "RING"},
    "softmax_offset: expected None": {"softmax_offset": np.zeros((1, HEADS, 1, 1))},
    "softmax_offset: expected [1, heads, 1, 1]": {"softmax": "LEARNABLE_SOFTMAX"},
    "bias: expected None": {"bias": np.zeros((1, 1, 1, 1))},
    "qkv_layout=": {"layout": "SBHD_SBHD_SBHD"},
    "attn_mask_type=CAUSAL_MASK": {"layout": "THD_THD_THD", "mask_type": "CAUSAL_MASK"},
    "sequence_descriptor: expected a SequenceDescriptor": {"mask_type": "PADDING_MASK"},
    "sequence_descriptor.seqlens[0]": {"mask_type": "PADDING_MASK", "described": descriptor()},
    "qkv: expected 1 arrays": {"layout": "BS3HD"},
}


def test_load_balancing_of_one_device_changes_nothing(monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    arrays = rows()
    np.testing.assert_array_equal(call(arrays, context_parallel_causal_load_balanced=True), call(arrays))


@pytest.mark.parametrize("words", REFUSED)
def test_what_is_not_honoured_is_refused_by_name(words, monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 2)
    with pytest.raises((SpecError, ShapeError)) as raised:
        call(rows(), **REFUSED[words])
    assert words in str(raised.value)


def test_signature():
    """The parameters of fused_attn on Transformer Engine's main branch of August 2026."""
    assert list(inspect.signature(fused_attn).parameters) == [
        "qkv", "bias", "sequence_descriptor", "seed", "attn_bias_type", "attn_mask_type", "qkv_layout", "softmax_type",
        "scaling_factor", "dropout_probability", "is_training", "max_segments_per_seq", "window_size",
        "context_parallel_strategy", "context_parallel_causal_load_balanced", "context_parallel_axis",
        "context_checkpoint_name", "softmax_offset", "stripe_size", "score_mod", "score_mod_bprop",
        "score_mod_tensors", "score_mod_bprop_tensors",
    ]  # fmt: skip
