"""Tests the math and flex backends against the float64 reference: every feature and dtype, gradients, NaN, and
memory."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import callers_view
import numpy as np
import oracle_cases
import pytest
from oracle_cases import FEATURES, LENGTHS_K, LENGTHS_Q, PACKED

from attn_core import AttentionSpec, SpecError, Target, explain
from attn_core.backends import math
from attn_core.backends.flex import cpu as flex
from attn_core.backends.shared import row_blocks
from attn_core.backends.shared.claims import unmet_claims
from attn_core.backends.shared.plain import attention as plain_attention
from attn_core.backends.shared.plain import blocks
from attn_core.call.tensors import Inputs
from attn_core.correctness import reference

torch = pytest.importorskip("torch")
from direct_calls import LargestOutput, arrays, tensors

pytestmark = pytest.mark.sampled

LONGEST = {"max_len_q": max(LENGTHS_Q), "max_len_k": max(LENGTHS_K)}
OF_OTHER_SUITES = {"key_ranges_shape", "mask_mod", "score_mod"}
CASES: dict[str, dict[str, Any]] = {
    **{name: fields for name, fields in FEATURES.items() if not OF_OTHER_SUITES & fields.keys()},
    "equal heads": {"num_kv_heads": 9},
    "one kv head": {"num_kv_heads": 1},
    "one query": {"q_len": 1, "causal": True},
    "one key": {"kv_len": 1},
    "mask by row": {"mask_shape": (1, 9, 5, 1)},
    "mask by key, causal": {"mask_shape": (2, 1, 1, 7), "causal": True},
    "bias of all heads, causal": {"bias_shape": (1, 1, 5, 7), "causal": True, "bias_gradient": True},
    "bias, softcap": {**FEATURES["bias"], "softcap": 1.3},
    "alibi by batch, top_left": {"alibi_shape": (2, 9), "alignment": "top_left"},
    "everything but dropout": {
        **{**FEATURES["everything"], "dropout": 0.0, "window": (4, 2), "mask_shape": (1, 9, 5, 7)},
        "bias_shape": (2, 1, 5, 7),
    },
    "right window, top_left": {"window": (None, 1), "alignment": "top_left"},
    "packed, window": {**PACKED, **LONGEST, "window": (2, 1)},
    "packed, alibi by row": {
        **{**PACKED, "alibi_shape": (1, 9), "bias_shape": (1, 9, 12, 1), "bias_gradient": True},
        "mask_shape": (1, 1, 1, 14),
    },
    "packed, everything": {
        **{**PACKED, "causal": True, "window": (4, 0), "softcap": 2.0, "mask_shape": (1, 9, 12, 14), "dropout": 0.2},
        **{**LONGEST, "bias_shape": (1, 1, 12, 14), "bias_gradient": True, "alibi_shape": (9,), "sinks": True},
    },
}
FLEX_IN_EVERY_DTYPE = ("plain", "sinks with empty rows", "everything but dropout", "packed, window")
FLEX_CASES = [name for name, case in CASES.items() if not case.get("dropout")]
# relative error of one stored number
ROUNDING = {"float64": 0.0, "float32": 2.0**-23, "bfloat16": 2.0**-8, "float16": 2.0**-10}
# absolute error of sums in the accumulation dtype
NOISE = {"float64": 1e-12, "float32": 4e-6, "bfloat16": 4e-6, "float16": 4e-6}


def make(name: str, dtype: str = "float32", **changes: Any) -> tuple[AttentionSpec, Inputs]:
    """The spec and the tensors of a case; without a backward there is no gradient of the bias."""
    learns = changes.get("needs_backward", False)
    case = oracle_cases.make({**CASES[name], **({} if learns else {"bias_gradient": False}), **changes}, dtype)
    inputs = tensors(case.inputs, dtype)
    if case.spec.dropout:  # only the low 32 bits of the words count
        inputs = inputs._replace(rng=torch.tensor([-5, 2**40 + 11]))
    return case.spec, inputs


def lse_for_callers(spec: AttentionSpec, inputs: Inputs, lse: torch.Tensor) -> torch.Tensor:
    """A backend's log-sum-exp as a frontend returns it."""
    return torch.from_numpy(callers_view.callers_results(spec, arrays(inputs), lse.double().numpy())[0]).to(lse.dtype)


def check(name: str, actual: torch.Tensor, expected: np.ndarray, dtype: str, factor: float = 1.0) -> None:
    """Compares one result: rounded once to its dtype, plus the noise of sums in the accumulation dtype."""
    assert actual.is_contiguous() and tuple(actual.shape) == expected.shape, name
    noise = factor * NOISE[dtype] * max(1.0, np.abs(expected[np.isfinite(expected)]).max(initial=0.0))
    rounding = ROUNDING[str(actual.dtype).removeprefix("torch.")]
    np.testing.assert_allclose(actual.double().numpy(), expected, rtol=factor * rounding, atol=noise, err_msg=name)


@pytest.fixture
def small_blocks(monkeypatch):
    """Runs every call in blocks of 2 rows, also the ones that would run in one piece."""
    monkeypatch.setattr(plain_attention, "QUERY_BLOCK", 2)
    monkeypatch.setattr(plain_attention, "has_few_scores", lambda spec: False)


@pytest.fixture(params=["documents", "tokens"])
def offsets_on_host_or_device(request, monkeypatch):
    """Runs packed documents both ways: with offsets read on the host, and with offsets left on the device."""
    if request.param == "tokens":
        monkeypatch.setattr(row_blocks, "_host_blocks", lambda *call: row_blocks._token_blocks(*call[:3]))
        monkeypatch.setattr(blocks, "_harmless", lambda values, hidden: hidden is None)
    return request.param


def check_forward(spec: AttentionSpec, inputs: Inputs, out: torch.Tensor, lse: torch.Tensor) -> None:
    expected, expected_lse = reference.forward(spec, arrays(inputs))
    assert str(out.dtype) == f"torch.{spec.dtype}" and str(lse.dtype) == f"torch.{spec.lse_dtype}"
    check("out", out, expected, spec.dtype)
    check("lse", lse_for_callers(spec, inputs, lse), expected_lse, spec.dtype)


def check_math(spec: AttentionSpec, inputs: Inputs, with_dlse: bool = True) -> None:
    """Compares out, lse and all gradients."""
    out, lse = math.forward(spec, inputs)
    check_forward(spec, inputs, out, lse)
    generator = torch.Generator().manual_seed(3)
    dout = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.dtype)
    dlse = torch.randn(lse.shape, generator=generator, dtype=lse.dtype) if with_dlse else None
    actual = math.backward(spec, inputs, out, lse, dout, dlse)
    saved = [t if t is None else t.double().numpy() for t in (out, lse, dout, dlse)]
    expected = reference.backward(spec, arrays(inputs), *saved)
    originals = (inputs.q, inputs.k, inputs.v, inputs.bias, inputs.sinks)
    if spec.sinks:
        _, shown = callers_view.callers_results(spec, arrays(inputs), saved[1], arrays(actual), saved[3])
        actual = actual._replace(dsinks=torch.from_numpy(shown.dsinks).to(actual.dsinks.dtype))
    for name, gradient, desired, original in zip(actual._fields, actual, expected, originals):
        assert (gradient is None) == (desired is None), name
        if gradient is not None:
            assert gradient.dtype == original.dtype, name
            check(name, gradient, desired, spec.dtype, factor=2.0)


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("case", CASES)
def test_math_matches_the_reference(case, dtype, small_blocks):
    spec, inputs = make(case, dtype, needs_backward=True)
    check_math(spec, inputs, with_dlse=case not in ("plain", "packed"))


@pytest.mark.parametrize("case", [name for name in CASES if name.startswith("packed")])
def test_math_runs_packed_documents_without_reading_the_offsets(case, small_blocks, offsets_on_host_or_device):
    check_math(*make(case, needs_backward=True))


def test_math_reads_no_value_from_a_device(small_blocks):
    spec, inputs = make("packed, everything", needs_backward=True)
    # meta tensors have no values: reading one raises
    inputs = Inputs(*(t if t is None else t.to("meta") for t in inputs))
    out, lse = math.forward(spec, inputs)
    gradients = math.backward(spec, inputs, out, lse, torch.empty_like(out), torch.empty_like(lse))
    assert out.device.type == "meta" and tuple(out.shape) == spec.out_shape and tuple(lse.shape) == spec.lse_shape
    assert gradients.dbias.shape == inputs.bias.shape


@pytest.mark.parametrize(
    ("case", "dtype"),
    [(case, dtype) for case in FLEX_CASES for dtype in ROUNDING if dtype == "float32" or case in FLEX_IN_EVERY_DTYPE],
)
def test_flex_forward_matches_the_reference(case, dtype):
    spec, inputs = make(case, dtype)
    out, lse = flex.forward(spec, inputs)
    expected, expected_lse = reference.forward(spec, arrays(inputs))
    assert str(out.dtype) == f"torch.{dtype}" and str(lse.dtype) == f"torch.{spec.lse_dtype}"
    check("lse", lse_for_callers(spec, inputs, lse), expected_lse, dtype)
    magnitude, _ = reference.forward(spec, arrays(inputs._replace(v=inputs.v.abs())))
    error = np.abs(out.double().numpy() - expected)  # the weights are rounded to the dtype of v, too
    assert (error <= 2 * ROUNDING[dtype] * (magnitude + np.abs(expected)) + NOISE[dtype]).all()
    assert out.is_contiguous() and lse.is_contiguous()


def test_a_bias_of_minus_infinity_has_no_gradient():
    spec, inputs = make("bias of all heads, causal", "float64", needs_backward=True, bias_gradient=True, sinks=True)
    bias = inputs.bias.masked_fill(torch.rand(inputs.bias.shape) > 0.5, -torch.inf)
    bias[:, :, 4] = -torch.inf  # the bias alone empties this row
    inputs = inputs._replace(bias=bias, sinks=torch.randn(9).double())
    out, lse = math.forward(spec, inputs)
    assert (lse[:, :, 4] == -torch.inf).all() and not out[:, 4].any()
    check_math(spec, inputs)


def test_empty_rows_pass_no_gradient_even_if_dlse_is_infinite(small_blocks):
    spec, inputs = make("sinks with empty rows", needs_backward=True)
    out, lse = math.forward(spec, inputs)
    empty = lse == -torch.inf
    assert empty.any() and not out.transpose(1, 2)[empty].any()
    dlse = torch.zeros_like(lse).masked_fill(empty, torch.inf)  # the gradient of lse ** 2 is infinite there
    gradients = math.backward(spec, inputs, out, lse, torch.ones_like(out), dlse)
    assert all(gradient is None or gradient.isfinite().all() for gradient in gradients)
    assert not gradients.dq.transpose(1, 2)[empty].any()


def poison(tensors: list[torch.Tensor], ranges: list[slice], value: float) -> list[torch.Tensor]:
    poisoned = [tensor.clone() for tensor in tensors]
    for tensor, tokens in zip(poisoned, ranges):
        tensor[tokens] = value
    return poisoned


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_math_keeps_nan_within_its_document(value, small_blocks, offsets_on_host_or_device):
    spec, inputs = make("packed, causal", needs_backward=True)
    first_q, first_k = slice(0, LENGTHS_Q[0]), slice(0, LENGTHS_K[0])
    q, k, v = poison([*inputs[:3]], [first_q, first_k, first_k], value)
    out, lse = math.forward(spec, inputs)
    broken, broken_lse = math.forward(spec, inputs._replace(q=q, k=k, v=v))
    assert broken[first_q].isnan().all()
    assert torch.equal(broken[LENGTHS_Q[0] :], out[LENGTHS_Q[0] :])
    assert torch.equal(broken_lse[:, LENGTHS_Q[0] :], lse[:, LENGTHS_Q[0] :])

    dout = torch.ones_like(out)
    broken_dout = dout.clone()
    broken_dout[first_q] = value
    expected = math.backward(spec, inputs, out, lse, dout, None)
    actual = math.backward(spec, inputs._replace(q=q, k=k, v=v), broken, broken_lse, broken_dout, None)
    assert torch.equal(actual.dq[LENGTHS_Q[0] :], expected.dq[LENGTHS_Q[0] :])
    assert torch.equal(actual.dk[LENGTHS_K[0] :], expected.dk[LENGTHS_K[0] :])
    assert torch.equal(actual.dv[LENGTHS_K[0] :], expected.dv[LENGTHS_K[0] :])


@pytest.mark.parametrize("softcap", [None, 1.5])
def test_math_never_reads_a_hidden_key(softcap, small_blocks):
    spec, inputs = make("mask by key", needs_backward=True, softcap=softcap)
    out, lse = math.forward(spec, inputs)
    hidden = ~inputs.mask[:, 0, 0, :]  # [batch, keys]
    k, v = (tensor.clone() for tensor in (inputs.k, inputs.v))
    k[hidden], v[hidden] = torch.nan, torch.inf
    poisoned = inputs._replace(k=k, v=v)
    actual, got_lse = math.forward(spec, poisoned)
    assert torch.equal(actual, out) and torch.equal(got_lse, lse)
    dout = torch.ones_like(out)
    pairs = zip(math.backward(spec, inputs, out, lse, dout, None), math.backward(spec, poisoned, out, lse, dout, None))
    assert all(torch.equal(a, b) for a, b in pairs if a is not None)


@pytest.mark.parametrize("backend", [math, flex])
def test_backends_build_no_graph_and_ignore_autocast_without_warning(backend, recwarn):
    spec, inputs = make("bias")
    expected, expected_lse = backend.forward(spec, inputs)
    inputs = inputs._replace(**{name: getattr(inputs, name).requires_grad_() for name in ("q", "k", "v", "bias")})
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.enable_grad():
        out, lse = backend.forward(spec, inputs)
    assert not out.requires_grad and not lse.requires_grad
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse)
    assert not [warning for warning in recwarn if "flex_attention" in str(warning.message)]
    if backend is math:
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.enable_grad():
            gradients = backend.backward(spec, inputs, out, lse, torch.ones_like(out), None)
        assert not any(gradient.requires_grad for gradient in gradients if gradient is not None)


@pytest.mark.parametrize("backend", [math, flex])
@pytest.mark.parametrize("extras", ["float64", "bfloat16"])
def test_bias_slopes_and_sinks_may_have_another_dtype(backend, extras):
    spec, inputs = make("everything but dropout", needs_backward=True)
    kind = getattr(torch, extras)
    names = ("bias", "alibi_slopes", "sinks")
    inputs = inputs._replace(**{name: getattr(inputs, name).to(kind) for name in names})
    check_forward(spec, inputs, *backend.forward(spec, inputs))
    if backend is math:
        check_math(spec, inputs)


def transposed_copy(tensor):
    """The same values with the two axes before the last stored in the other order."""
    return tensor if tensor is None or tensor.ndim < 3 else tensor.transpose(-3, -2).contiguous().transpose(-3, -2)


@pytest.mark.parametrize("backend", [math, flex])
def test_strided_views_give_the_same_bits(backend):
    spec, inputs = make("everything but dropout", needs_backward=True)
    views = Inputs(*map(transposed_copy, inputs))
    saved = backend.forward(spec, inputs)
    pairs = list(zip(backend.forward(spec, views), saved))
    if backend is math:
        dout = torch.ones_like(saved[0])
        pairs += zip(
            math.backward(spec, views, *map(transposed_copy, (*saved, dout)), None)[:5],
            math.backward(spec, inputs, *saved, dout, None)[:5],
        )
    assert all(torch.equal(actual, expected) and actual.is_contiguous() for actual, expected in pairs)


def test_math_memory_grows_with_one_block_of_queries():
    length = 8192
    spec = AttentionSpec(
        **{**oracle_cases.SIZES, "batch": 1, "q_len": length, "kv_len": length, "num_heads": 1, "num_kv_heads": 1},
        dtype="float32",
        causal=True,
        needs_backward=True,
    )
    q, k = torch.randn(2, 1, length, 1, spec.head_dim)
    v = torch.randn(1, length, 1, spec.value_dim)
    with LargestOutput() as largest:
        out, lse = math.forward(spec, Inputs(q, k, v))
        math.backward(spec, Inputs(q, k, v), out, lse, torch.ones_like(out), None)
    assert 0 < largest.elements <= plain_attention.QUERY_BLOCK * length


def test_math_gradcheck(small_blocks):
    spec, inputs = make("packed, everything", "float64", needs_backward=True)

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *tensors):
            given = inputs._replace(**dict(zip(("q", "k", "v", "bias", "sinks"), tensors)))
            out, lse = math.forward(spec, given)
            ctx.save_for_backward(*tensors, out, lse)
            return out, lse.masked_fill(lse == -torch.inf, 0.0)

        @staticmethod
        def backward(ctx, dout, dlse):
            *tensors, out, lse = ctx.saved_tensors
            given = inputs._replace(**dict(zip(("q", "k", "v", "bias", "sinks"), tensors)))
            return tuple(math.backward(spec, given, out, lse, dout, dlse))

    tensors = [t.requires_grad_() for t in (inputs.q, inputs.k, inputs.v, inputs.bias, inputs.sinks)]
    assert torch.autograd.gradcheck(Attention.apply, tensors, fast_mode=True)


@pytest.mark.parametrize("backend", [math, flex])
@pytest.mark.parametrize(
    "broken", [(1, 3, 3, 5, 11, 11, 12), (0, 5, 3, 5, 11, 11, 12), (0, 3, 3, 5, 11, 11, 13), (0, 0, 0, 0, 0, 0, 12)]
)
def test_wrong_offsets_on_the_host_are_refused(backend, broken):
    spec, inputs = make("packed", **LONGEST)
    with pytest.raises(SpecError, match=r"seq_info\.(cu_seqlens_q|max_len_q)"):
        backend.forward(spec, inputs._replace(cu_seqlens_q=torch.tensor(broken).int()))


@pytest.mark.parametrize("broken", [(5, 3, 40, -7, 9, 12, 12), (0, 3, 3, 5, 11, 11, 11), (0, 0, 0, 0, 0, 0, 2**30)])
def test_wrong_offsets_on_a_device_read_nothing_outside_the_tensors(broken, monkeypatch):
    monkeypatch.setattr(row_blocks, "_host_blocks", lambda *call: row_blocks._token_blocks(*call[:3]))
    spec, inputs = make("packed, causal")
    out, lse = math.forward(spec, inputs._replace(cu_seqlens_q=torch.tensor(broken).int()))
    assert out.isfinite().all() and not lse.isnan().any()


def test_the_claims_of_both_backends():
    for case in CASES:
        spec, _ = make(case, needs_backward=True, return_lse=True)
        for device in ("cpu", "sm90"):
            assert unmet_claims(math.FORWARD, spec, device) == unmet_claims(math.BACKWARD, spec, device) == ()
        assert math.refuses(spec, "cpu", None) == ()
        flexed, _ = make(case, return_lse=True)
        reasons = unmet_claims(flex.FORWARD, flexed, "cpu")
        assert reasons == (() if case in FLEX_CASES else (f"dropout={flexed.dropout}: FlexAttention on CPU has none",))
    assert flex.BACKEND.backward_claims is None and unmet_claims(flex.FORWARD, make("plain")[0], "sm90")
    assert math.probe() == flex.probe() == torch.__version__


def test_flex_refuses_a_score_matrix_over_its_limit():
    spec = replace(make("plain")[0], q_len=8192, kv_len=8192)
    selection = explain(spec, Target("torch", "cpu"), "flex")
    assert selection.backend is None
    assert selection.reasons("flex") == (
        "q_len 8192 and kv_len 8192 with batch 2 and 9 heads: FlexAttention on CPU writes out 1207959552 scores, "
        "more than MAX_SCORES (67108864)",
    )
    packed = replace(make("packed")[0], q_len=2**20, kv_len=2**20, **LONGEST)
    assert flex.refuses(packed, "cpu", None) == ()  # the longest document counts


def test_lower():
    assert math.lower(make("window")[0]) == {
        "scale": 11**-0.5,
        "softcap": None,
        "band": (2, 1, 2),
        "query_block": plain_attention.QUERY_BLOCK,
    }
    assert math.lower(make("packed, causal")[0])["band"] is None
    assert flex.lower(make("everything")[0]) == {
        "scale": 0.4,
        "enable_gqa": True,
        "score": ("softcap", "bias", "alibi"),
        "mask": ("band", "mask"),
    }
    assert flex.lower(make("equal heads")[0]) == {"scale": 11**-0.5, "enable_gqa": False, "score": (), "mask": ()}


def test_flex_reads_no_value_from_a_tensor():
    assert ".item(" not in inspect.getsource(math) and ".item(" not in inspect.getsource(flex)
