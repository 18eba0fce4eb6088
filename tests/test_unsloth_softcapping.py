"""Unsloth's softcapped attention: its formula in float64, on kernels that never hold the matrix."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from attn_core import DTypeError, ShapeError, SpecError  # noqa: E402
from torch_frontend import (  # noqa: E402
    HAS_FLEX_ATTENTION,
    create_flex_attention_causal_mask,
    create_flex_attention_sliding_window_mask,
    slow_attention_softcapping,
    slow_inference_attention_softcapping,
)

BSZ, HEADS, KV_HEADS, DIM, SCALAR, CAP = 2, 6, 3, 8, 24.0, 1.5
LAYER = SimpleNamespace(config=SimpleNamespace(query_pre_attn_scalar=SCALAR, attn_logit_softcapping=CAP))


def numbers(q_len: int, kv_len: int, dtype: Any = torch.float64) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((BSZ, HEADS, q_len, DIM), (BSZ, KV_HEADS, kv_len, DIM), (BSZ, KV_HEADS, kv_len, DIM))
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def additive(q_len: int, kv_len: int, window: int | None = None) -> Any:
    """What queries at the end of the keys see, ``[q_len, kv_len]``."""
    distance = torch.arange(kv_len - q_len, kv_len)[:, None] - torch.arange(kv_len)
    hidden = (distance < 0) | (distance >= (window or kv_len))
    return torch.zeros(q_len, kv_len, dtype=torch.float64).masked_fill(hidden, -torch.inf)


def formula(q: Any, k: Any, v: Any, mask: Any) -> Any:
    k, v = (tensor.repeat_interleave(HEADS // KV_HEADS, 1) for tensor in (k, v))
    scores = CAP * torch.tanh(q @ k.mT * SCALAR**-0.5 / CAP) + mask
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize(("q_len", "kv_len"), [(7, 7), (1, 7), (3, 7)])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("form", ["by positions", "a table of positions", "a table of the call"])
def test_values_and_gradients_are_those_of_the_formula(q_len: int, kv_len: int, window: int | None, form: str) -> None:
    given = numbers(q_len, kv_len)
    if form == "by positions":
        made = (
            create_flex_attention_sliding_window_mask(64, window) if window else create_flex_attention_causal_mask(64)
        )
    else:
        made = additive(9, 9, window) if form == "a table of positions" else additive(q_len, kv_len, window)
    out = slow_attention_softcapping(*given, made, LAYER, BSZ, q_len)
    expected = formula(*given, additive(q_len, kv_len, window))
    torch.testing.assert_close(out, expected)
    dout = torch.cos(torch.arange(out.numel(), dtype=torch.float64)).view_as(out)
    for one, other in zip(torch.autograd.grad(out, given, dout), torch.autograd.grad(expected, given, dout)):
        torch.testing.assert_close(one, other)
    with torch.no_grad():
        inference = slow_inference_attention_softcapping(*given, made, LAYER, BSZ, q_len)
    assert torch.equal(inference, slow_attention_softcapping(*(x.detach() for x in given), made, LAYER, BSZ, q_len))
    assert not slow_inference_attention_softcapping(*given, made, LAYER, BSZ, q_len).requires_grad


def test_bfloat16_is_nearer_to_the_truth_than_the_formula_in_bfloat16() -> None:
    exact = numbers(64, 64)
    half = [tensor.detach().bfloat16() for tensor in exact]
    mask = additive(64, 64)
    truth = formula(*(tensor.double() for tensor in half), mask)
    ours = slow_attention_softcapping(*half, create_flex_attention_causal_mask(64), LAYER, BSZ, 64)
    theirs = formula(*half, mask.bfloat16())
    assert ours.dtype == torch.bfloat16
    assert (ours.double() - truth).abs().mean() < (theirs.double() - truth).abs().mean()


def test_the_makers_of_masks_can_be_called() -> None:
    assert HAS_FLEX_ATTENTION
    assert create_flex_attention_causal_mask().max_seq_length == 8192
    made = create_flex_attention_sliding_window_mask()
    assert (made.max_seq_length, made.window) == (8192, 4096)
    assert create_flex_attention_causal_mask(4) == create_flex_attention_causal_mask(4)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"causal_mask": None}, SpecError, "causal_mask: expected a float tensor or a mask of create_flex"),
        ({"causal_mask": torch.ones(7, 7, dtype=torch.bool)}, DTypeError, "causal_mask: expected a float mask"),
        ({"causal_mask": torch.zeros(1, 1, 7, 7)}, ShapeError, "causal_mask: expected two axes"),
        ({"causal_mask": torch.zeros(6, 6)}, ShapeError, r"n >= kv_len = 7, or \[7, 7\], got \[6, 6\]"),
        ({"causal_mask": create_flex_attention_causal_mask(6)}, ShapeError, "made for 6 positions, got 7 keys"),
        ({"bsz": 3}, ShapeError, "Q: expected bsz=3 and q_len=7"),
        ({"q_len": 6}, ShapeError, "Q: expected bsz=2 and q_len=6"),
        ({"K": torch.zeros(2, 3, 7)}, ShapeError, "K: expected .bsz, heads, length, head_dim."),
        ({"self": SimpleNamespace()}, SpecError, "self.config.attn_logit_softcapping: expected a positive number"),
        (
            {"self": SimpleNamespace(config=SimpleNamespace(attn_logit_softcapping=1.0, query_pre_attn_scalar=0))},
            SpecError,
            "self.config.query_pre_attn_scalar: expected a positive number, got 0",
        ),
    ],
)
def test_what_does_not_fit_is_named(changes: dict[str, Any], error: type[Exception], words: str) -> None:
    q, k, v = numbers(7, 7)
    mask = create_flex_attention_causal_mask(64)
    call = {"Q": q, "K": k, "V": v, "causal_mask": mask, "self": LAYER, "bsz": BSZ, "q_len": 7, **changes}
    with pytest.raises(error, match=words):
        slow_attention_softcapping(**call)


@pytest.mark.parametrize("sizes", [(0, 4), (-1, 4), (4, 0), (4, 1.5), (True, 4)])
def test_sizes_of_masks_are_positive_ints(sizes: tuple[Any, Any]) -> None:
    with pytest.raises(SpecError, match="expected an int of 1 or more"):
        create_flex_attention_sliding_window_mask(*sizes)
