"""Tests the visible set against loops over every pair."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attn_core import AttentionSpec, SeqInfo
from attn_core.call.grouped_rows import by_chunks
from attn_core.call.masks import Band, band, document_of, positions, visible
from attn_core.expressions.tracing import Aux, trace_mask
from benchmarks.fit.calls import as_called


def spec_of(q_len: int, kv_len: int, **fields) -> AttentionSpec:
    sizes = {"batch": 1, "num_heads": 1, "num_kv_heads": 1, "head_dim": 2, "value_dim": 2, "dtype": "float32"}
    return AttentionSpec(q_len=q_len, kv_len=kv_len, **(sizes | fields))


def sees(i: int, j: int, q_len: int, kv_len: int, causal: bool, alignment: str, window) -> bool:
    """The rule for one pair of one document, written out."""
    diagonal = i + (kv_len - q_len if alignment == "bottom_right" else 0)
    left, right = window
    if causal and j > diagonal:
        return False
    if left is not None and j < diagonal - left:
        return False
    return right is None or j <= diagonal + right


DISTANCES = (None, 0, 1, 3)
CHOICES = list(product((False, True), ("bottom_right", "top_left"), DISTANCES, DISTANCES))


@pytest.mark.parametrize(("causal", "alignment", "left", "right"), CHOICES)
def test_visible_and_band_match_loops_over_all_small_sizes(causal, alignment, left, right):
    for q_len, kv_len in product(range(6), range(6)):
        spec = spec_of(q_len, kv_len, causal=causal, alignment=alignment, window=(left, right))
        expected = np.zeros((q_len, kv_len), bool)
        for i, j in product(range(q_len), range(kv_len)):
            expected[i, j] = sees(i, j, q_len, kv_len, causal, alignment, (left, right))
        assert np.array_equal(visible(spec)[0, 0], expected)
        assert_band_describes(band(spec), expected)


@pytest.mark.parametrize(("causal", "alignment", "left", "right"), CHOICES)
def test_a_window_that_hides_nothing_is_left_out(causal, alignment, left, right):
    """The visible pairs stay the same, and no side remains that alone would hide nothing."""
    for q_len, kv_len in product(range(6), range(6)):
        spec = spec_of(q_len, kv_len, causal=causal, alignment=alignment, window=(left, right))
        called = as_called(spec)
        assert np.array_equal(visible(called), visible(spec))
        for side, alone in enumerate(((called.window[0], None), (None, called.window[1]))):
            if q_len and kv_len and visible(replace(spec, causal=False, window=alone)).all():
                assert called.window[side] is None


def test_what_a_window_becomes():
    def called(q_len: int, kv_len: int, **fields) -> tuple[bool, tuple[int | None, int | None]]:
        spec = as_called(spec_of(q_len, kv_len, **fields))
        return spec.causal, spec.window

    assert called(8, 8, causal=True, window=(7, 0)) == (True, (None, None))
    assert called(8, 8, causal=True, window=(6, 0)) == (True, (6, 0))
    assert called(8, 8, window=(7, 0)) == (True, (None, None)), "(None, 0) is causal"
    assert called(8, 8, window=(7, 7)) == (False, (None, None))
    assert called(8, 8, window=(3, 7)) == (False, (3, None))
    assert called(1, 9, causal=True, window=(8, 0)) == (True, (None, None))
    assert called(1, 9, causal=True, window=(7, 0)) == (True, (7, None)), "the last query has no key to its right"
    assert called(9, 9, documents=2, max_len_q=5, max_len_k=5, window=(8, 8))[1] == (8, 8), "packed: lengths are data"


def assert_band_describes(edge: Band, expected: np.ndarray) -> None:
    q_len, kv_len = expected.shape
    assert edge.hides_nothing(q_len, kv_len) == expected.all()
    assert edge.empties_a_row(q_len, kv_len) == (not expected.any(1).all())
    for first, last in product(range(q_len), range(q_len)):
        if first <= last:
            keys = np.flatnonzero(expected[first : last + 1].any(0))
            assert edge.keys_of(first, last, kv_len) == ((keys[0], keys[-1] + 1) if len(keys) else (0, 0))


def test_the_visible_sets_of_both_alignments():
    triangle = np.tril(np.ones((3, 5), bool))
    assert np.array_equal(visible(spec_of(3, 5, causal=True, alignment="top_left"))[0, 0], triangle)
    assert np.array_equal(visible(spec_of(3, 5, causal=True))[0, 0], np.tril(np.ones((3, 5), bool), 2))
    assert visible(spec_of(5, 3, causal=True)).any(-1).tolist() == [[[False, False, True, True, True]]]


def test_an_int_window_of_w_shows_w_keys_including_itself():
    counts = visible(spec_of(11, 11, causal=True, window=(2, 0)))[0, 0].sum(1)
    assert counts.tolist() == [1, 2] + [3] * 9


def test_causal_and_a_right_window_hide_what_either_hides():
    assert band(spec_of(3, 3, causal=True, window=(None, 5))).right == 0
    assert band(spec_of(3, 3, window=(None, 5))).right == 5


@pytest.mark.parametrize("shape", list(product((1, 2), (1, 3), (1, 5), (1, 7))))
def test_a_mask_of_any_broadcast_shape_only_hides_pairs(shape):
    spec = spec_of(5, 7, batch=2, num_heads=3, causal=True, mask_shape=shape)
    mask = np.random.default_rng(1).random(shape) < 0.5
    seen = np.broadcast_to(visible(spec, mask), (2, 3, 5, 7))
    for b, h, i, j in product(range(2), range(3), range(5), range(7)):
        index = tuple(at if size > 1 else 0 for at, size in zip((b, h, i, j), shape))
        assert seen[b, h, i, j] == (mask[index] and j <= i + 2)


LENGTHS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=5)


@settings(max_examples=200, deadline=None)
@given(LENGTHS, st.sampled_from(CHOICES))
def test_packed_documents_see_only_themselves(lengths, choice):
    causal, alignment, left, right = choice
    info = SeqInfo.from_lengths([q for q, _ in lengths], [k for _, k in lengths])
    spec = spec_of(
        *(int(info.cu_seqlens_q[-1]), int(info.cu_seqlens_k[-1])),
        **{"causal": causal, "alignment": alignment, "window": (left, right), "documents": len(lengths)},
    )
    expected = np.zeros((spec.q_len, spec.kv_len), bool)
    first_q = first_k = 0
    for q_len, kv_len in lengths:
        for i, j in product(range(q_len), range(kv_len)):
            expected[first_q + i, first_k + j] = sees(i, j, q_len, kv_len, causal, alignment, (left, right))
        first_q, first_k = first_q + q_len, first_k + kv_len
    assert np.array_equal(visible(spec, None, info.cu_seqlens_q, info.cu_seqlens_k)[0, 0], expected)


def test_positions_start_at_0_in_each_document():
    info = SeqInfo.from_lengths([2, 0, 3], [3, 2, 1])
    spec = spec_of(5, 6, documents=3)
    rows, columns = positions(spec, info.cu_seqlens_q, info.cu_seqlens_k)
    assert rows.tolist() == [1, 2, -2, -1, 0]
    assert columns.tolist() == [0, 1, 2, 0, 1, 0]
    rows, _ = positions(spec_of(5, 6, documents=3, alignment="top_left"), info.cu_seqlens_q, info.cu_seqlens_k)
    assert rows.tolist() == [0, 1, 0, 1, 2]


def test_document_of_skips_empty_documents():
    assert document_of(np.array([0, 0, 2, 2, 2, 5, 5], np.int32), 5).tolist() == [1, 1, 4, 4, 4]
    assert document_of(np.array([0, 0], np.int32), 0).tolist() == []


def test_only_calls_of_whole_rows_have_chunks_as_documents():
    chunks = trace_mask(lambda b, h, q, k: q // 4 == k // 4).tree
    spec = spec_of(9, 9, mask_mod=chunks)
    rows = by_chunks(spec)
    assert rows is not None and rows.offsets.tolist() == [0, 4, 8, 9] and rows.spec.max_len_q == 4
    others = ({"q_len": 5}, {"kv_len": 12}, {"aux": (Aux((3,), "int32"),)}, {"q_len": 0, "kv_len": 0})
    for fields in (*others, {"dropout": 0.5}, {"partial": True}, {"mask_mod": None}):
        assert by_chunks(replace(spec, **fields)) is None
