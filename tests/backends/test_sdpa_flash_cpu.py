"""Tests torch's CPU flash kernel in blocks of queries: correct across blocks, bands and masks, and small in memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("torch")
pytest.importorskip("jax")
import torch
from both_frontends import judge, run
from direct_calls import LargestOutput
from hypothesis import given
from hypothesis import strategies as st
from spec_strategies import Call, make_call

from attn_core import AttentionSpec, Target, explain
from attn_core.backends import math
from attn_core.backends.sdpa_flash import cpu as sdpa_flash
from attn_core.backends.sdpa_flash import cpu_kernel
from attn_core.call.spec import PagedKV
from attn_core.call.tensors import Inputs, PagedInputs

SIZES = {"batch": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "value_dim": 8, "dtype": "float32"}
WINDOWS = (None, (0, 0), (3, 0), (2, 1), (None, 2), (7, None), (40, 40))


def skip_without_bfloat16(dtype: str) -> None:
    """Skips a call that torch's own attention fails on: AMX, with AVX-512 hidden by ATEN_CPU_CAPABILITY=avx2."""
    if dtype != "bfloat16":
        return
    q = torch.zeros(1, 1, 512, 8, dtype=torch.bfloat16)
    try:
        torch.nn.functional.scaled_dot_product_attention(q, q, q)
    except RuntimeError as error:
        pytest.skip(f"torch's own attention: {error}")


@contextmanager
def blocks_of(rows: int) -> Iterator[None]:
    """Sets blocks of this many queries, whether a window or the size of the mask bounds the block."""
    bounds = {"WINDOW_ROWS": rows, "FEWEST_ROWS": rows, "MASK_ELEMENTS": 1}
    cpu_kernel.blocks.cache_clear()
    with mock.patch.multiple(cpu_kernel, **bounds):
        yield
    cpu_kernel.blocks.cache_clear()


@st.composite
def banded(draw: Any) -> Call:
    """Calls with gradients and different numbers of queries and keys, with any band, mask and bias."""
    q_len, kv_len = draw(st.integers(1, 23)), draw(st.integers(1, 23))
    full = (SIZES["batch"], SIZES["num_heads"], q_len, kv_len)
    table = st.none() | st.tuples(*(st.sampled_from((1, size)) for size in full))
    fields = SIZES | {"q_len": q_len, "kv_len": kv_len, "dtype": draw(st.sampled_from(("float32", "bfloat16")))}
    fields |= {"mask_shape": draw(table), "bias_shape": draw(table), "causal": draw(st.booleans())}
    fields |= {"window": draw(st.sampled_from(WINDOWS)), "needs_backward": True}
    fields["alignment"] = draw(st.sampled_from(("bottom_right", "top_left")))
    return make_call(draw(st.integers(0, 2**16)), hiding=draw(st.booleans()), **fields)


@given(call=banded(), rows=st.integers(1, 9))
def test_blocks_of_any_height_match_the_reference(call: Call, rows: int) -> None:
    with blocks_of(rows):
        verdict = judge("torch", call, run("torch", call, "sdpa_flash"))
    assert verdict.ok, f"blocks of {rows}: {call}\n{verdict}"


CORNERS: dict[str, dict[str, Any]] = {
    "a window across blocks": {"q_len": 300, "kv_len": 300, "causal": True, "window": 70},
    "a window wider than a block": {"q_len": 300, "kv_len": 300, "causal": True, "window": 200},
    "one key each": {"q_len": 257, "kv_len": 257, "window": (0, 0)},
    "blocks that see no key": {"q_len": 400, "kv_len": 40, "causal": True, "window": 9},
    "no query sees a key": {"q_len": 3, "kv_len": 200, "window": (0, 0), "alignment": "top_left", "causal": True},
    "more keys than queries": {"q_len": 140, "kv_len": 400, "causal": True, "window": 150},
    "keys behind every query": {"q_len": 140, "kv_len": 400, "window": (5, 3), "alignment": "top_left"},
    "a window to the right": {"q_len": 270, "kv_len": 290, "window": (4, 100)},
    "a mask beside a window": {"q_len": 260, "kv_len": 260, "window": (60, 0), "mask_shape": (2, 1, 260, 260)},
    "keys alone in a mask": {"q_len": 260, "kv_len": 270, "causal": True, "mask_shape": (2, 1, 1, 270)},
    "a bias beside a window": {"q_len": 260, "kv_len": 260, "window": (60, 9), "bias_shape": (1, 4, 260, 1)},
    "half precision": {"q_len": 300, "kv_len": 300, "causal": True, "window": 200, "dtype": "bfloat16"},
    "double precision": {"q_len": 300, "kv_len": 310, "causal": True, "window": 200, "dtype": "float64"},
}


@pytest.mark.parametrize("framework", ["torch", "jax"])
@pytest.mark.parametrize("case", CORNERS)
def test_edge_cases_match_the_reference(case: str, framework: str) -> None:
    call = make_call(3, **{**SIZES, **CORNERS[case]}, needs_backward=True)
    skip_without_bfloat16(call.spec.dtype)
    verdict = judge(framework, call, run(framework, call, "sdpa_flash"))
    assert verdict.ok, f"{case}: {verdict}"


def test_packed_documents_with_windows() -> None:
    lengths = ((150, 0, 3, 200), (150, 4, 3, 260))
    call = make_call(4, lengths, **{**SIZES, "batch": 1}, causal=True, window=70, needs_backward=True)
    verdict = judge("torch", call, run("torch", call, "sdpa_flash"))
    assert verdict.ok, str(verdict)


@pytest.mark.parametrize(
    "band",
    [
        {"window": (255, 0)},
        {"window": (100, 155)},
        {"causal": True, "kv_len": 4096 + 512},
        {"causal": True, "window": (255, None), "alignment": "top_left"},
    ],
    ids=str,
)
def test_no_full_mask_is_built(band: dict[str, Any]) -> None:
    """Memory grows with the inputs plus one block. Under a window the visited pairs grow linearly as well."""
    sizes = {"batch": 1, "q_len": 4096, "kv_len": 4096, "num_heads": 1, "num_kv_heads": 1, "head_dim": 8}
    spec = AttentionSpec(**{**sizes, "value_dim": 8, "dtype": "float32", "needs_backward": True, **band})
    q, k, v = (torch.randn(1, length, 1, 8) for length in (spec.q_len, spec.kv_len, spec.kv_len))
    with LargestOutput() as largest:
        out, lse = sdpa_flash.forward(spec, Inputs(q, k, v))
        sdpa_flash.backward(spec, Inputs(q, k, v), out, lse, torch.ones_like(out), None)
    assert 0 < largest.elements <= cpu_kernel.MASK_ELEMENTS + cpu_kernel.FEWEST_ROWS * spec.kv_len
    if "window" in band:
        assert largest.pairs <= spec.q_len * (256 + cpu_kernel.WINDOW_ROWS)


STACKED: dict[str, dict[str, Any]] = {
    "causal window": {"causal": True, "window": (20, 0)},
    "two rows, both sides": {"batch": 2, "kv_len": 900, "window": (30, 9)},
    "top left, fewer keys": {"kv_len": 500, "window": (30, 9), "alignment": "top_left"},
    "ALiBi": {"causal": True, "window": (20, 0), "alibi_shape": (4,)},
    "half precision": {"causal": True, "window": (20, 0), "dtype": "bfloat16"},
}


@pytest.mark.parametrize("case", STACKED)
def test_stacked_blocks_have_the_bits_of_single_ones_in_few_kernel_calls(case: str) -> None:
    fields = {**SIZES, "batch": 1, "q_len": 700, "kv_len": 700, **STACKED[case], "needs_backward": True}
    spec = AttentionSpec(**fields)
    skip_without_bfloat16(spec.dtype)
    dtype = getattr(torch, spec.dtype)
    q, k, v = (
        torch.randn(spec.batch, length, heads, 8, dtype=dtype)
        for length, heads in ((spec.q_len, 4), (spec.kv_len, 2), (spec.kv_len, 2))
    )
    inputs = Inputs(q, k, v, alibi_slopes=torch.rand(4) if spec.alibi_shape else None)
    dout = torch.randn_like(q)

    def results() -> list[torch.Tensor]:
        out, lse = sdpa_flash.forward(spec, inputs)
        return [out, lse, *sdpa_flash.backward(spec, inputs, out, lse, dout, None)[:3]]

    def single(spec: AttentionSpec) -> list[cpu_kernel.Stack]:
        return [cpu_kernel.Stack(block, 1) for block in cpu_kernel.blocks(spec)]

    stacks = cpu_kernel._stacks(spec)
    assert spec.batch * len(stacks) <= len(cpu_kernel.blocks(spec)) + 1
    assert max(stack.number for stack in stacks) > 1
    stacked = results()
    with mock.patch.object(cpu_kernel, "_stacks", single):
        for actual, expected in zip(stacked, results(), strict=True):
            assert torch.equal(actual, expected)


def test_long_rows_with_windows_and_masks_are_accepted() -> None:
    sizes = {"batch": 1, "q_len": 2**20, "kv_len": 2**20, "num_heads": 2, "num_kv_heads": 2, "head_dim": 8}
    for requested in ({"window": (255, 0)}, {"mask_shape": (1, 1, 1, 2**20)}):
        spec = AttentionSpec(**{**sizes, "value_dim": 8, "dtype": "float32", "causal": True, **requested})
        assert explain(spec, Target("torch", "cpu")).backend == "sdpa_flash"


DECODING: dict[str, tuple[list[int], dict[str, Any]]] = {
    "equal lengths": ([24, 24, 24], {}),
    "equal lengths within a page": ([21, 21, 21], {}),
    "unequal lengths": ([24, 1, 16], {}),
    "a sequence without keys": ([5, 0, 9], {}),
    "a window": ([24, 3, 17], {"window": (4, 0)}),
    "sinks": ([24, 0, 16], {"sinks": True}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", DECODING)
def test_decoding_with_pages_is_one_kernel_call_that_reads_only_visible_keys(case: str, dtype: torch.dtype) -> None:
    lengths, fields = DECODING[case]
    torch.manual_seed(0)
    paged = PagedKV(num_pages=11, page_size=8, width=3)
    sizes = {"batch": 1, "q_len": 3, "kv_len": 24, "num_heads": 6, "num_kv_heads": 2, "head_dim": 8, "value_dim": 8}
    of_rows = {"documents": 3, "max_len_q": 1, "max_len_k": 24, "causal": True, "return_lse": True, "paged": paged}
    spec = AttentionSpec(**sizes, **of_rows, dtype=str(dtype).removeprefix("torch."), **fields)
    q, sinks = torch.randn(3, 6, 8, dtype=dtype), torch.randn(6) if spec.sinks else None
    pools = [torch.randn(11, 8, 2, 8, dtype=dtype) for _ in range(2)]
    table = torch.randperm(11)[:9].view(3, 3).int()
    unread = torch.ones(11, 8, dtype=torch.bool)
    for row, length in zip(table, lengths, strict=True):
        row[-(-length // 8) :] = -1 if length % 16 else 99
        for at in range(max(0, length - 5) if spec.window[0] else 0, length):
            unread[row[at // 8], at % 8] = False
    inputs = PagedInputs(q, *pools, table, torch.tensor(lengths, dtype=torch.int32), sinks=sinks)
    with LargestOutput() as seen:
        out, lse = sdpa_flash.forward(spec, inputs)
    assert 0 < seen.pairs <= 3 * 24  # the heads of a group are the queries of one call
    expected = math.forward(spec, inputs)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close((out, lse), expected, atol=tolerance, rtol=tolerance)
    for pool in pools:
        pool[unread] = torch.nan
    again = sdpa_flash.forward(spec, inputs)
    assert torch.equal(again[0], out) and torch.equal(again[1], lse)
