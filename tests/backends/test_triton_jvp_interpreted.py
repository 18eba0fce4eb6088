"""triton_jvp's kernels in Triton's interpreter, on the CPU, against float64: forward mode, and the largest logits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton.runtime.interpreter")
import row_maximum_reference
from forward_mode import NAMES, in_forward_mode, judge, tangents_of
from interpreted_calls import (
    BANDS,
    DOCUMENTS,
    FAULTY,
    FLOAT32,
    LIES,
    SINKS,
    SIZES,
    amid_nan,
    heads_outside,
    stepped,
    tensor,
    tensors,
)
from oracle_cases import rounded
from spec_strategies import MISREAD, Call, make_call, misread

from attn_core.backends import triton_jvp
from attn_core.backends.contract import ForwardModePass, RowMaximumPass
from attn_core.call.tensors import Inputs, Tangents
from attn_core.correctness import reference
from attn_core.selection import row_maximum
from torch_frontend import SeqInfo, attention

pytestmark = [pytest.mark.sampled, pytest.mark.usefixtures("interpreter")]


CASES: dict[str, dict[str, Any]] = {
    **(BANDS | FLOAT32 | SINKS),
    "softcap, float32": {**SIZES, "softcap": 30.0, "dtype": "float32"},
    "documents, everything": {**DOCUMENTS, "window": (5, 2), "sinks": True, "softcap": 2.0, "num_heads": 3},
    "wide": {**SIZES, "head_dim": 80, "value_dim": 150, "batch": 1, "num_heads": 1},
}


def moved(call: Call, tangents: Tangents) -> Tangents:
    return Tangents(*(tensor(each, call.dtype_of(name)) for name, each in zip(NAMES, tangents, strict=True)))


def computed(call: Call, tangents: Tangents) -> dict[str, np.ndarray]:
    """The kernel's results as a caller gets them: rows that see no key have their sink, and its tangent."""
    assert triton_jvp.refuses(call.spec, "sm90", None) == ()
    results = triton_jvp.jvp(call.spec, tensors(call), moved(call, tangents), primals=True)
    named = {name: each.double().numpy() for name, each in zip(("out", "lse", "dout", "dlse"), results, strict=True)}
    if call.spec.sinks:
        alone = named["lse"] == -np.inf
        assert not named["dlse"][alone].any()
        sink = reference.softmax(call.spec, call.inputs).sink[0]
        tangent = 0.0 if tangents.dsinks is None else np.asarray(tangents.dsinks)[:, None]
        named["lse"] = np.where(alone, sink, named["lse"])
        named["dlse"] = np.where(alone & (sink != -np.inf), tangent, named["dlse"])
    return named


def check(call: Call, tangents: Tangents) -> None:
    verdict = judge(call, tangents, computed(call, tangents))
    assert verdict.ok, f"{call}\n{verdict}"


@pytest.mark.parametrize("name", CASES)
def test_forward_mode(name: str) -> None:
    call = in_forward_mode(make_call(**CASES[name]))
    check(call, tangents_of(call))


@pytest.mark.parametrize("names", [("q",), ("k",), ("v",), ("sinks",), ("q", "v"), ("k", "sinks")])
def test_tangents_of_some_inputs(names: tuple[str, ...]) -> None:
    call = in_forward_mode(make_call(**{**SIZES, "causal": True, "sinks": True, "softcap": 2.0}))
    check(call, tangents_of(call, names))


def test_without_tangents_it_is_the_forward() -> None:
    call = in_forward_mode(make_call(**CASES["documents, everything"]))
    out, lse = triton_jvp.forward(call.spec, tensors(call))
    expected = computed(call, tangents_of(call))
    assert np.array_equal(out.double().numpy(), expected["out"])
    assert np.array_equal(np.where(np.isinf(lse), expected["lse"], lse.double().numpy()), expected["lse"])


def test_large_tangents_in_float16_stay_finite() -> None:
    """Tangents of logits beyond float16's range, beside small values."""
    call = in_forward_mode(make_call(**SIZES, scale=3.0))
    sizes = {"q": 0.01, "k": 30.0, "v": 1e-4}
    small = {name: rounded(size * getattr(call.inputs, name), "float16") for name, size in sizes.items()}
    call = replace(call, inputs=call.inputs._replace(**small))
    tangents = tangents_of(call)
    tangents = tangents._replace(dq=rounded(1e3 * tangents.dq, "float16"), dv=small["v"])
    results = computed(call, tangents)
    assert abs(results["dlse"]).max() > 65504 and np.isfinite(results["dout"]).all()
    verdict = judge(call, tangents, results)
    assert verdict.ok, verdict


def test_nan_stays_in_its_document() -> None:
    call = in_forward_mode(make_call(**CASES["documents"]))
    tangents = tangents_of(call)
    right = computed(call, tangents)
    for array in (call.inputs.k, call.inputs.v, tangents.dk, tangents.dv):
        array[-1] = np.nan  # the last key of the third document, whose queries are tokens 33 to 99
    dout = computed(call, tangents)["dout"]
    assert np.isnan(dout[99]).all()
    for clean in (slice(0, 33), slice(100, None)):
        assert np.array_equal(dout[clean], right["dout"][clean])


def test_offsets_that_lie_lead_nowhere_outside() -> None:
    call = in_forward_mode(make_call(**CASES["documents"]))
    inputs, tangents = tensors(call), moved(call, tangents_of(call))
    for lie in LIES:
        offsets = torch.tensor(lie, dtype=torch.int32)
        amid = [amid_nan(each) for each in inputs[1:3]]
        given = inputs._replace(k=amid[0], v=amid[1], cu_seqlens_q=inputs.cu_seqlens_q, cu_seqlens_k=offsets)
        for each in triton_jvp.jvp(call.spec, given, tangents, primals=True):
            assert not each.isnan().any()


def test_any_strides() -> None:
    call = in_forward_mode(make_call(**CASES["causal"]))
    inputs, tangents = tensors(call), moved(call, tangents_of(call))
    expected = triton_jvp.jvp(call.spec, inputs, tangents)[2:]
    into = tuple(torch.full_like(each, torch.nan) for each in expected)
    results = triton_jvp.jvp(
        call.spec, Inputs(*map(heads_outside, inputs[:3])), Tangents(*map(stepped, tangents[:3])), into
    )[2:]
    assert all(map(torch.equal, results, expected)) and results[0] is into[0] and results[1] is into[1]


@pytest.mark.parametrize("fault", MISREAD)
def test_faults_are_caught(fault: str) -> None:
    call = in_forward_mode(make_call(**FAULTY))
    tangents = tangents_of(call)
    assert judge(call, tangents, computed(call, tangents)).ok
    assert not judge(call, tangents, computed(misread(call, fault), tangents)).ok


def test_the_frontend_chooses_it(replace_fields: Any) -> None:
    """As on a GPU: this process lets it claim the CPU, too."""
    ran: list[Any] = []

    def jvp(spec: Any, *rest: Any, **more: Any) -> Any:
        ran.append(spec)
        return triton_jvp.jvp(spec, *rest, **more)

    claims = replace(triton_jvp.FORWARD, devices=("cpu",))
    own = ForwardModePass(claims=claims, jvp=jvp, preference={"cpu": 10})
    replace_fields(triton_jvp.BACKEND, forward_claims=claims, forward_mode=own)
    q, k, v = (torch.randn(1, 38, heads, 16, generator=torch.Generator().manual_seed(1)) for heads in (4, 2, 2))
    ways = torch.stack([torch.cos(q), torch.sin(q)])
    packed = {"seq_info": SeqInfo.from_lengths([20, 18]), "causal": True, "window": 7}
    for options in ({"causal": True}, packed, {"softcap": 3.0}, {"bias": torch.zeros(1, 1, 38, 38)}):
        one, other = (along(ways[0], (q, k, v), backend=name, **options) for name in (None, "math"))
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert [spec.packed for spec in ran] == [False, True, False], "the kernel has no bias"
    for options, batch in (({"causal": True}, 2), (packed, 1)):  # vmap folds rows, and runs documents one by one
        mapped = torch.func.vmap(lambda way, options=options: along(way, (q, k, v), **options))(ways)
        torch.testing.assert_close(mapped[1], along(ways[1], (q, k, v), **options), rtol=1e-5, atol=1e-6)
        assert ran[3].batch == batch
        ran[3:] = []


def along(way: Any, primals: Any, **options: Any) -> Any:
    """The tangent of the output along a way of q."""
    q, k, v = primals
    return torch.func.jvp(lambda q: attention(q, k, v, **options), (q,), (way,))[1]


# The largest logit of each row


TABLES = {"bias_shape": (1, 2, 37, 83), "mask_shape": (2, 1, 37, 83), "alibi_shape": (2,)}
ROW_MAXIMA: dict[str, dict[str, Any]] = {
    **(BANDS | FLOAT32),
    "softcap and bias": {**SIZES, "softcap": 1.3, "bias_shape": (2, 1, 37, 83), "hiding": True},
    "a bias of another dtype": {**SIZES, "bias_shape": (1, 1, 1, 83), "extras_dtype": "float32"},
    "mask": {**SIZES, "mask_shape": (2, 2, 37, 83), "causal": True},
    "slopes": {**SIZES, "alibi_shape": (2, 2), "causal": True, "extras_dtype": "float32"},
    "key ranges": {**SIZES, "key_ranges_shape": (2, 1, 83, 2, 2)},
    "tables": {**SIZES, **TABLES, "window": (30, 9), "key_ranges_shape": (1, 1, 83, 1, 2), "softcap": 9.0},
    "documents, everything": {
        **{**DOCUMENTS, "window": (5, 2), "softcap": 2.0, "num_heads": 3, "num_kv_heads": 3, "dtype": "bfloat16"},
        **{"mask_shape": (1, 1, 105, 118), "alibi_shape": (3,), "key_ranges_shape": (1, 3, 118, 1, 2)},
    },
    "wide": {**SIZES, "head_dim": 192, "batch": 1, "num_heads": 1},
}


def row_maxima(call: Call, inputs: Inputs | None = None) -> np.ndarray:
    """As the frontends pass a call: k stands for v, and there are no sinks."""
    spec, inputs = row_maximum.spec_of(call.spec), inputs or tensors(call)
    assert triton_jvp.refuses(spec, "sm90", None) == ()
    return triton_jvp.row_maximum(spec, inputs._replace(v=inputs.k, sinks=None)).double().numpy()


@pytest.mark.parametrize("name", ROW_MAXIMA)
def test_row_maxima(name: str) -> None:
    call = make_call(**ROW_MAXIMA[name])
    truth = row_maximum_reference.row_maximum(call.spec, call.inputs)
    assert row_maximum_reference.is_right(row_maxima(call), *truth), call


@pytest.mark.parametrize("fault", MISREAD)
def test_faults_in_row_maxima_are_caught(fault: str) -> None:
    call = make_call(**FAULTY)
    truth = row_maximum_reference.row_maximum(call.spec, call.inputs)
    assert row_maximum_reference.is_right(row_maxima(call), *truth)
    assert not row_maximum_reference.is_right(row_maxima(misread(call, fault)), *truth)


def test_nan_reaches_the_maxima_of_rows_that_see_its_key() -> None:
    """In another document, behind the diagonal, under a mask, under a bias of -inf, and outside of the ranges."""
    for name in ("documents", "mask", "softcap and bias", "key ranges"):
        call = make_call(**ROW_MAXIMA[name])
        right = row_maxima(call)
        call.inputs.k[(90,) if call.spec.packed else (1, 7)] = np.nan
        truth, _ = row_maximum_reference.row_maximum(call.spec, call.inputs)
        met, result = np.isnan(truth), row_maxima(call)
        assert met.any() and not met.all() and np.array_equal(np.isnan(result), met), name
        assert np.array_equal(result[~met], right[~met]), name


def test_row_maxima_of_offsets_that_lie() -> None:
    call = make_call(**ROW_MAXIMA["documents"])
    inputs = tensors(call)
    for lie in LIES:
        offsets = torch.tensor(lie, dtype=torch.int32)
        assert not np.isnan(row_maxima(call, inputs._replace(k=amid_nan(inputs.k), cu_seqlens_k=offsets))).any()


def test_row_maxima_of_any_strides() -> None:
    call = make_call(**ROW_MAXIMA["tables"])
    inputs = tensors(call)
    bias = inputs.bias.repeat_interleave(3, 1)[:, ::3]
    q, k, mask = heads_outside(inputs.q), stepped(inputs.k), inputs.mask.mT.contiguous().mT
    strided = inputs._replace(q=q, k=k, mask=mask, bias=bias)
    assert np.array_equal(row_maxima(call, strided), row_maxima(call, inputs))


def test_the_frontend_chooses_its_row_maxima(replace_fields: Any) -> None:
    """As on a GPU: this process lets it claim the CPU, too."""
    ran: list[bool] = []
    own = RowMaximumPass(
        claims=replace(triton_jvp.ROW_MAXIMUM, devices=("cpu",)),
        function=lambda *given: ran.append(True) or triton_jvp.row_maximum(*given),
        preference={"cpu": 10},
    )
    replace_fields(triton_jvp.BACKEND, row_maximum=own)
    q, k, v = (torch.randn(1, 38, heads, 16, generator=torch.Generator().manual_seed(1)) for heads in (4, 2, 2))
    documents = {"seq_info": SeqInfo.from_lengths([20, 15]), "causal": True, "window": 7}
    several = ({"causal": True}, documents, {"mask": torch.rand(38, 38) > 0.5}, {"alibi_slopes": torch.ones(4)})
    for options in several:
        *_, top = attention(q, k, v, return_max_logit=True, backend="sdpa_flash", **options)
        *_, other = attention(q, k, v, return_max_logit=True, backend="math", **options)
        torch.testing.assert_close(top, other, rtol=1e-5, atol=1e-6)
    assert len(ran) == len(several), "math has it from its forward"
