"""Tests the rewrites around a kernel that lacks widths, sinks or the gradient of the log-sum-exp, against the
reference."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
from direct_calls import assert_right, rewritten, tensors
from oracle_cases import make

from attn_core import backends
from attn_core.backends.shared import rewrites
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Gradients, Inputs

math: Any = backends.load("math")


def bare_forward(spec: AttentionSpec, inputs: Inputs, into: Any) -> tuple[Any, Any]:
    assert not spec.sinks and inputs.sinks is None and spec.head_dim % 8 == 0
    out, lse = math.forward(spec, inputs)
    if into is not None:
        into[0].copy_(out)
        return into[0], lse
    return out, lse


def bare_backward(spec: AttentionSpec, inputs: Inputs, out: Any, lse: Any, dout: Any, into: Any) -> Gradients:
    assert not spec.sinks and inputs.sinks is None and spec.head_dim % 8 == 0
    return math.backward(spec, inputs, out, lse, dout, None)


def eights(dim: int) -> int:
    return -(-dim // 8) * 8


SAME = rewrites.Kernel(bare_forward, bare_backward, eights)
APART = SAME._replace(same_width=False)
CASES = {
    "plain": {},
    "rows that see nothing": {"causal": True, "q_len": 7, "kv_len": 5},
    "window": {"window": (2, 1)},
    "packed": {"batch": 1, "q_len": 12, "kv_len": 14, "documents": 6, "causal": True, "max_len_q": 6, "max_len_k": 5},
    "alibi": {"alibi_shape": (9,), "causal": True},
    "a width it has": {"head_dim": 16, "value_dim": 16},
}


@pytest.mark.sampled
@pytest.mark.parametrize("kernel", [SAME, APART], ids=["one width", "widths apart"])
@pytest.mark.parametrize("sinks", [False, True], ids=["no sinks", "sinks"])
@pytest.mark.parametrize("with_lse", [False, True], ids=["no gradient of lse", "gradient of lse"])
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@pytest.mark.parametrize("name", CASES)
def test_rewritten_calls_match_the_reference(name: str, dtype: str, with_lse: bool, sinks: bool, kernel: Any) -> None:
    case = make({**CASES[name], "sinks": sinks, "needs_backward": True, "return_lse": with_lse}, dtype)
    assert_right(rewritten(kernel), case)


def test_a_sink_of_minus_infinity_counts_as_no_sink() -> None:
    case = make({"causal": True, "q_len": 7, "kv_len": 5, "sinks": True})
    inputs = tensors(case.inputs, "float64")._replace(sinks=torch.full((9,), -torch.inf, dtype=torch.float64))
    out, lse = rewrites.forward(SAME, case.spec, inputs)
    plain, plain_lse = math.forward(make({"causal": True, "q_len": 7, "kv_len": 5}).spec, inputs._replace(sinks=None))
    torch.testing.assert_close(out, plain)
    torch.testing.assert_close(lse, plain_lse)
    actual = rewrites.backward(SAME, case.spec, inputs, out, lse, torch.from_numpy(case.dout), None)
    assert not any(part.isnan().any() for part in (actual.dq, actual.dk, actual.dv, actual.dsinks))


def test_results_are_written_into_buffers_that_the_kernel_accepts() -> None:
    case = make({"head_dim": 8, "value_dim": 8})
    inputs = tensors(case.inputs, "float64")
    into = (torch.empty(case.spec.out_shape, dtype=torch.float64), None)
    out, _ = rewrites.forward(SAME, case.spec, inputs, into)
    assert out is into[0]
    case = make({"head_dim": 5, "value_dim": 5})
    into = (torch.full(case.spec.out_shape, 7.0, dtype=torch.float64), None)
    out, _ = rewrites.forward(SAME, case.spec, tensors(case.inputs, "float64"), into)
    assert out is not into[0] and (into[0] == 7.0).all()


def test_calls_that_cannot_be_rewritten_are_refused() -> None:
    requested = {"needs_backward": True, "return_lse": True}
    assert rewrites.refusals(make({**requested}).spec) == ()
    for more, words in (({"softcap": 5.0}, "softcap=5.0"), ({"dropout": 0.1}, "dropout=0.1")):
        (why,) = rewrites.refusals(make({**requested, **more}).spec)
        assert words in why
    assert rewrites.refusals(make({"softcap": 5.0, "needs_backward": True}).spec) == ()
