"""Tests torch's operations on devices that are neither a CPU nor a GPU of NVIDIA, and the arguments of ROCm's kernel.

A tensor on "meta" or of FakeTensorMode takes the path of its device from the plan to the last operation; only the
numbers are missing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch._subclasses.fake_tensor import FakeTensorMode

from attn_core import AttentionSpec, SeqInfo
from attn_core.backends import load
from attn_core.backends.sdpa_flash import cuda
from attn_core.call.tensors import Inputs
from torch_frontend import attention, explain, paged_attention
from torch_frontend.dispatch import offsets

CALLS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "window, softcap": {"window": (5, 2), "softcap": 3.0, "alignment": "top_left"},
    "packed": {"causal": True, "seq_info": SeqInfo.from_lengths([20, 17])},
    "functions": {"mask_mod": lambda b, h, q, k: q >= k, "score_mod": lambda score, b, h, q, k: score * 2.0},
}


def tensors(device: str, packed: bool) -> list[Any]:
    rows = () if packed else (2,)
    return [torch.empty(*rows, 37, heads, 16, device=device) for heads in (4, 2, 2)]


@pytest.mark.parametrize("name", CALLS)
def test_a_call_and_its_gradient_on_meta(name: str) -> None:
    q, k, v = (tensor.requires_grad_() for tensor in tensors("meta", "seq_info" in CALLS[name]))
    sinks = torch.empty(4, device="meta", requires_grad=True)
    assert explain(q, k, v, **CALLS[name]).backend == "math"
    out = attention(q, k, v, sinks=sinks, **CALLS[name])
    out.sum().backward()
    assert out.shape == q.shape and out.is_meta
    assert [tensor.grad.shape for tensor in (q, k, v, sinks)] == [tensor.shape for tensor in (q, k, v, sinks)]


@pytest.mark.parametrize("device", ["mps", "xpu"])
@pytest.mark.parametrize("name", CALLS)
def test_a_call_on_a_gpu_of_another_vendor(name: str, device: str) -> None:
    with FakeTensorMode():
        q, k, v = tensors(device, "seq_info" in CALLS[name])
        out = attention(q, k, v, **CALLS[name])
        assert (out.device.type, out.shape) == (device, q.shape)


def test_pages_on_meta() -> None:
    pool, tables = torch.empty(9, 16, 2, 16, device="meta"), torch.zeros(2, 4, dtype=torch.int32, device="meta")
    lengths = torch.ones(2, dtype=torch.int32, device="meta")
    q = torch.empty(2, 4, 16, device="meta")
    assert paged_attention(q, pool, pool, block_table=tables, seq_lens=lengths).shape == q.shape


# torch's flash attention on ROCm, with ops that check their arguments and compute by autograd


def _attend(q: Any, k: Any, v: Any, causal: bool, scale: float) -> Any:
    heads = (tensor.transpose(1, 2) for tensor in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(
        *heads, is_causal=causal, scale=scale, enable_gqa=True
    ).transpose(1, 2)


def _forward_op(q, k, v, cu_q, cu_k, max_q, max_k, dropout, causal, debug, *, scale, **windows):
    assert set(windows.values()) == {None}, "older builds ignore windows"
    assert q.shape[3] == k.shape[3] == v.shape[3] and q.shape[3] % 8 == 0, "AOTriton needs one width, in whole eights"
    assert cu_q is None and cu_k is None and dropout == 0.0 and debug is False
    assert (max_q, max_k) == (q.shape[1], k.shape[1]) and (not causal or max_q == max_k)
    lse = torch.full((q.shape[0], q.shape[2], max_q), 7.0)  # in a base that only the kernel knows
    seed = torch.zeros((), dtype=torch.int64)
    return _attend(q, k, v, causal, scale), lse, seed, seed, torch.empty(0)


def _backward_op(dout, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, dropout, causal, seed, offset, *, scale, **windows):
    assert set(windows.values()) == {None}
    assert (lse == 7.0).all() and seed.dtype == offset.dtype == torch.int64 and dout.shape == out.shape
    with torch.enable_grad():
        leaves = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
        return torch.autograd.grad(_attend(*leaves, causal, scale), leaves, dout)


@pytest.mark.parametrize(
    "changes",
    [{}, {"causal": True}, {"kv_len": 5, "head_dim": 13}, {"value_dim": 11, "scale": 0.3}, {"num_kv_heads": 4}],
)
def test_rocms_kernel_gets_the_arguments_that_its_source_names(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "_kernels", lambda: (_forward_op, _backward_op))
    sizes = {"q_len": 7, "kv_len": 7, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "value_dim": 16}
    spec = AttentionSpec(batch=2, **{**sizes, "dtype": "bfloat16", "needs_backward": True, **changes})
    rocm, math = load("sdpa_flash", "rocm"), load("math")
    shapes = ((spec.q_len, 4, spec.head_dim), (spec.kv_len, spec.num_kv_heads, spec.head_dim))
    shapes = (*shapes, (spec.kv_len, spec.num_kv_heads, spec.value_dim))
    generator = torch.Generator().manual_seed(1)
    inputs = Inputs(*(torch.randn(2, *shape, generator=generator) for shape in shapes))
    dout = torch.randn(spec.out_shape, generator=generator)
    out, lse = rocm.forward(spec, inputs)
    exact = replace(spec, dtype="float32")
    expected, expected_lse = math.forward(exact, inputs)
    torch.testing.assert_close(out, expected)
    gradients = rocm.backward(spec, inputs, out, lse, dout, None)
    for actual, right in zip(gradients[:3], math.backward(exact, inputs, expected, expected_lse, dout, None)[:3]):
        torch.testing.assert_close(actual, right)


def test_rocms_kernel_is_not_available_in_other_builds() -> None:
    if torch.version.hip is None:
        with pytest.raises(ImportError, match="was built without ROCm's flash attention"):
            load("sdpa_flash", "rocm").probe()


def test_offsets_on_another_device_are_completed_as_on_a_gpu() -> None:
    """Reading them would wait for the device, so nothing is checked, and every token gets a document."""
    q, k, v = tensors("meta", packed=True)
    cu = torch.empty(3, dtype=torch.int32, device="meta")
    completed, longest = offsets.complete(Inputs(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu), (9, 9))
    assert completed.cu_seqlens_q.is_meta and completed.cu_seqlens_q.shape > cu.shape and longest > (9, 9)
    assert attention(q, k, v, causal=True, seq_info=SeqInfo(cu, cu, 9, 9)).shape == q.shape
