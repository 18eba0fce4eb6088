"""The Triton kernels of paged attention in Triton's interpreter, on the CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton.runtime.interpreter")
from both_frontends import _numpy
from callers_view import callers_results
from direct_launches import launch_by_address
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreted_calls import amid_nan
from paged_cases import LIES, PagedCall, judge, laid_out, lying, make_paged, most_shared, without_answers
from quantised_cases import KINDS, quantised_call, torch_arguments

from attn_core.backends import triton_splitkv
from attn_core.backends.shared import pages
from attn_core.call.seq_info import tail_of
from attn_core.call.tensors import PagedInputs
from attn_core.context_parallel.on_torch import merge_triton, tiles
from attn_core.correctness.reference import append
from attn_core.paged import kernels
from torch_frontend.dispatch import offsets, triton_offsets
from torch_frontend.paged.append import Places, _append_on_cpu, append_on_gpu, repeated_on_gpu
from torch_frontend.paged.merge_states import _plain

pytestmark = [pytest.mark.sampled, pytest.mark.usefixtures("interpreter")]


def splits_of(patch: pytest.MonkeyPatch, count: int) -> None:
    """So many splits, however few keys there are."""
    patch.setattr(triton_splitkv, "splits", lambda spec, multiprocessors: count)
    triton_splitkv._settings.cache_clear()


def tensors(call: PagedCall) -> PagedInputs:
    kind = getattr(torch, call.spec.dtype)
    q, k, v = (torch.tensor(array, dtype=kind) for array in call.inputs[:3])
    k, v = laid_out(k, v, call.layout)
    tables = {n: None if table is None else torch.tensor(table) for n, table in call.int_arrays.items()}
    sinks = None if call.inputs.sinks is None else torch.tensor(call.inputs.sinks, dtype=kind)
    slopes = call.inputs.alibi_slopes
    slopes = None if slopes is None else torch.tensor(slopes, dtype=torch.float32)
    return PagedInputs(q, k, v, **tables, sinks=sinks, alibi_slopes=slopes)


def attended(call: PagedCall, inputs: PagedInputs | None = None) -> dict[str, np.ndarray]:
    """The kernels' results, written into memory that was NaN."""
    spec, inputs = call.spec, inputs or tensors(call)
    assert triton_splitkv.refuses(spec, "sm90", None) == ()
    into = (
        torch.full(spec.out_shape, torch.nan, dtype=inputs.q.dtype),
        torch.full(spec.lse_shape, torch.nan, dtype=torch.float32),
    )
    out, lse = triton_splitkv.forward(spec, inputs, into)
    assert out is into[0] and lse is into[1]
    return {"out": _numpy(out), "lse": callers_results(spec, call.inputs, _numpy(lse))[0]}


def check(call: PagedCall) -> None:
    verdict = judge(call, attended(call))
    assert verdict.ok, f"{call}\n{verdict}"


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("new", [None, (4, 0, 1)], ids=["decode", "prefill"])
def test_a_buffer_with_strides(new: Any, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The output goes to a part of wider rows, or has its heads outside, and nothing else is written."""
    splits_of(monkeypatch, count)
    call = make_paged((5, 70, 1), new, **HALF)
    tokens, heads, dim = call.spec.out_shape
    expected, lse = triton_splitkv.forward(call.spec, tensors(call))
    wide = torch.full((tokens + 1, 2, heads, dim + 16), torch.nan, dtype=torch.float16)
    outside = torch.full((heads, tokens, dim), torch.nan, dtype=torch.float16)
    for out in (wide[1:, 1, :, :dim], outside.transpose(0, 1)):
        found, found_lse = triton_splitkv.forward(call.spec, tensors(call), (out, None))
        assert found is out and torch.equal(out, expected) and torch.equal(found_lse, lse)
    wide[1:, 1, :, :dim] = torch.nan
    assert wide.isnan().all()


# float16 alone: triton 3.6's interpreter multiplies the bits of bfloat16 as if they were integers
HALF = {"dtype": "float16", "head_dim": 16, "value_dim": 16, "return_lse": True}
CASES: dict[str, dict[str, Any]] = {
    "decode": {"lengths": (5, 70, 1)},
    "decode, page 1": {"lengths": (5, 70), "page_size": 1},
    "decode, page 3": {"lengths": (5, 70), "page_size": 3},
    "decode, page 16": {"lengths": (16, 70), "page_size": 16, "head_dim": 32, "value_dim": 32},
    "prefill": {"lengths": (9, 19), "new": (9, 19)},
    "chunks": {"lengths": (70, 0, 33, 9), "new": (5, 0, 1, 9), "page_size": 3},
    "many rows": {"lengths": (81,), "new": (40,), "num_heads": 6, "num_kv_heads": 2, "page_size": 16},
    "no causal": {"lengths": (70, 8), "new": (5, 3), "causal": False},
    "window": {"lengths": (90, 9), "new": (4, 9), "window": 7},
    "window both sides": {"lengths": (90, 9), "new": (4, 9), "window": (6, 3), "causal": False},
    "right side alone": {"lengths": (70, 9), "new": (4, 9), "window": (None, 2), "causal": False},
    "softcap": {"lengths": (70, 9), "new": (4, 9), "softcap": 0.7, "scale": 1.3},
    "sinks": {"lengths": (70, 9, 0), "new": (4, 9, 0), "sinks": True},
    "sinks, decode": {"lengths": (70, 9), "sinks": True, "softcap": 5.0},
    "one kv head": {"lengths": (70, 9), "num_heads": 5, "num_kv_heads": 1},
    "many kv heads": {"lengths": (70, 9), "num_heads": 3, "num_kv_heads": 3},
    "narrow values": {"lengths": (70, 9), "new": (2, 3), "head_dim": 32},
    "wide values": {"lengths": (70, 9), "new": (2, 3), "value_dim": 32},
    "shared pages": {"lengths": (40, 23), "new": (2, 3), "shared": 5},
    "heads outside": {"lengths": (40, 23), "new": (2, 3), "layout": "heads_outside"},
    "one tensor": {"lengths": (40, 23), "new": (2, 3), "layout": "one_tensor"},
    "interleaved": {"lengths": (40, 23), "new": (2, 3), "layout": "interleaved"},
    "interleaved, decode": {"lengths": (40, 23), "layout": "interleaved", "page_size": 3},
    "key ranges": {"lengths": (40, 23), "new": (9, 7), "ranges": (1, 1)},
    "key ranges by head": {"lengths": (40, 0, 7), "new": (9, 0, 7), "ranges": (2, 2), "causal": False},
    "key ranges, decode": {"lengths": (40, 23, 1), "ranges": (1, 2)},
    "a loose bound": {"lengths": (40, 23), "new": (2, 3), "bound": 9},
    "slopes": {"lengths": (40, 23), "new": (4, 7), "alibi": 1, "softcap": 2.0},
    "slopes by sequence": {"lengths": (40, 23, 5), "alibi": 2, "num_heads": 6, "sinks": True},
    "slopes both sides": {"lengths": (40, 23), "new": (4, 7), "alibi": 2, "causal": False},
    "starts": {"lengths": (70, 33, 9), "new": (4, 7, 9), "starts": True, "seed": 3},
    "starts, decode": {"lengths": (70, 33, 1), "starts": True, "window": 20},
    "starts and ranges": {"lengths": (70, 33), "new": (9, 7), "starts": True, "ranges": (2, 2), "alibi": 1},
}


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("name", CASES)
def test_attention(name: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    splits_of(monkeypatch, count)
    fields = {**HALF, **CASES[name]}
    check(make_paged(fields.pop("lengths"), fields.pop("new", None), **fields))


@settings(max_examples=15)
@given(st.data())
def test_any_call(data: Any) -> None:
    page_size = data.draw(st.sampled_from((1, 3, 16)))
    lengths = data.draw(st.lists(st.integers(0, 80), min_size=1, max_size=3))
    new = [data.draw(st.integers(0, min(n, 6))) for n in lengths]
    heads, kv_heads = data.draw(st.sampled_from(((1, 1), (4, 2), (3, 1))))
    with pytest.MonkeyPatch.context() as patch:
        splits_of(patch, data.draw(st.integers(1, 4)))
        check(
            make_paged(
                lengths,
                new,
                page_size=page_size,
                shared=data.draw(st.integers(0, most_shared(lengths, page_size))),
                num_heads=heads,
                num_kv_heads=kv_heads,
                causal=data.draw(st.booleans()),
                ranges=data.draw(st.sampled_from((None, (1, 1), (kv_heads, 2)))),
                alibi=data.draw(st.integers(0, 2)),
                starts=data.draw(st.booleans()),
                window=data.draw(st.sampled_from((None, (3, 1), (0, 0), (20, None), (None, 5)))),
                softcap=data.draw(st.sampled_from((None, 2.0))),
                sinks=data.draw(st.booleans()),
                seed=data.draw(st.integers(0, 99)),
                **HALF,
            )
        )


@pytest.mark.parametrize("count", [1, 3])
def test_rows_that_see_no_key(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows that lie before the first key or behind the last, and lengths below the queries' number."""
    splits_of(monkeypatch, count)
    call = make_paged((9, 6, 4), (3, 1, 4), causal=False, sinks=True, window=(2, None), **HALF)
    short = call.inputs._replace(seq_lens=np.array([1, 0, 2], np.int32))
    call = replace(call, inputs=short)
    found = attended(call)
    verdict = judge(call, found)
    assert verdict.ok, verdict
    assert not found["out"][3].any() and np.array_equal(found["lse"][:, 3], call.inputs.sinks)


@pytest.mark.parametrize(("count", "invariant"), [(1, None), (3, None), (1, "prefix")])
@pytest.mark.parametrize("new", [(4, 7), (4, 0)])
def test_queries_behind_the_last_offset_get_0(
    new: tuple[int, int], count: int, invariant: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call seen before only launches the kernels, so they write these rows."""
    splits_of(monkeypatch, count)
    call, behind = make_paged((1100, 23), new, **HALF, num_heads=6, sinks=True), 11
    spec, inputs = replace(call.spec, invariant=invariant), tensors(call)
    expected = triton_splitkv.forward(spec, inputs)
    longer = replace(spec, q_len=spec.q_len + behind)
    q = torch.cat([inputs.q, torch.full((behind, *inputs.q.shape[1:]), torch.nan, dtype=inputs.q.dtype)])
    into = torch.full(longer.out_shape, torch.nan, dtype=q.dtype), torch.full(longer.lse_shape, torch.nan)
    out, lse = triton_splitkv.forward(longer, inputs._replace(q=q), into)
    assert torch.equal(out[:-behind], expected[0]) and torch.equal(lse[:, :-behind], expected[1])
    assert (out[-behind:] == 0).all() and (lse[:, -behind:] == -torch.inf).all()


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("name", ["decode", "decode, page 3", "sinks, decode", "one kv head", "wide values"])
def test_a_seen_decoding_call_gives_the_bits_of_a_new_one(
    name: str, return_lse: bool, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    splits_of(monkeypatch, count)
    fields = {**HALF, **CASES[name], "return_lse": return_lse, "new": None}
    lengths = fields.pop("lengths")
    calls = [make_paged(lengths, seed=seed, **fields) for seed in (1, 2)]
    (spec, *_), (one, other) = [call.spec for call in calls], [tensors(call) for call in calls]
    expected = [triton_splitkv.forward(spec, inputs) for inputs in (one, other)]
    direct = launch_by_address(monkeypatch)
    run = triton_splitkv.paged_shortcut(spec)
    moved = torch.empty(other.q.numel() + 1, dtype=other.q.dtype)[1:].view_as(other.q).copy_(other.q)
    shifted = other._replace(q=moved)  # at no multiple of 16 bytes
    strided = other._replace(block_table=other.block_table.repeat_interleave(2, 1)[:, ::2])
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    try:
        for at, inputs in enumerate((one, other, one, shifted, strided, other)):
            before = len(direct)
            out, lse = run(*inputs[:5], inputs.sinks)
            right = expected[inputs is not one]
            assert torch.equal(out, right[0])
            assert torch.equal(lse, right[1]) if return_lse else True
            if at in (0, 1, 2, 5):  # the others are not aligned, or copied
                assert len(direct) - before == (0 if at == 0 else 2 if count > 1 else 1)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("fault", ["window", "scale", "length", "table", "heads"])
def test_faults_are_caught(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    splits_of(monkeypatch, 2)
    call = without_answers(make_paged((40, 37), (4, 3), window=9, scale=1.0, **HALF))
    assert judge(call, attended(call)).ok
    given = tensors(call)
    spec, inputs = {
        "window": (replace(call.spec, window=(9, 0)), given),
        "scale": (replace(call.spec, scale=1.01), given),
        "length": (call.spec, given._replace(seq_lens=given.seq_lens - 1)),
        "table": (call.spec, given._replace(block_table=given.block_table.flip(0))),
        "heads": (call.spec, given._replace(k=given.k.flip(2), v=given.v.flip(2))),
    }[fault]
    assert not judge(call, attended(replace(call, spec=spec), inputs)).ok


def test_a_seen_append_writes_what_a_new_one_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    direct = launch_by_address(monkeypatch)
    write = repeated_on_gpu()
    inputs = tensors(make_paged((5, 70, 1), page_size=3, **HALF))
    heads, dim = inputs.k.shape[2:]
    moved = torch.randn(3 * heads * dim + 1, dtype=torch.float16)[1:].view(3, heads, dim)  # at no multiple of 16 bytes
    strided = torch.randn(3, dim, heads, dtype=torch.float16).transpose(1, 2)
    parts = [torch.randn(3, heads, dim, dtype=torch.float16) for _ in range(3)]
    for at, part in enumerate((*parts, moved, strided, parts[0])):
        expected, before = [pool.clone() for pool in inputs[1:3]], len(direct)
        write_last(expected, part, inputs)
        assert write(*inputs[1:3], part, -part, inputs.block_table, inputs.seq_lens)
        for pool, right in zip(inputs[1:3], expected):  # NaN behind the end of a sequence
            torch.testing.assert_close(pool, right, rtol=0, atol=0, equal_nan=True)
        if at != 4:
            assert len(direct) - before == (at in (1, 2, 5))


def write_last(pools: Any, part: torch.Tensor, inputs: PagedInputs) -> None:
    """Writes part and its negative as the last tokens of the sequences."""
    page_size = pools[0].shape[1]
    for row, length, token in zip(inputs.block_table.tolist(), inputs.seq_lens.tolist(), part):
        place = row[(length - 1) // page_size], (length - 1) % page_size
        pools[0][place], pools[1][place] = token, -token


def lying_amid_nan(lie: str, ranges: tuple[int, int] | None = None) -> tuple[PagedCall, PagedInputs]:
    """A call whose tables lie, with offsets as the frontends make them safe, and pools between pages of NaN."""
    call = lying(lie, ranges=ranges, **HALF)
    given = tensors(call)
    cu = offsets.clamp(given.cu_seqlens_q, call.spec.q_len)
    return call, given._replace(k=amid_nan(given.k), v=amid_nan(given.v), cu_seqlens_q=cu)


@pytest.mark.parametrize("ranges", [None, (2, 2)], ids=["", "key ranges"])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("lie", LIES)
def test_tables_that_lie_lead_nowhere_outside_the_pool(
    lie: str, count: int, ranges: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Key ranges are compared, but the place where they are read follows from the tables."""
    splits_of(monkeypatch, count)
    call, inputs = lying_amid_nan(lie, ranges)
    if ranges is not None:
        extremes = torch.tensor([[-(2**31), 2**31 - 1], [2**31 - 1, -(2**31)]], dtype=torch.int32)
        inputs = inputs._replace(key_ranges=extremes.expand(1, 2, 7, 2, 2).contiguous())
    found = attended(call, inputs)
    assert np.isfinite(found["out"]).all(), "NaN from outside the pool, or a row that nobody wrote"
    assert not np.isnan(found["lse"]).any()


def test_safe_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launch that makes tables safe for kernels of others: right ones unchanged, others brought into the pool."""
    table = torch.tensor([[0, 5, -1, 7, 2**31 - 1], [-(2**31), 3, 6, 1, 9]], dtype=torch.int32)
    lengths = torch.tensor([15, -3], dtype=torch.int32)
    for rows in (table, torch.cat([table, table + 1], 1)[:, :5]):
        made, safe = torch.full((2, 5), 77, dtype=torch.int32), torch.full((2,), 77, dtype=torch.int32)
        kernels.sanitise[(1,)](rows, lengths, made, safe, rows.stride(0), 7, 5, 10, 2, PAGE=2, BLOCK=16)
        assert made.tolist() == table.clamp(0, 6).tolist() and safe.tolist() == [10, 0]
    several = torch.full((10,), 77, dtype=torch.int32)
    kernels.sanitise[(3,)](table, lengths, several, torch.zeros(2, dtype=torch.int32), 5, 7, 5, 10, 2, PAGE=2, BLOCK=4)
    assert several.tolist() == table.clamp(0, 6).flatten().tolist()
    call = make_paged((9, 5), (2, 1))
    inputs = tensors(call)
    made, safe = pages.safe_tables(call.spec.paged, inputs)
    assert made.tolist() == inputs.block_table.clamp(min=0).tolist() and safe.tolist() == inputs.seq_lens.tolist()


@pytest.mark.parametrize("layout", ["contiguous", "heads_outside", "one_tensor", "interleaved"])
@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("new", [None, (4, 0, 1, 7)], ids=["decode", "prefill"])
def test_append(new: Any, page_size: int, layout: str) -> None:
    value_dim = 8 if layout in ("one_tensor", "interleaved") else 5
    call = make_paged((9, 4, 30, 7), new, page_size=page_size, layout=layout, dtype="float16", value_dim=value_dim)
    inputs, random = tensors(call), np.random.default_rng(0)
    parts = [random.integers(-99, 99, (call.spec.q_len, 2, dim)) for dim in (8, value_dim)]
    wide = [torch.tensor(np.concatenate([part, part], 1), dtype=torch.float16)[:, :2] for part in parts]  # strided
    append_on_gpu(inputs.k, inputs.v, *wide, inputs.block_table, inputs.seq_lens, inputs.cu_seqlens_q)
    cu = np.arange(5) if new is None else call.inputs.cu_seqlens_q
    for pool, before, part in zip(inputs[1:3], call.inputs[1:3], parts):
        expected = append(before, part, call.inputs.block_table, call.inputs.seq_lens, cu)
        np.testing.assert_array_equal(pool.numpy(), expected.astype(np.float16))


def quantised_tensors(call: PagedCall) -> PagedInputs:
    """The tensors of a call on quantised pages."""
    (q, k, v), keywords = torch_arguments(call)
    return PagedInputs(q, k, v, **keywords)


QUANTISED = {
    "decode": {"lengths": (5, 70, 1)},
    "chunks": {"lengths": (37, 0, 9), "new": (5, 0, 1), "page_size": 3},
    "window, softcap, sinks": {"lengths": (40, 9), "new": (4, 9), "window": 7, "softcap": 0.7, "sinks": True},
    "wide values": {"lengths": (40, 9), "new": (2, 3), "value_dim": 64},
    "key ranges": {"lengths": (40, 23), "new": (9, 7), "ranges": (2, 2), "causal": False},
    "slopes and starts": {"lengths": (40, 23), "new": (3, 7), "alibi": 2, "starts": True},
    "decode, window": {"lengths": (5, 70, 33), "window": 20, "softcap": 3.0, "sinks": True},
    "no causal": {"lengths": (40, 8), "new": (5, 3), "window": (30, 2), "causal": False},
    "many rows": {"lengths": (81,), "new": (40,), "num_heads": 6, "page_size": 16},
}


QUANTISED_RUNS = [
    *(("slopes and starts", kind, "float16") for kind in KINDS[::3]),
    *(("chunks", kind, dtype) for kind in KINDS for dtype in ("float16", "bfloat16")),
    *((name, ("int4", "token"), "bfloat16") for name in QUANTISED),
    *((name, ("float8_e4m3fn", "page"), "float16") for name in ("decode", "wide values")),
]


@pytest.mark.parametrize(("name", "kind", "dtype"), QUANTISED_RUNS)
def test_quantised_pages(name: str, kind: tuple[str, str], dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """bfloat16 scales the weights, float16 the values."""
    splits_of(monkeypatch, 3 if dtype == "float16" else 1)
    fields = {**HALF, "head_dim": 64, "value_dim": 32, **QUANTISED[name], "dtype": dtype}
    call = quantised_call(make_paged(fields.pop("lengths"), fields.pop("new", None), **fields), *kind)
    verdict = judge(call, attended(call, quantised_tensors(call)))
    assert verdict.ok, f"{call}\n{verdict}"


@pytest.mark.parametrize("fault", ["k_scales", "v_scales"])
def test_the_kernel_reads_the_scale_of_its_token(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    splits_of(monkeypatch, 1)
    fields = {**HALF, "head_dim": 64, "value_dim": 32}
    call = quantised_call(make_paged((40, 23), (2, 3), **fields), "int8", "token")
    scales = np.nan_to_num(getattr(call.inputs, fault), nan=1.0)
    wrong = call.inputs._replace(**{fault: np.roll(scales, 1, 1)})
    found = attended(call, quantised_tensors(replace(call, inputs=wrong)))
    assert not judge(call, found).ok


@settings(max_examples=10)
@given(st.data())
def test_any_call_on_quantised_pages(data: Any) -> None:
    lengths = data.draw(st.lists(st.integers(0, 80), min_size=1, max_size=3))
    new = [data.draw(st.integers(0, min(n, 6))) for n in lengths]
    plain = make_paged(
        lengths,
        new,
        page_size=data.draw(st.sampled_from((1, 3, 16))),
        causal=data.draw(st.booleans()),
        ranges=data.draw(st.sampled_from((None, (1, 1), (2, 2)))),
        alibi=data.draw(st.integers(0, 2)),
        starts=data.draw(st.booleans()),
        window=data.draw(st.sampled_from((None, (3, 1), (0, 0), (20, None), (None, 5)))),
        softcap=data.draw(st.sampled_from((None, 2.0))),
        sinks=data.draw(st.booleans()),
        seed=data.draw(st.integers(0, 99)),
        **{**HALF, "head_dim": 64, "value_dim": 32},
    )
    call = quantised_call(plain, *data.draw(st.sampled_from(KINDS)))
    with pytest.MonkeyPatch.context() as patch:
        splits_of(patch, data.draw(st.integers(1, 4)))
        verdict = judge(call, attended(call, quantised_tensors(call)))
    assert verdict.ok, f"{call}\n{verdict}"


@pytest.mark.parametrize("count", [1, 3])
def test_a_seen_call_on_quantised_pages_gives_the_bits_of_a_new_one(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    splits_of(monkeypatch, count)
    call = quantised_call(make_paged((5, 70, 1), **{**HALF, "head_dim": 64, "value_dim": 32}), "int4", "token")
    spec, one = call.spec, quantised_tensors(call)
    other = one._replace(q=-one.q, k_scales=2 * one.k_scales, v_scales=3 * one.v_scales)
    strided = other._replace(k_scales=other.k_scales.repeat_interleave(2, 2)[..., ::2])
    expected = [triton_splitkv.forward(spec, inputs) for inputs in (one, other)]
    direct = launch_by_address(monkeypatch)
    run, attend = triton_splitkv.paged_shortcut(spec), triton_splitkv._kernels().attend
    # Scales with other strides are another launch.
    for inputs, launches in ((one, 0), (other, 1), (strided, 0), (one, 1), (strided, 1)):
        before = direct.count(attend)
        out, lse = run(*inputs[:7], *inputs[10:])
        right = expected[inputs is not one]
        assert torch.equal(out, right[0]) and torch.equal(lse, right[1])
        assert direct.count(attend) - before == launches


@pytest.mark.parametrize("dim", [16, 20])
@pytest.mark.parametrize("kind", KINDS, ids=" ".join)
@pytest.mark.parametrize("new", [None, (4, 0, 1, 7)], ids=["decode", "prefill"])
def test_append_writes_the_bits_of_torch(new: Any, kind: tuple[str, str], dim: int) -> None:
    call = quantised_call(make_paged((9, 4, 30, 7), new, head_dim=dim, value_dim=8), *kind)
    numbers = {n: np.nan_to_num(getattr(call.inputs, n), nan=1.0) for n in ("k_scales", "v_scales")}
    call = replace(call, inputs=call.inputs._replace(**numbers))
    random = np.random.default_rng(dim)
    size = np.exp2(random.uniform(-90, 90, (call.spec.q_len, 2, 1)))
    parts = [torch.tensor(random.standard_normal((call.spec.q_len, 2, d)) * size).float() for d in (dim, 8)]
    parts[0][0, 0], parts[0][-1, 1, 3], parts[1][-1, 0, 2] = 0.0, torch.nan, -torch.inf
    results = []
    for is_kernel in (True, False):
        given = quantised_tensors(call)
        places, scales = Places(given.block_table, given.seq_lens, given.cu_seqlens_q), (given.k_scales, given.v_scales)
        if is_kernel:
            append_on_gpu(given.k, given.v, *parts, *places, scales=scales)
        else:
            _append_on_cpu(given.k, given.v, *parts, places, scales)
        results.append(given)
    for name in ("k", "v", "k_scales", "v_scales"):
        one, other = (getattr(each, name).contiguous().view(torch.uint8) for each in results)
        np.testing.assert_array_equal(one.numpy(), other.numpy(), err_msg=name)


def test_append_of_many_sequences() -> None:
    """More sequences than offsets are read at once."""
    lengths = [1 + n % 3 for n in range(1100)]
    new = [int(n % 20 == 0) for n in range(1100)]
    call = make_paged(lengths, new, num_heads=1, num_kv_heads=1, head_dim=1, value_dim=1)
    inputs = tensors(call)
    part = torch.arange(55.0).reshape(-1, 1, 1)
    append_on_gpu(inputs.k, inputs.v, part, -part, inputs.block_table, inputs.seq_lens, inputs.cu_seqlens_q)
    tables = call.inputs.block_table, call.inputs.seq_lens, call.inputs.cu_seqlens_q
    np.testing.assert_array_equal(inputs.k.numpy(), append(call.inputs.k, part, *tables).astype(np.float32))


@pytest.mark.parametrize("lie", [lie for lie in LIES if "starts" not in lie])
def test_appends_write_nowhere_outside_the_pool(lie: str) -> None:
    call, inputs = lying_amid_nan(lie)
    parts = [torch.ones(7, 2, 16, dtype=torch.float16) for _ in "kv"]
    raw = torch.tensor(LIES[lie].get("cu_seqlens_q", call.inputs.cu_seqlens_q), dtype=torch.int32)
    for cu in (inputs.cu_seqlens_q, raw):
        append_on_gpu(inputs.k, inputs.v, *parts, inputs.block_table, inputs.seq_lens, cu)
        for pool in inputs[1:3]:
            wide = pool._base
            assert wide[: len(pool)].isnan().all() and wide[2 * len(pool) :].isnan().all()
            assert pool.isfinite().all()


# Offsets made safe

sides = st.tuples(st.integers(0, 60), st.integers(0, 60)) | st.integers(0, 60).map(lambda size: (size, size))


@settings(max_examples=settings().max_examples * 3 // 2, deadline=None)
@given(
    st.lists(st.tuples(st.integers(-5, 70), st.integers(-5, 70)), min_size=2, max_size=6), sides, sides, st.booleans()
)
def test_offsets(
    values: list[tuple[int, int]], tokens: tuple[int, int], longest: tuple[int, int], shared: bool
) -> None:
    """One launch gives the offsets of six torch operations, whatever the values are."""
    tail = tail_of(tokens, longest, len(values) - 1)
    if tail is None:
        return
    queries, keys = torch.tensor(values, dtype=torch.int32).T  # strided
    keys = queries if shared else keys
    actual, expected = (f(queries, keys, tail, tokens) for f in (triton_offsets.safe, offsets.safe_by_torch))
    assert actual is not None and all(map(torch.equal, actual, expected))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(-5, 70) | st.sampled_from([-(2**31), 2**31 - 1]), min_size=1, max_size=9))
def test_clamped_offsets(values: list[int]) -> None:
    given = torch.tensor(values, dtype=torch.int32)
    actual = triton_offsets.safe(given, given, triton_offsets.NO_TAIL, (60, 60))
    assert actual is not None and torch.equal(actual[0], offsets.clamp(given, 60))


@pytest.mark.parametrize("documents", [1500, 3000])
def test_offsets_of_many_documents(documents: int) -> None:
    """More offsets than are read at once."""
    random = torch.Generator().manual_seed(documents)
    for extremes in (False, True):
        queries = torch.randint(-9, 9000, (documents + 1,), dtype=torch.int32, generator=random)
        if extremes:
            queries[7], queries[9] = 2**31 - 1, -(2**31)
        else:
            queries = queries.sort().values
        keys = queries.flip(0).contiguous()
        tail = tail_of((9001, 8000), (5, 7), documents)
        assert tail is not None
        for pair in ((queries, queries), (queries, keys)):
            actual = triton_offsets.safe(*pair, tail, (9001, 8000))
            assert actual is not None
            assert all(map(torch.equal, actual, offsets.safe_by_torch(*pair, tail, (9001, 8000))))


# Partial attentions merged


@pytest.mark.parametrize("rows", [1, 67])
@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", ["contiguous", "heads_outside", "a part of rows", "stepped"])
def test_merge(layout: str, kind: str, rows: int) -> None:
    """The launch that merges two parts is the formula in torch, with rows that see nothing of either, or of both."""
    random = torch.Generator().manual_seed(rows)
    batch, heads, dim = 2, 3, 5
    out, part = (torch.randn(batch, rows, heads, dim, generator=random) for _ in range(2))
    lse, part_lse = (3 * torch.randn(batch, heads, rows, generator=random) for _ in range(2))
    lse[:, :, ::3], part_lse[:, :, ::2] = -torch.inf, -torch.inf
    out[:, ::3], part[:, ::2] = 0, 0
    part = part.to(getattr(torch, kind))
    right, right_lse = out.clone(), lse.clone()
    tiles.merge(right, right_lse, part, part_lse)
    given = [spread(each, layout, axis) for each, axis in ((out, 1), (lse, 2), (part, 1), (part_lse, 2))]
    merge_triton.merge(*given)
    torch.testing.assert_close(given[0], right, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(given[1], right_lse, rtol=1e-6, atol=1e-6)
    assert given[0].isfinite().all() and (given[1] == -torch.inf).sum() == 2 * 3 * len(range(0, rows, 6))
    for view in given[:2]:
        if view._base is not None:
            view.fill_(torch.nan)
            assert view._base.isnan().all(), "what lies between the rows of a view was written to"


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize(("kind", "rows", "dim"), [("float32", 1, 5), ("float16", 37, 8), ("bfloat16", 19, 16)])
def test_merge_of_any_number_of_parts(kind: str, rows: int, dim: int, count: int) -> None:
    """The launch of ``merge_states`` is the formula in torch, with rows that see nothing, and NaN in empty parts."""
    random = torch.Generator().manual_seed(rows)
    parts = torch.randn(count, 2, rows, 3, dim, generator=random).to(getattr(torch, kind))
    lses = 3 * torch.randn(count, 2, 3, rows, generator=random)
    for number in range(count):
        lses[number, :, :, number::3] = -torch.inf
        parts[number, :, number::3] = torch.nan
    lses[:, 0, 1, 0] = -torch.inf
    right, right_lse = _plain(list(parts), list(lses))
    out, lse = merge_triton.merge_parts(parts, lses)
    assert out.dtype is parts.dtype and out.isfinite().all() and (lse[0, 1, 0] == -torch.inf).all()
    steps = {"float32": 1e-6, "float16": 2e-3, "bfloat16": 2e-2}[kind]
    torch.testing.assert_close(out, right, rtol=steps, atol=steps)
    torch.testing.assert_close(lse, right_lse, rtol=1e-6, atol=1e-6)


def spread(tensor: torch.Tensor, layout: str, axis: int) -> torch.Tensor:
    """The same values in other memory; what lies between them is NaN."""
    if layout == "heads_outside":
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "contiguous":
        return tensor
    rows = tensor.shape[axis]
    shape = list(tensor.shape)
    shape[axis] = 2 * rows + 3
    wide = tensor.new_full(shape, torch.nan)
    view = (
        wide.narrow(axis, 2, rows)
        if layout == "a part of rows"
        else wide.movedim(axis, 0)[1 : 2 * rows : 2].movedim(0, axis)
    )
    view.copy_(tensor)
    return view
