"""Tests the math and flex backends against the float64 reference: every feature and dtype, gradients, NaN, and
memory."""

from __future__ import annotations

import inspect
import itertools

import callers_view
import numpy as np
import pytest

from attn_core import AttentionSpec, SpecError, Target, explain
from attn_core.backends.flex import cpu as flex
from attn_core.backends.math import backend as math
from attn_core.backends.shared.claims import unmet_claims
from attn_core.backends.shared.parts import row_blocks
from attn_core.backends.shared.plain import attention as plain_attention
from attn_core.backends.shared.plain import contained_sums
from attn_core.call.tensors import Inputs
from attn_core.correctness import reference

torch = pytest.importorskip("torch")
from torch.utils._python_dispatch import TorchDispatchMode

pytestmark = pytest.mark.sampled

DENSE = {"batch": 2, "q_len": 19, "kv_len": 23, "num_heads": 6, "num_kv_heads": 2, "head_dim": 5, "value_dim": 3}
# one document without queries, one without keys, and an empty one at the end
LENGTHS_Q, LENGTHS_K = (3, 0, 11, 5, 0), (7, 2, 5, 0, 3)
PACKED = {**DENSE, "batch": 1, "q_len": 19, "kv_len": 17, "documents": 5, "max_len_q": 11, "max_len_k": 7}
FULL = (2, 6, 19, 23)

CASES = {
    "plain": {},
    "equal_heads": {"num_kv_heads": 6},
    "one_kv_head": {"num_kv_heads": 1},
    "decode": {"q_len": 1, "causal": True},
    "one_key": {"kv_len": 1},
    "scale": {"scale": 0.37},
    "causal_bottom_right": {"causal": True},
    "causal_top_left": {"causal": True, "alignment": "top_left"},
    "causal_empty_rows": {"causal": True, "q_len": 29},
    "window": {"window": (3, 2)},
    "window_left": {"window": (4, None), "causal": True},
    "window_right": {"window": (None, 1), "alignment": "top_left"},
    "window_empty_rows": {"window": (2, 1), "q_len": 31, "alignment": "top_left"},
    "softcap": {"softcap": 0.7},
    "mask": {"mask_shape": FULL},
    "mask_keys": {"mask_shape": (2, 1, 1, 23), "causal": True},
    "mask_rows": {"mask_shape": (1, 6, 19, 1)},
    "bias": {"bias_shape": FULL, "softcap": 1.3},
    "bias_heads": {"bias_shape": (1, 6, 1, 23)},
    "bias_shared": {"bias_shape": (1, 1, 19, 23), "causal": True},
    "bias_rows": {"bias_shape": (2, 1, 19, 1)},
    "alibi": {"alibi_shape": (6,), "causal": True},
    "alibi_batch": {"alibi_shape": (2, 6), "alignment": "top_left"},
    "sinks": {"sinks": True},
    "sinks_empty_rows": {"sinks": True, "causal": True, "q_len": 29},
    "dropout": {"dropout": 0.3, "causal": True},
    "everything": {
        **{
            "causal": True,
            "window": (9, 4),
            "softcap": 2.0,
            "mask_shape": (2, 1, 19, 23),
            "bias_shape": (1, 6, 19, 23),
        },
        **{"alibi_shape": (6,), "sinks": True, "dropout": 0.2, "scale": 0.4},
    },
    "everything_but_dropout": {
        **{"causal": True, "window": (9, 4), "softcap": 2.0, "mask_shape": (1, 6, 19, 23), "scale": 0.4},
        **{"bias_shape": (2, 1, 19, 23), "alibi_shape": (2, 6), "sinks": True},
    },
    "packed": PACKED,
    "packed_causal": {**PACKED, "causal": True},
    "packed_top_left": {**PACKED, "causal": True, "alignment": "top_left"},
    "packed_window": {**PACKED, "window": (2, 1)},
    "packed_everything": {
        **{**PACKED, "causal": True, "window": (4, 0), "softcap": 2.0, "mask_shape": (1, 6, 19, 17)},
        **{"bias_shape": (1, 1, 19, 17), "alibi_shape": (6,), "sinks": True, "dropout": 0.2},
    },
    "packed_alibi_rows": {**PACKED, "alibi_shape": (1, 6), "bias_shape": (1, 6, 19, 1), "mask_shape": (1, 1, 1, 17)},
}
FLEX_IN_EVERY_DTYPE = ("plain", "sinks_empty_rows", "everything_but_dropout", "packed_window")
FLEX_CASES = [name for name, case in CASES.items() if "dropout" not in case]
# relative error of one stored number
ROUNDING = {"float64": 0.0, "float32": 2.0**-23, "bfloat16": 2.0**-8, "float16": 2.0**-10}
# absolute error of sums in the accumulation dtype
NOISE = {"float64": 1e-12, "float32": 4e-6, "bfloat16": 4e-6, "float16": 4e-6}


def make(case: str, dtype: str = "float32", **changes) -> tuple[AttentionSpec, Inputs]:
    """A spec and inputs for it. LENGTHS_Q and LENGTHS_K give the packed offsets."""
    spec = AttentionSpec(**{**DENSE, **CASES[case], "dtype": dtype, **changes})
    generator = torch.Generator().manual_seed(sum(map(ord, case)))
    kind = getattr(torch, dtype)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(kind)

    lead = () if spec.packed else (spec.batch,)
    offsets = [torch.tensor([0, *itertools.accumulate(lengths)]).int() for lengths in (LENGTHS_Q, LENGTHS_K)]
    return spec, Inputs(
        q=normal(*lead, spec.q_len, spec.num_heads, spec.head_dim),
        k=normal(*lead, spec.kv_len, spec.num_kv_heads, spec.head_dim),
        v=normal(*lead, spec.kv_len, spec.num_kv_heads, spec.value_dim),
        mask=torch.rand(spec.mask_shape, generator=generator) > 0.4 if spec.mask_shape else None,
        bias=normal(*spec.bias_shape) if spec.bias_shape else None,
        alibi_slopes=normal(*spec.alibi_shape).abs() if spec.alibi_shape else None,
        sinks=normal(spec.num_heads) if spec.sinks else None,
        cu_seqlens_q=offsets[0] if spec.packed else None,
        cu_seqlens_k=offsets[1] if spec.packed else None,
        rng=torch.tensor([-5, 2**40 + 11]) if spec.dropout else None,
    )


def arrays(values):
    """Converts tensors to numpy: floats to float64, bool and int unchanged, None to None."""
    return type(values)(
        *(t if t is None else (t.double() if t.is_floating_point() else t).detach().numpy() for t in values)
    )


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
    """Runs every call in blocks of 7 rows, also the ones that would run in one piece."""
    monkeypatch.setattr(plain_attention, "QUERY_BLOCK", 7)
    monkeypatch.setattr(plain_attention, "has_few_scores", lambda spec: False)


@pytest.fixture(params=["documents", "tokens"])
def offsets_on_host_or_device(request, monkeypatch):
    """Runs packed documents both ways: with offsets read on the host, and with offsets left on the device."""
    if request.param == "tokens":
        monkeypatch.setattr(row_blocks, "_host_blocks", lambda *call: row_blocks._token_blocks(*call[:3]))
        monkeypatch.setattr(contained_sums, "_harmless", lambda values, hidden: hidden is None)
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
    spec, inputs = make(case, dtype, needs_backward=True, bias_gradient="bias_shape" in CASES[case])
    check_math(spec, inputs, with_dlse=case not in ("plain", "packed"))


@pytest.mark.parametrize("case", [name for name in CASES if name.startswith("packed")])
def test_math_runs_packed_documents_without_reading_the_offsets(case, small_blocks, offsets_on_host_or_device):
    check_math(*make(case, needs_backward=True, bias_gradient="bias_shape" in CASES[case]))


def test_math_reads_no_value_from_a_device(small_blocks):
    spec, inputs = make("packed_everything", needs_backward=True, bias_gradient=True)
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
    spec, inputs = make("bias_shared", "float64", needs_backward=True, bias_gradient=True, sinks=True)
    bias = inputs.bias.masked_fill(torch.rand(inputs.bias.shape) > 0.5, -torch.inf)
    bias[:, :, 4] = -torch.inf  # the bias alone empties this row
    inputs = inputs._replace(bias=bias, sinks=torch.randn(6).double())
    out, lse = math.forward(spec, inputs)
    assert (lse[:, :, 4] == -torch.inf).all() and not out[:, 4].any()
    check_math(spec, inputs)


def test_empty_rows_pass_no_gradient_even_if_dlse_is_infinite(small_blocks):
    spec, inputs = make("sinks_empty_rows", needs_backward=True)
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
    spec, inputs = make("packed_causal", needs_backward=True)
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
    spec, inputs = make("mask_keys", needs_backward=True, softcap=softcap)
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
    spec, inputs = make("everything_but_dropout", needs_backward=True, bias_gradient=True)
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
    spec, inputs = make("everything_but_dropout", needs_backward=True, bias_gradient=True)
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


class LargestOutput(TorchDispatchMode):
    """Records the most elements of any operation's output."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        outputs = result if isinstance(result, (tuple, list)) else (result,)
        sizes = [out.numel() for out in outputs if isinstance(out, torch.Tensor)]
        self.elements = max([self.elements, *sizes])
        return result


def test_math_memory_grows_with_one_block_of_queries():
    length = 8192
    spec = AttentionSpec(
        **{**DENSE, "batch": 1, "q_len": length, "kv_len": length, "num_heads": 1, "num_kv_heads": 1},
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
    spec, inputs = make("packed_everything", "float64", needs_backward=True, bias_gradient=True)

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
    "broken", [(1, 3, 14, 19, 19, 19), (0, 11, 3, 19, 19, 19), (0, 3, 3, 14, 18, 20), (0, 0, 0, 0, 0, 19)]
)
def test_wrong_offsets_on_the_host_are_refused(backend, broken):
    spec, inputs = make("packed")
    with pytest.raises(SpecError, match=r"seq_info\.(cu_seqlens_q|max_len_q)"):
        backend.forward(spec, inputs._replace(cu_seqlens_q=torch.tensor(broken).int()))


@pytest.mark.parametrize("broken", [(5, 3, 40, -7, 19, 19), (0, 3, 3, 14, 18, 18), (0, 0, 0, 0, 0, 2**30)])
def test_wrong_offsets_on_a_device_read_nothing_outside_the_tensors(broken, monkeypatch):
    monkeypatch.setattr(row_blocks, "_host_blocks", lambda *call: row_blocks._token_blocks(*call[:3]))
    spec, inputs = make("packed_causal")
    out, lse = math.forward(spec, inputs._replace(cu_seqlens_q=torch.tensor(broken).int()))
    assert out.isfinite().all() and not lse.isnan().any()


def test_the_claims_of_both_backends():
    for case in CASES:
        spec, _ = make(case, needs_backward=True, bias_gradient="bias_shape" in CASES[case], return_lse=True)
        for device in ("cpu", "sm90"):
            assert unmet_claims(math.FORWARD, spec, device) == unmet_claims(math.BACKWARD, spec, device) == ()
        assert math.refuses(spec, "cpu", None) == ()
        flexed, _ = make(case, return_lse=True)
        reasons = unmet_claims(flex.FORWARD, flexed, "cpu")
        assert reasons == (() if case in FLEX_CASES else (f"dropout={flexed.dropout}: FlexAttention on CPU has none",))
    assert flex.BACKEND.backward_claims is None and unmet_claims(flex.FORWARD, make("plain")[0], "sm90")
    assert math.probe() == flex.probe() == torch.__version__


def test_flex_refuses_a_score_matrix_over_its_limit():
    spec, _ = make("plain", q_len=8192, kv_len=8192)
    selection = explain(spec, Target("torch", "cpu"), "flex")
    assert selection.backend is None
    assert selection.reasons("flex") == (
        "q_len 8192 and kv_len 8192 with batch 2 and 6 heads: FlexAttention on CPU writes out 805306368 scores, "
        "more than MAX_SCORES (67108864)",
    )
    packed, _ = make("packed", q_len=2**20, kv_len=2**20)
    assert flex.refuses(packed, "cpu", None) == ()  # the longest document counts


def test_lower():
    assert math.lower(make("window")[0]) == {
        "scale": 5**-0.5,
        "softcap": None,
        "band": (3, 2, 4),
        "query_block": plain_attention.QUERY_BLOCK,
    }
    assert math.lower(make("packed_causal")[0])["band"] is None
    assert flex.lower(make("everything")[0]) == {
        "scale": 0.4,
        "enable_gqa": True,
        "score": ("softcap", "bias", "alibi"),
        "mask": ("band", "mask"),
    }
    assert flex.lower(make("equal_heads")[0]) == {"scale": 5**-0.5, "enable_gqa": False, "score": (), "mask": ()}


def test_flex_reads_no_value_from_a_tensor():
    assert ".item(" not in inspect.getsource(math) and ".item(" not in inspect.getsource(flex)
