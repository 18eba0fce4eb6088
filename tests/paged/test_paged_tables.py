"""Tests page tables: their checks by name, their concatenated form, and the specs of calls with tables."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from paged_inputs import inputs_of

from attn_core import AttentionSpec, ShapeError, SpecError
from attn_core.call.arguments import ArrayFacts
from attn_core.call.options import Options
from attn_core.call.spec import PagedKV
from attn_core.call.tensors import PagedInputs
from attn_core.correctness import reference
from attn_core.correctness.reference import append
from attn_core.paged import arguments
from attn_core.paged.allocator import UNUSED, PageAllocator
from attn_core.paged.tables import check_slots, check_values, slots_of

POOL = PagedKV(num_pages=7, page_size=4, width=3)


def int32(*values: Any) -> np.ndarray:
    return np.array(values, np.int32)


@st.composite
def sequences(draw: Any) -> tuple[PagedKV, np.ndarray, np.ndarray, np.ndarray]:
    """(pool, block_table, seq_lens, cu_seqlens_q) that fit together, with pages in any order."""
    page_size, lengths = draw(st.integers(1, 5)), draw(st.lists(st.integers(0, 12), max_size=5))
    new = [draw(st.integers(0, length)) for length in lengths]
    counts = [-(-length // page_size) for length in lengths]
    paged = PagedKV(
        num_pages=sum(counts) + draw(st.integers(0, 3)),
        page_size=page_size,
        width=max(counts, default=0) + draw(st.integers(0, 2)),
    )
    free = draw(st.permutations(range(paged.num_pages)))
    table = np.full((len(lengths), paged.width), UNUSED, np.int32)
    for row, count in zip(table, counts):
        row[:count], free = free[:count], free[count:]
    return paged, table, int32(*lengths), np.cumsum([0, *new]).astype(np.int32)


# PagedKV


def test_properties_of_a_pool() -> None:
    assert POOL.capacity == 12
    assert PagedKV(num_pages=0, page_size=1, width=0).capacity == 0
    assert replace(POOL, num_pages=0).capacity == 0  # a table of an empty pool names no page
    assert hash(POOL) == hash(PagedKV(num_pages=7, page_size=4, width=3))
    assert pickle.loads(pickle.dumps(POOL)) == POOL


@pytest.mark.parametrize(("name", "least"), [("num_pages", 0), ("page_size", 1), ("width", 0)])
def test_sizes_of_a_pool_below_the_least_are_refused(name: str, least: int) -> None:
    with pytest.raises(ShapeError, match=f"^{name}={least - 1}: expected {least} or more$"):
        replace(POOL, **{name: least - 1})


# Slots


@given(sequences())
def test_slots_of_the_last_tokens(drawn: Any) -> None:
    paged, table, lengths, cu = drawn
    expected = [
        int(row[position // paged.page_size]) * paged.page_size + position % paged.page_size
        for row, length, new in zip(table, lengths.tolist(), np.diff(cu).tolist())
        for position in range(length - new, length)
    ]
    slots = slots_of(table, lengths, cu, paged.page_size)
    assert slots.tolist() == expected and slots.dtype == np.int64
    check_slots(slots)


@given(sequences(), st.integers(0, 2**16))
def test_an_append_writes_only_its_slots(drawn: Any, seed: int) -> None:
    paged, table, lengths, cu = drawn
    pages = np.random.default_rng(seed).normal(size=(paged.num_pages, paged.page_size, 2, 3))
    new = np.random.default_rng(seed + 1).normal(size=(cu[-1], 2, 3))
    made = append(pages, new, table, lengths, cu)
    slots = slots_of(table, lengths, cu, paged.page_size)
    assert (made.reshape(-1, 2, 3)[slots] == new).all()
    rest = np.setdiff1d(np.arange(paged.num_pages * paged.page_size), slots)
    assert (made.reshape(-1, 2, 3)[rest] == pages.reshape(-1, 2, 3)[rest]).all()


# Tables on the host


def check_tables(paged: PagedKV, table: Any, lengths: Any, cu: Any) -> None:
    cu = cu if len(lengths) else None  # offsets have at least one document
    check_values(paged, 0 if cu is None else int(cu[-1]), None, table, lengths, cu)


@given(sequences())
def test_valid_tables_are_accepted(drawn: Any) -> None:
    paged, table, lengths, cu = drawn
    check_tables(paged, table, lengths, cu)
    if (lengths > 0).all():
        check_tables(paged, table, lengths, None)


@given(sequences(), st.data())
def test_a_page_outside_the_pool_is_refused_if_it_has_tokens(drawn: Any, data: Any) -> None:
    paged, table, lengths, cu = drawn
    if table.size == 0:
        return
    row, column = data.draw(st.integers(0, len(table) - 1)), data.draw(st.integers(0, paged.width - 1))
    wrong = data.draw(st.sampled_from([-1, -(2**31), paged.num_pages, 2**31 - 1]))
    table[row, column] = wrong
    if column * paged.page_size >= lengths[row]:
        check_tables(paged, table, lengths, cu)
        return
    says = rf"^block_table\[{row}, {column}\]={wrong}: expected a page of the pool's {paged.num_pages} for token "
    with pytest.raises(SpecError, match=says + f"{column * paged.page_size} of {lengths[row]}$"):
        check_tables(paged, table, lengths, cu)


@pytest.mark.parametrize("wrong", [-1, 13, -(2**31), 2**31 - 1])
def test_lengths_beyond_the_table_are_refused(wrong: int) -> None:
    says = rf"^seq_lens\[1\]={wrong}: expected 0 to 12 tokens, because the block table has 3 pages of 4 for each"
    with pytest.raises(SpecError, match=says):
        check_tables(POOL, int32([0, 1, 2], [3, 4, 5]), int32(2, wrong), None)


# Specs

SPEC = AttentionSpec(
    **{"batch": 1, "q_len": 5, "kv_len": 12, "num_heads": 6, "num_kv_heads": 3, "head_dim": 11, "value_dim": 7},
    **{"dtype": "float32", "documents": 2, "max_len_q": 5, "max_len_k": 12, "paged": POOL},
)
REFUSED = {
    "mask": ({"mask_shape": (1, 1, 5, 12)}, r"^paged: expected no mask, got shape \(1, 1, 5, 12\)$"),
    "bias": ({"bias_shape": (1, 6, 5, 12)}, "^paged: expected no bias, got shape"),
    "slopes": ({"alibi_shape": (7,)}, r"^alibi_slopes: expected shape \[heads\] = \[6\] or \[sequences, heads\]"),
    "dropout": ({"dropout": 0.1}, "^dropout=0.1: expected 0, because keys and values in pages"),
    "gradients": ({"needs_backward": True}, "^paged: expected no backward, .*use no_grad$"),
    "no documents": ({"documents": None}, "^paged: expected documents, .*got documents=None"),
    "top_left": ({"alignment": "top_left"}, "^paged: expected .* bottom-right alignment .*, got .*top_left"),
    "kv_len": ({"kv_len": 11}, r"^paged: expected .* kv_len = width \* page_size \(12\), got .*kv_len=11$"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_invalid_specs_of_paged_calls_are_refused(name: str) -> None:
    changes, says = REFUSED[name]
    with pytest.raises(SpecError, match=says):
        replace(SPEC, **changes)


def test_the_spec_of_a_paged_call() -> None:
    assert SPEC.packed and SPEC.out_shape == (5, 6, 7) and SPEC.lse_shape == (6, 5)
    assert SPEC.key != replace(SPEC, paged=replace(POOL, num_pages=8)).key
    assert pickle.loads(pickle.dumps(SPEC)) == SPEC
    assert "paged=PagedKV(num_pages=7, page_size=4, width=3)" in str(SPEC)


def test_inputs_of_the_reference_are_nan_outside_the_sequences() -> None:
    inputs = inputs_of(SPEC, np.random.default_rng(0), (9, 4), (4, 1))
    held = slots_of(inputs.block_table, inputs.seq_lens, int32(0, 9, 13), 4)
    for pool in (inputs.k, inputs.v):
        flat = np.isfinite(pool).all((2, 3)).ravel()
        assert flat.sum() == 13 and flat[held].all() and np.isnan(pool.reshape(28, -1)[~flat]).all()
    out, lse = reference.forward(SPEC, inputs)
    assert np.isfinite(out).all() and np.isfinite(lse).all()


# Arguments of the frontends

FACTS = PagedInputs(
    q=ArrayFacts((5, 6, 11), "float32", "cpu"),
    k=ArrayFacts((7, 4, 3, 11), "float32", "cpu"),
    v=ArrayFacts((7, 4, 3, 7), "float32", "cpu"),
    block_table=ArrayFacts((2, 3), "int32", "cpu"),
    seq_lens=ArrayFacts((2,), "int32", "cpu"),
    cu_seqlens_q=ArrayFacts((3,), "int32", "cpu"),
)
OPTIONS = Options(window=(None, None))


def test_the_spec_built_from_arguments() -> None:
    assert arguments.build_spec(FACTS, OPTIONS) == SPEC
    assert arguments.build_spec(FACTS, OPTIONS._replace(max_len_q=3)).max_len_q == 3
    assert arguments.build_spec(FACTS, OPTIONS._replace(max_len_q=99)).max_len_q == 5
    # the fifth query may belong to no sequence
    assert arguments.build_spec(FACTS, OPTIONS._replace(max_len_q=2)).max_len_q == 2
    assert not arguments.one_query_each(SPEC)
    decoding = FACTS._replace(q=FACTS.q._replace(shape=(2, 6, 11)), cu_seqlens_q=None)
    spec = arguments.build_spec(decoding, OPTIONS)
    assert spec.max_len_q == 1 and arguments.one_query_each(spec)
    for longest in (None, 1, 2):  # offsets may leave a sequence without queries, and q may go on behind the last offset
        described = decoding._replace(cu_seqlens_q=ArrayFacts((3,), "int32", "cpu"))
        assert not arguments.one_query_each(arguments.build_spec(described, OPTIONS._replace(max_len_q=longest)))
    sinks = FACTS._replace(sinks=ArrayFacts((6,), "bfloat16", "cpu"))
    assert arguments.build_spec(sinks, OPTIONS).sinks


def test_tables_of_an_allocator_are_valid() -> None:
    allocator = PageAllocator(7, 4)
    for name, length in (("a", 9), ("b", 0), ("c", 4)):
        allocator.allocate(name, length)
    table, lengths = allocator.block_table(["a", "b", "c"], 3), allocator.seq_lens(["a", "b", "c"])
    check_tables(POOL, table, lengths, int32(0, 9, 9, 13))
    check_slots(slots_of(table, lengths, int32(0, 9, 9, 13), 4))
