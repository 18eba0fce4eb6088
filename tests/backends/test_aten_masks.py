"""Tests the additive tensors of torch's GPU kernels, and how little a small call does around a kernel."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

pytest.importorskip("torch")
import torch

from attn_core.backends import sdpa_cudnn as cudnn
from attn_core.backends import sdpa_efficient as efficient
from attn_core.backends.shared import aten_masks
from attn_core.call.spec import AttentionSpec
from tests.torch_frontend.test_small_call_counts import frames, operations

MASKS = (None, (1, 1, 1, 16), (2, 1, 8, 16), (2, 4, 8, 16), (2, 1, 8, 1))


def spec_of(
    mask: Any, bias: Any, dtype: str = "bfloat16", bias_dtype: str | None = None, keys: int = 16
) -> AttentionSpec:
    sizes = {"batch": 2, "q_len": 8, "kv_len": keys, "num_heads": 4, "num_kv_heads": 4, "head_dim": 16, "value_dim": 16}
    return AttentionSpec(**sizes, dtype=dtype, mask_shape=mask, bias_shape=bias, bias_dtype=bias_dtype)


def tables(spec: AttentionSpec) -> tuple[Any, Any]:
    torch.manual_seed(0)
    mask = None if spec.mask_shape is None else torch.rand(spec.mask_shape) > 0.3
    kind = getattr(torch, spec.bias_dtype or spec.dtype)
    return mask, None if spec.bias_shape is None else torch.randn(spec.bias_shape).to(kind)


def transposed(table: Any) -> Any:
    """The same values in another layout."""
    return None if table is None else table.transpose(2, 3).contiguous().transpose(2, 3)


def unaligned(table: Any) -> Any:
    """The same values at an address that is no multiple of 16 bytes."""
    return None if table is None else torch.cat([table.flatten()[:1], table.flatten()])[1:].view(table.shape)


@pytest.mark.parametrize("keys", [16, 13])
@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("dtype, bias_dtype", [("bfloat16", None), ("float32", None), ("float32", "bfloat16")])
def test_the_function_of_a_spec_equals_the_general_one(
    dtype: str, bias_dtype: str | None, aligned: bool, keys: int
) -> None:
    shapes = [shape and (*shape[:3], keys if shape[3] == 16 else 1) for shape in MASKS]
    for mask_shape, bias_shape in itertools.product(shapes, shapes):
        if mask_shape is None and bias_shape is None:
            continue
        spec = spec_of(mask_shape, bias_shape, dtype, bias_dtype if bias_shape else None, keys)
        prepared = aten_masks.additive_of(spec, dtype, aligned=aligned)
        for change in (lambda table: table, transposed, unaligned):
            mask, bias = map(change, tables(spec))
            expected = aten_masks.additive(mask, bias, getattr(torch, dtype), keys, aligned=aligned)
            actual = prepared(mask, bias)
            assert torch.equal(actual, expected)
            assert actual.dtype == expected.dtype
            assert actual.stride() == expected.stride()
            assert not actual.data_ptr() % 16


@pytest.mark.parametrize("keys, same", [(16, True), (13, False)])
def test_a_bias_that_the_kernel_can_read_is_not_copied(keys: int, same: bool) -> None:
    spec = spec_of(None, (1, 4, 8, keys), keys=keys)
    bias = tables(spec)[1]
    assert (aten_masks.additive_of(spec, "bfloat16")(None, bias) is bias) is same
    assert aten_masks.additive_of(spec, "bfloat16", aligned=False)(None, bias) is bias


COUNTS = {"plain": (4, 3), "bias": (4, 4), "mask": (6, 4)}
"""Operations and Python calls of cuDNN's shortcut without its kernel."""


@pytest.mark.parametrize("name", COUNTS)
def test_a_call_of_cudnn_stays_within_its_counts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of((2, 1, 8, 16) if name == "mask" else None, (1, 4, 8, 16) if name == "bias" else None)
    out = torch.randn(2, 4, 8, 16, dtype=torch.bfloat16)
    monkeypatch.setattr(cudnn, "forward_binding", lambda: lambda *_, **__: (out, None))
    monkeypatch.setattr(cudnn, "zero_for_empty_rows", lambda: True)
    run = cudnn.shortcut(spec)
    assert run is not None
    check_counts(run, spec, COUNTS[name])


@pytest.mark.parametrize("name, most", [("plain", (1, 3)), ("bias", (2, 5)), ("full bias", (1, 4)), ("mask", (4, 5))])
def test_a_call_of_the_efficient_kernel_stays_within_its_counts(
    name: str, most: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    biases = {"bias": (1, 4, 8, 16), "full bias": (2, 4, 8, 16)}
    spec = spec_of((2, 1, 8, 16) if name == "mask" else None, biases.get(name))
    out, lse = torch.randn(2, 8, 4, 16, dtype=torch.bfloat16), torch.randn(2, 4, 32)
    monkeypatch.setattr(efficient, "_kernels", lambda: (lambda *_, **__: (out, lse), None))
    run = efficient.shortcut(spec)
    assert run is not None
    check_counts(run, spec, most)


def check_counts(run: Any, spec: AttentionSpec, most: tuple[int, int]) -> None:
    q, k, v = (torch.randn(2, length, 4, 16, dtype=torch.bfloat16) for length in (8, 16, 16))
    mask_and_bias = tables(spec)

    def call() -> Any:
        return run(q, k, v, *mask_and_bias)

    call()
    started, entered = operations(call), frames(call)
    assert len(started) <= most[0], started
    assert entered <= most[1]
