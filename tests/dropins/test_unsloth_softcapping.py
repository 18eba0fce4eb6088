"""Tests Unsloth's softcapped attention against its formula in float64, on kernels that never hold the score matrix."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from reference_calls import reference_call

from attn_core import DTypeError, ShapeError, SpecError
from attn_core.call.tensors import Gradients
from attn_core.correctness import accuracy
from torch_frontend.unsloth import (
    HAS_FLEX_ATTENTION,
    create_flex_attention_causal_mask,
    create_flex_attention_sliding_window_mask,
    slow_attention_softcapping,
    slow_inference_attention_softcapping,
)

BSZ, HEADS, KV_HEADS, DIM, SCALAR, CAP = 2, 6, 3, 8, 24.0, 1.5
pytestmark = pytest.mark.words

LAYER = SimpleNamespace(config=SimpleNamespace(query_pre_attn_scalar=SCALAR, attn_logit_softcapping=CAP))


def numbers(q_len: int, kv_len: int, device: str, dtype: Any = torch.float64) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((BSZ, HEADS, q_len, DIM), (BSZ, KV_HEADS, kv_len, DIM), (BSZ, KV_HEADS, kv_len, DIM))
    drawn = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return [tensor.to(device, dtype).requires_grad_() for tensor in drawn]


def additive(q_len: int, kv_len: int, device: str, window: int | None = None) -> Any:
    """The additive mask of queries at the end of the keys, ``[q_len, kv_len]``."""
    distance = torch.arange(kv_len - q_len, kv_len)[:, None] - torch.arange(kv_len)
    hidden = (distance < 0) | (distance >= (window or kv_len))
    return torch.zeros(q_len, kv_len, dtype=torch.float64).masked_fill(hidden, -torch.inf).to(device)


def mask_in_form(form: str, q_len: int, kv_len: int, device: str, window: int | None) -> Any:
    """The host's mask in one of its forms."""
    if form == "a table of positions":
        return additive(9, 9, device, window)
    if form == "a table of the call":
        return additive(q_len, kv_len, device, window)
    if form == "four axes":
        return additive(q_len, kv_len, device, window).expand(BSZ, 1, -1, -1)
    if form == "four longer axes":
        return torch.nn.functional.pad(additive(q_len, kv_len, device, window), (0, 2, 0, 1))[None, None]
    return create_flex_attention_sliding_window_mask(64, window) if window else create_flex_attention_causal_mask(64)


def formula(q: Any, k: Any, v: Any, mask: Any) -> Any:
    k, v = (tensor.repeat_interleave(HEADS // KV_HEADS, 1) for tensor in (k, v))
    scores = CAP * torch.tanh(q @ k.mT * SCALAR**-0.5 / CAP) + mask
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


shapes = pytest.mark.parametrize(("q_len", "kv_len"), [(7, 7), (1, 7), (3, 7)])
windows = pytest.mark.parametrize("window", [None, 3])
FORMS = ["by positions", "a table of positions", "a table of the call", "four axes", "four longer axes"]
forms = pytest.mark.parametrize("form", FORMS)
ON_GPUS = dict(
    zip(FORMS, [(7, None, "float32"), (1, 3, "bfloat16"), (3, None, "bfloat16"), (7, 3, "bfloat16"), (3, 3, "float32")])
)
"""Queries, window and dtype of each form in a GPU's suite: each case compiles a kernel."""


@shapes
@windows
@forms
def test_values_and_gradients_match_the_formula(
    q_len: int, kv_len: int, window: int | None, form: str, device: str
) -> None:
    given, made = numbers(q_len, kv_len, device), mask_in_form(form, q_len, kv_len, device, window)
    out = slow_attention_softcapping(*given, made, LAYER, BSZ, q_len)
    expected = formula(*given, additive(q_len, kv_len, device, window))
    torch.testing.assert_close(out, expected)
    dout = torch.cos(torch.arange(out.numel(), dtype=torch.float64, device=device)).view_as(out)
    for one, other in zip(torch.autograd.grad(out, given, dout), torch.autograd.grad(expected, given, dout)):
        torch.testing.assert_close(one, other)
    with torch.no_grad():
        inference = slow_inference_attention_softcapping(*given, made, LAYER, BSZ, q_len)
    assert torch.equal(inference, slow_attention_softcapping(*(x.detach() for x in given), made, LAYER, BSZ, q_len))
    assert not slow_inference_attention_softcapping(*given, made, LAYER, BSZ, q_len).requires_grad
    # The host's Gemma 2 passes the number of keys in the place of the number of queries.
    assert torch.equal(slow_attention_softcapping(*given, made, LAYER, BSZ, kv_len), out)
    assert torch.equal(slow_inference_attention_softcapping(*given, made, LAYER, BSZ, kv_len), inference)
    assert torch.equal(slow_inference_attention_softcapping(*given, made, LAYER, BSZ, q_len=q_len), inference)


@pytest.mark.sampled
@pytest.mark.on_gpus(only=lambda form, q_len, window, dtype, **_: ON_GPUS[form] == (q_len, window, dtype))
@shapes
@windows
@forms
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_other_dtypes_are_within_the_bounds_of_an_honest_kernel(
    q_len: int, kv_len: int, window: int | None, form: str, dtype: str, device: str
) -> None:
    """The dtypes of fused kernels on a GPU."""
    given = numbers(q_len, kv_len, device, getattr(torch, dtype))
    made = mask_in_form(form, q_len, kv_len, device, window)
    made = made.to(given[0].dtype) if isinstance(made, torch.Tensor) else made
    out = slow_attention_softcapping(*given, made, LAYER, BSZ, q_len)
    dout = torch.cos(torch.arange(out.numel(), device=device)).view_as(out).to(out.dtype)
    gradients = torch.autograd.grad(out, given, dout)
    in_rows = [array(tensor.transpose(1, 2)) for tensor in (*given, *gradients)]  # [bsz, len, heads, head_dim]
    shown = {"causal": True, "window": (None, None) if window is None else (window - 1, 0)}
    fields = {"dtype": dtype, "softcap": CAP, "scale": SCALAR**-0.5, "needs_backward": True}
    spec, inputs = reference_call(*in_rows[:3], **shown, **fields)
    expected = accuracy.expect(spec, inputs, dout=array(dout).reshape(spec.out_shape))
    verdict = expected.judge(out=array(out).reshape(spec.out_shape), gradients=Gradients(*in_rows[3:]))
    assert verdict.ok, verdict


def array(tensor: Any) -> Any:
    return tensor.detach().double().cpu().numpy()


def test_bfloat16_is_more_precise_than_the_formula_in_bfloat16(device: str) -> None:
    exact = numbers(64, 64, device)
    half = [tensor.detach().bfloat16() for tensor in exact]
    mask = additive(64, 64, device)
    truth = formula(*(tensor.double() for tensor in half), mask)
    ours = slow_attention_softcapping(*half, create_flex_attention_causal_mask(64), LAYER, BSZ, 64)
    theirs = formula(*half, mask.bfloat16())
    assert ours.dtype == torch.bfloat16
    assert (ours.double() - truth).abs().mean() < (theirs.double() - truth).abs().mean()


def test_the_mask_functions_can_be_called() -> None:
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
        ({"causal_mask": torch.zeros(1, 7, 7)}, ShapeError, "causal_mask: expected two axes, .* or four"),
        ({"causal_mask": torch.zeros(1, 1, 6, 7)}, ShapeError, r"causal_mask: expected \[.., .., 7, 7\] or longer"),
        ({"causal_mask": torch.zeros(1, 1, 7, 6)}, ShapeError, r"longer, got \[1, 1, 7, 6\]"),
        ({"causal_mask": torch.zeros(6, 6)}, ShapeError, r"n >= kv_len = 7, or \[7, 7\], got \[6, 6\]"),
        ({"causal_mask": create_flex_attention_causal_mask(6)}, ShapeError, "expected at most 6 keys .*, got 7"),
        ({"bsz": 3}, ShapeError, "Q: expected bsz=3 and a length of 7"),
        ({"q_len": 6}, ShapeError, "Q: expected bsz=2 and a length of 6"),
        ({"K": torch.zeros(2, 3, 7)}, ShapeError, "K: expected .bsz, heads, length, head_dim."),
        ({"self": SimpleNamespace()}, SpecError, "self.config.attn_logit_softcapping: expected a positive number"),
        (
            {"self": SimpleNamespace(config=SimpleNamespace(attn_logit_softcapping=1.0, query_pre_attn_scalar=0))},
            SpecError,
            "self.config.query_pre_attn_scalar: expected a positive number, got 0",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_named(
    changes: dict[str, Any], error: type[Exception], words: str, device: str
) -> None:
    changes = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in changes.items()}
    q, k, v = numbers(7, 7, device)
    mask = create_flex_attention_causal_mask(64)
    call = {"Q": q, "K": k, "V": v, "causal_mask": mask, "self": LAYER, "bsz": BSZ, "q_len": 7, **changes}
    with pytest.raises(error, match=words):
        slow_attention_softcapping(**call)


@pytest.mark.parametrize("sizes", [(0, 4), (-1, 4), (4, 0), (4, 1.5), (True, 4)])
def test_sizes_of_masks_must_be_positive_ints(sizes: tuple[Any, Any]) -> None:
    with pytest.raises(SpecError, match="expected at least 1, as an int"):
        create_flex_attention_sliding_window_mask(*sizes)


def test_the_length_has_one_name() -> None:
    """Older versions of the host call ``kv_len`` of inference ``q_len``."""
    with pytest.raises(TypeError, match="unexpected keyword argument 'q_len'"):
        slow_inference_attention_softcapping(*[None] * 6, kv_len=5, q_len=5)
    with pytest.raises(TypeError, match="multiple values for argument 'kv_len'"):
        slow_inference_attention_softcapping(*[None] * 6, 5, q_len=5)
