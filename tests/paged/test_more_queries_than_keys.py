"""Sequences with more new tokens than keys: paged calls give what attention on packed documents gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
from frameworks import BOTH, JAX, Framework, as_numpy
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_cases import PagedCall, make_paged

from attn_core import SeqInfo
from attn_core.correctness.reference import gather_pages

pytestmark = pytest.mark.sampled

PAIRS = [(f, backend) for f in BOTH for backend in ("math", "sdpa_flash", *(("jax_xla",) if f is JAX else ()))]
WINDOWS = (None, 3, (2, 1), (None, 0))


def cut(call: PagedCall, lengths: list[int]) -> PagedCall:
    """The same call with shorter sequences; their pages stay in the table."""
    inputs = call.inputs._replace(seq_lens=np.array(lengths, np.int32))
    return PagedCall(**{**vars(call), "inputs": inputs})


def in_pages(f: Framework, call: PagedCall, backend: str) -> tuple[np.ndarray, np.ndarray]:
    q, k, v = (f.array(np.nan_to_num(array, nan=7.0), "float32") for array in call.inputs[:3])
    options = {"causal": call.spec.causal, "window": call.window, "backend": backend, "return_lse": True}
    out, lse = f.frontend.paged_attention(q, k, v, **call.tables, **options)
    return as_numpy(out), as_numpy(lse)


def packed(f: Framework, call: PagedCall, backend: str) -> tuple[np.ndarray, np.ndarray]:
    spec, inputs = gather_pages(call.spec, call.inputs)
    info = SeqInfo(inputs.cu_seqlens_q, inputs.cu_seqlens_k, spec.max_len_q, spec.max_len_k)
    q, k, v = (f.array(array[None], "float32") for array in inputs[:3])
    options = {"causal": spec.causal, "window": call.window, "backend": backend, "return_lse": True}
    out, lse = f.frontend.attention(q, k, v, seq_info=info, **options)
    return as_numpy(out)[0], as_numpy(lse).reshape(spec.num_heads, -1)


def compare(f: Framework, call: PagedCall, backend: str) -> None:
    (out, lse), (dense, dense_lse) = in_pages(f, call, backend), packed(f, call, backend)
    np.testing.assert_allclose(out, dense, atol=2e-6, rtol=2e-6)
    np.testing.assert_allclose(lse, dense_lse, atol=2e-6, rtol=2e-6)
    cu, lengths = call.inputs.cu_seqlens_q, call.inputs.seq_lens
    for first, end, keys in zip(cu, cu[1:], lengths, strict=False):
        if call.spec.causal and end - first > keys:
            blind = slice(first, end - keys)
            assert not out[blind].any() and (lse[:, blind] == -np.inf).all(), "the first rows see nothing"


@pytest.mark.parametrize(("f", "backend"), PAIRS, ids=[f"{f}-{backend}" for f, backend in PAIRS])
def test_any_call_is_the_packed_call(f: Framework, backend: str) -> None:
    @settings(max_examples=6 if f is JAX else 40, deadline=None)
    @given(st.data())
    def every(data: Any) -> None:
        sequences = data.draw(st.integers(1, 3))
        new = [data.draw(st.integers(0, 6)) for _ in range(sequences)]
        lengths = [data.draw(st.integers(0, 7)) for _ in range(sequences)]
        if not sum(new) or not sum(lengths):
            new[0], lengths[0] = 5, 2
        window, causal = data.draw(st.sampled_from(WINDOWS)), data.draw(st.booleans())
        longest = [max(length, count) for length, count in zip(lengths, new, strict=True)]
        call = make_paged(
            longest, new, window=window if causal else None, causal=causal, seed=data.draw(st.integers(0, 9))
        )
        compare(f, cut(call, lengths), backend)

    every()


@pytest.mark.parametrize(("f", "backend"), PAIRS, ids=[f"{f}-{backend}" for f, backend in PAIRS])
def test_more_new_tokens_than_keys(f: Framework, backend: str) -> None:
    """Sequences with 2, 0, 1 and 9 keys for 5, 3, 1 and 2 new tokens."""
    compare(f, cut(make_paged((5, 3, 1, 9), (5, 3, 1, 2)), [2, 0, 1, 9]), backend)


def test_a_diagonal_at_the_other_end_is_found() -> None:
    """The planted fault: the first rows see keys, and the last ones no more than they."""
    call = cut(make_paged((5, 9), (5, 2)), [2, 9])
    f = BOTH[0]
    spec, inputs = gather_pages(call.spec, call.inputs)
    info = SeqInfo(inputs.cu_seqlens_q, inputs.cu_seqlens_k, spec.max_len_q, spec.max_len_k)
    q, k, v = (f.array(array[None], "float32") for array in inputs[:3])
    wrong = f.frontend.attention(q, k, v, seq_info=info, causal=True, alignment="top_left")
    assert not np.allclose(as_numpy(wrong)[0], in_pages(f, call, "math")[0], atol=1e-3)
