"""Tests calls of few scores in one piece: beside the float64 reference, with NaN in hidden keys, and their limits."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from direct_calls import assert_right, judged, ran, tensors
from oracle_cases import make

from attn_core import AttentionSpec
from attn_core.backends import math
from attn_core.backends.shared.plain import attention as plain_attention

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "equal heads": {"num_kv_heads": 9},
    "one kv head": {"num_kv_heads": 1},
    "one query": {"q_len": 1, "causal": True},
    "one key": {"kv_len": 1},
    "causal": {"causal": True},
    "causal top_left": {"causal": True, "alignment": "top_left", "kv_len": 5},
    "window": {"window": (2, 1)},
    "window to the right": {"window": (None, 1)},
    "softcap": {"softcap": 0.9},
    "softcap, causal window": {"softcap": 1.5, "causal": True, "window": (3, 0)},
    "large softcap": {"scale": 0.7, "softcap": 200.0},
}


IN_ONE_PIECE = SimpleNamespace(forward=lambda spec, inputs: plain_attention.results_of_few(spec, inputs, False)[:2])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("case", CASES)
def test_one_piece_matches_the_reference(case: str, dtype: str) -> None:
    example = make(CASES[case], dtype)
    assert plain_attention.has_few_scores(example.spec)
    assert assert_right(IN_ONE_PIECE, example).out.is_contiguous()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES)
def test_one_piece_agrees_with_blocks(case: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """To rounding, because on some processors a matrix product has other bits if its operands have other strides."""
    example = make(CASES[case], dtype)
    inputs = tensors(example.inputs, dtype)
    out, lse, _ = plain_attention.results_of_few(example.spec, inputs, False)
    monkeypatch.setattr(plain_attention, "has_few_scores", lambda spec: False)
    expected, expected_lse = plain_attention.forward(example.spec, inputs)
    step = torch.finfo(out.dtype).eps
    torch.testing.assert_close(out, expected, rtol=4 * step, atol=4 * step * float(expected.abs().max()))
    torch.testing.assert_close(lse, expected_lse, rtol=4 * 2**-23, atol=4 * 2**-23 * float(expected_lse.abs().max()))


@pytest.mark.parametrize("fault", ["window", "softcap", "scale"])
def test_the_comparison_finds_planted_faults(fault: str) -> None:
    example = make({"softcap": 1.5, "causal": True, "window": (3, 0)}, "float32")
    wrong = {"window": (2, 0), "softcap": 1.6, "scale": 1.01 * example.spec.scale}[fault]
    wrongly = example._replace(spec=replace(example.spec, **{fault: wrong}))
    assert not judged(example, ran(IN_ONE_PIECE, wrongly)).ok


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_hidden_key_affects_no_row(value: float) -> None:
    example = make({"causal": True, "softcap": 2.0, "q_len": 7}, "float32")
    inputs = tensors(example.inputs, "float32")
    out, lse = math.forward(example.spec, inputs)
    for name in ("k", "v"):
        broken = getattr(inputs, name).clone()
        broken[:, -1] = value  # the last query alone sees it
        some, some_lse = math.forward(example.spec, inputs._replace(**{name: broken}))
        assert torch.equal(some[:, :-1], out[:, :-1]) and torch.equal(some_lse[:, :, :-1], lse[:, :, :-1])
        if name == "v":
            assert not some[:, -1].isfinite().any(), "a visible value that is not finite shows in the result"


@pytest.mark.parametrize(
    "fields",
    [
        {"sinks": True},
        {"dropout": 0.3},
        {"mask_shape": (2, 1, 1, 7)},
        {"bias_shape": (1, 9, 1, 7)},
        {"alibi_shape": (9,)},
        {"causal": True, "q_len": 9},
        {"causal": True, "alignment": "top_left"},  # no query sees the last keys
        {"q_len": 1024, "kv_len": 1024},
        {"q_len": 1, "causal": True, "window": (2, 0)},
        {"q_len": 70, "kv_len": 70, "window": (9, 9)},
    ],
    ids=str,
)
def test_other_calls_run_in_blocks(fields: dict[str, Any]) -> None:
    assert not plain_attention.has_few_scores(make({"q_len": 5, **fields}, "float32").spec)


def test_a_spec_of_float64_or_of_documents_runs_in_blocks() -> None:
    spec: AttentionSpec = make({}, "float32").spec
    assert plain_attention.has_few_scores(spec)
    assert not plain_attention.has_few_scores(replace(spec, dtype="float64"))
    assert not plain_attention.has_few_scores(make({"batch": 1, "documents": 6}, "float32").spec)


def test_the_backward_takes_the_results_of_one_piece() -> None:
    example = make({"causal": True, "softcap": 1.5, "needs_backward": True}, "float32")
    assert_right(math, example)


def test_the_hidden_keys_of_inference_mode_serve_training() -> None:
    plain_attention._hidden.cache_clear()
    q = torch.randn(1, 5, 2, 8, requires_grad=True)
    from torch_frontend import attention

    def call() -> Any:
        return attention(q, q, q, causal=True, softcap=3.0, backend="math")

    with torch.inference_mode():
        expected = call()
    out = call()
    out.sum().backward()
    assert torch.equal(out, expected) and q.grad is not None
