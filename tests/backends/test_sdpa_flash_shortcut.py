"""Tests the shortcut of torch's CPU flash kernel with masks: torch's own autograd, and the bits of forward and
backward."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")
import torch

from attn_core import AttentionSpec
from attn_core.backends.sdpa_flash import cpu as sdpa_flash
from attn_core.backends.sdpa_flash import cpu_kernel
from attn_core.backends.shared import aten_masks
from attn_core.call.masks import Band
from attn_core.call.tensors import Inputs
from torch_frontend import attention

SIZES: dict[str, Any] = {"batch": 2, "q_len": 11, "kv_len": 13, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
CASES: dict[str, dict[str, Any]] = {
    "mask": {"mask_shape": (2, 1, 11, 13)},
    "mask of keys": {"mask_shape": (2, 1, 1, 13)},
    "bias": {"bias_shape": (1, 4, 11, 13)},
    "bias in another dtype": {"bias_shape": (1, 4, 1, 13), "bias_dtype": "bfloat16"},
    "mask and bias": {"mask_shape": (1, 4, 11, 1), "bias_shape": (2, 1, 1, 13)},
    "window": {"causal": True, "window": (3, 0)},
    "causal with fewer queries": {"causal": True},
    "mask, bias and window": {"mask_shape": (2, 1, 1, 13), "bias_shape": (2, 1, 11, 13), "window": (4, 2)},
}


def made(case: str, dtype: torch.dtype = torch.float32, **fields: Any) -> tuple[AttentionSpec, list[Any], Any]:
    """A case's spec, its q, k, v, mask and bias, and an upstream gradient. Row 3 of a full mask sees no key."""
    torch.manual_seed(0)
    spec = AttentionSpec(**SIZES, value_dim=8, dtype=str(dtype).removeprefix("torch."), **CASES[case], **fields)
    q, k, v = (torch.randn(2, length, heads, 8, dtype=dtype) for length, heads in ((11, 4), (13, 2), (13, 2)))
    mask = None if spec.mask_shape is None else torch.rand(spec.mask_shape) > 0.4
    if mask is not None and mask.shape[2] > 1:
        mask[:, :, 3] = False
    wide = torch.bfloat16 if spec.bias_dtype == "bfloat16" else dtype
    bias = None if spec.bias_shape is None else torch.randn(spec.bias_shape, dtype=wide)
    return spec, [q, k, v, mask, bias], torch.randn(2, 11, 4, 8, dtype=dtype)


def arguments(spec: AttentionSpec, tensors: list[Any]) -> list[Any]:
    return tensors if spec.mask_shape or spec.bias_shape else tensors[:3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_the_shortcut_gives_the_bits_of_forward_and_backward(case: str, dtype: torch.dtype) -> None:
    if dtype == torch.bfloat16 and "bias_dtype" in CASES[case]:
        pytest.skip("the bias has the call's own dtype")
    spec, tensors, dout = made(case, dtype, needs_backward=True)
    out, lse = sdpa_flash.forward(spec, Inputs(*tensors))
    gradients = sdpa_flash.backward(spec, Inputs(*tensors), out, lse, dout, None)
    for tensor in tensors[:3]:
        tensor.requires_grad_()
    run = sdpa_flash.shortcut(spec)
    assert run is not None
    results = run(*arguments(spec, tensors))
    assert results is not None
    assert torch.equal(results[0], out)
    for actual, expected in zip(torch.autograd.grad(results[0], tensors[:3], dout), gradients[:3], strict=True):
        assert torch.equal(actual, expected)
    if spec.mask_shape and spec.mask_shape[2] > 1:
        assert not torch.autograd.grad(run(*arguments(spec, tensors))[0], tensors[0], dout)[0][:, 3].any()


@pytest.mark.parametrize("case", CASES)
def test_the_log_sum_exp_is_that_of_forward(case: str) -> None:
    spec, tensors, _ = made(case, return_lse=True)
    run = sdpa_flash.shortcut(spec)
    assert run is not None
    for actual, expected in zip(
        run(*arguments(spec, tensors)), sdpa_flash.forward(spec, Inputs(*tensors)), strict=True
    ):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("at", [1, 2])
def test_the_shortcut_leaves_keys_with_nan_to_forward_and_backward(at: int, value: float) -> None:
    spec, tensors, _ = made("mask")
    tensors[at][1, 3] = value
    run = sdpa_flash.shortcut(spec)
    assert run is not None and run(*tensors) is None


def test_calls_of_several_kernels_have_no_shortcut() -> None:
    spec, *_ = made("window")
    long = AttentionSpec(**{**SIZES, "q_len": 300, "kv_len": 300}, value_dim=8, dtype="float32", window=(9, 0))
    assert sdpa_flash.shortcut(spec) is not None
    assert len(cpu_kernel.blocks(long)) > 1
    assert sdpa_flash.shortcut(long) is None


@pytest.mark.parametrize("case", CASES)
def test_a_second_derivative_raises(case: str) -> None:
    spec, (q, k, v, mask, bias), _ = made(case)
    q.requires_grad_()
    options = {"causal": spec.causal, "window": spec.window, "backend": "sdpa_flash"}
    (dq,) = torch.autograd.grad(attention(q, k, v, mask=mask, bias=bias, **options).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="derivative"):
        torch.autograd.grad(dq.sum(), q)


@pytest.mark.parametrize("name", ["q", "mask", "bias"])
def test_a_change_in_place_before_the_backward_is_an_error_or_has_no_effect(name: str) -> None:
    _, (q, k, v, mask, bias), dout = made("mask and bias")
    q.requires_grad_()
    before = attention(q, k, v, mask=mask, bias=bias, backend="sdpa_flash")
    (expected,) = torch.autograd.grad(before, q, dout, retain_graph=True)
    with torch.no_grad():
        changed = {"q": q, "mask": mask, "bias": bias}[name]
        changed.copy_(~changed if name == "mask" else changed + 1)
    try:
        (actual,) = torch.autograd.grad(before, q, dout)
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
    else:
        assert torch.equal(actual, expected)


def test_cached_masks_of_inference_mode_serve_training() -> None:
    _, (q, k, v, *_), dout = made("window")
    options: dict[str, Any] = {"window": (5, 1), "backend": "sdpa_flash"}
    with torch.inference_mode():
        expected = attention(q, k, v, **options)
    q.requires_grad_()
    out = attention(q, k, v, **options)
    assert torch.equal(out.detach(), expected.clone())
    assert torch.autograd.grad(out, q, dout)[0].isfinite().all()


def _functionalised(call: Any) -> None:
    torch.func.functionalize(lambda x: (call(), x + 1)[1])(torch.ones(1))


def _under_the_dispatch_key(call: Any) -> None:
    torch._enable_functionalization(reapply_views=True)  # type: ignore[no-untyped-call]
    try:
        call()
    finally:
        torch._disable_functionalization()


@pytest.mark.parametrize("run", [_functionalised, _under_the_dispatch_key])
def test_no_functional_tensor_is_kept_for_later_calls(run: Any) -> None:
    """A later call would store it into a plain tensor, which torch refuses."""
    rows = slice(0, 5)
    edge = Band(None, 0, 3)
    for cache in (cpu_kernel._cached_band, cpu_kernel._cached_distance, cpu_kernel._cached_constants):
        cache.cache_clear()

    mask = torch.ones(1, 1, 5, 5, dtype=torch.bool)
    aten_masks.keep_additive(mask)

    def tables() -> Any:
        slopes = torch.ones(1, 2, 1, 1)
        band = cpu_kernel.additive("float32", slopes.device, None, None, edge, rows, rows)
        of_mask = cpu_kernel.additive("float32", slopes.device, mask, None, None, rows, rows)
        return band, of_mask, cpu_kernel.with_alibi("float32", band, slopes, 3, rows, rows)

    made = []
    run(lambda: made.append(tables()))
    assert all(map(torch._is_functional_tensor, made[0]))  # so the case is one
    assert not any(map(torch._is_functional_tensor, tables()))
