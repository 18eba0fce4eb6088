"""Tests the calls in the hosts' own documents, with our imports in place of theirs, on the CPU and a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
import torch.nn.functional as F
from torch import nn

from attn_core import NoBackendError
from torch_frontend.finetrainers import AttentionProvider, attention_dispatch, attention_provider
from torch_frontend.unsloth import (
    AttentionConfig,
    AttentionContext,
    build_sdpa_packed_attention_mask,
    create_flex_attention_causal_mask,
    create_flex_attention_sliding_window_mask,
    get_packed_info_from_kwargs,
    mask_packed_sequence_boundaries,
    run_attention,
    select_attention_backend,
    slow_attention_softcapping,
    slow_inference_attention_softcapping,
)

TORCH_ATTENTION = torch._C._nn.scaled_dot_product_attention
BSZ, N_HEADS, N_KV_HEADS, LENGTH, HEAD_DIM = 2, 8, 4, 12, 16


def heads(device: str, bsz: int = BSZ) -> tuple[Any, ...]:
    """Q, K, V in the hosts' layout, ``[bsz, heads, length, head_dim]``; in half precision on a GPU."""
    torch.manual_seed(0)
    shapes = ((bsz, count, LENGTH, HEAD_DIM) for count in (N_HEADS, N_KV_HEADS, N_KV_HEADS))
    return tuple(
        torch.randn(shape).to(device, torch.float32 if device == "cpu" else torch.bfloat16) for shape in shapes
    )


def close(actual: torch.Tensor, right: torch.Tensor) -> None:
    loose = 2e-5 if actual.dtype == torch.float32 else 3e-2
    torch.testing.assert_close(actual.float(), right.float(), atol=loose, rtol=loose)


# Unsloth


def test_basic_attention_dispatch(device: str) -> None:
    Q, K, V = heads(device)
    backend = select_attention_backend(use_varlen=False)
    config = AttentionConfig(backend=backend, n_kv_heads=N_KV_HEADS, n_groups=N_HEADS // N_KV_HEADS)
    context = AttentionContext(
        bsz=BSZ,
        q_len=LENGTH,
        kv_seq_len=LENGTH,
        n_heads=N_HEADS,
        head_dim=HEAD_DIM,
        requires_grad=False,
        seq_info=None,
        attention_mask=None,
        causal_mask=None,
    )
    output = run_attention(config=config, context=context, Q=Q, K=K, V=V)
    assert output.shape == (BSZ, LENGTH, N_HEADS, HEAD_DIM)
    close(output.transpose(1, 2), TORCH_ATTENTION(Q, K, V, is_causal=True, enable_gqa=True))


@pytest.mark.parametrize("window", [None, 3])
def test_packed_sequences(device: str, window: int | None) -> None:
    Q, K, V = heads(device, bsz=1)
    seq_info = get_packed_info_from_kwargs({"packed_seq_lengths": [5, 4, 3]}, Q.device)
    config = AttentionConfig(
        backend=select_attention_backend(use_varlen=seq_info is not None),
        n_kv_heads=N_KV_HEADS,
        n_groups=N_HEADS // N_KV_HEADS,
        flash_varlen_kwargs={"causal": True, "softmax_scale": 0.3},
    )
    context = AttentionContext(1, LENGTH, LENGTH, N_HEADS, HEAD_DIM, True, seq_info, None, None, sliding_window=window)
    output = run_attention(config=config, context=context, Q=Q, K=K, V=V)
    mask = build_sdpa_packed_attention_mask(seq_info, dtype=Q.dtype, device=Q.device, sliding_window=window)
    close(output.transpose(1, 2), TORCH_ATTENTION(Q, K, V, attn_mask=mask, scale=0.3, enable_gqa=True))


def test_labels_of_packed_rows(device: str) -> None:
    shift_labels = torch.arange(LENGTH, device=device)[None]
    assert mask_packed_sequence_boundaries(shift_labels, torch.tensor([5, 4, 3], device=device))
    assert (shift_labels == -100).nonzero()[:, 1].tolist() == [4, 8, 11]


def softcapped(Q: torch.Tensor, K: torch.Tensor, V: torch.Tensor, window: int, config: Any) -> torch.Tensor:
    """The formula of Gemma 2, in float32."""
    Q, K, V = (tensor.float() for tensor in (Q, K, V))
    K, V = (tensor.repeat_interleave(N_HEADS // N_KV_HEADS, dim=1) for tensor in (K, V))
    cap = config.attn_logit_softcapping
    scores = cap * torch.tanh(Q @ K.mT * config.query_pre_attn_scalar**-0.5 / cap)
    distance = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    hidden = ((distance < 0) | (distance >= window)).to(Q.device)
    return (scores.masked_fill(hidden, -torch.inf).softmax(-1) @ V).transpose(1, 2).flatten(2)


def test_block_masks_and_softcapped_attention(device: str) -> None:
    """``self`` is the layer; a mask is built once, for the longest row."""
    Q, K, V = heads(device)
    self = SimpleNamespace(config=SimpleNamespace(query_pre_attn_scalar=24, attn_logit_softcapping=2.0))
    causal_mask = create_flex_attention_causal_mask(max_seq_length=8192)
    sliding_mask = create_flex_attention_sliding_window_mask(max_seq_length=8192, sliding_window=4)
    for mask, window in ((causal_mask, LENGTH), (sliding_mask, 4)):
        right = softcapped(Q, K, V, window, self.config)
        A = slow_attention_softcapping(Q, K, V, mask, self, BSZ, LENGTH)
        assert A.shape == (BSZ, LENGTH, N_HEADS * HEAD_DIM)
        close(A, right)
        close(slow_inference_attention_softcapping(Q, K, V, mask, self, BSZ, LENGTH), right)


# Finetrainers


class Model(nn.Module):
    """Masked self-attention as in diffusion models: by torch's function, with a mask of keys."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(N_HEADS * HEAD_DIM, 3 * N_HEADS * HEAD_DIM)

    def forward(self, x: torch.Tensor, keep: torch.Tensor | None = None) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, N_HEADS, HEAD_DIM)).permute(2, 0, 3, 1, 4)  # [3, bsz, heads, len, dim]
        mask = None if keep is None else keep[:, None, None, :]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=0.0, is_causal=False)


@pytest.fixture
def replaced_globally() -> Iterator[None]:
    original = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = attention_dispatch
    yield
    F.scaled_dot_product_attention = original


def model_of(device: str) -> tuple[Model, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    keep = torch.ones(BSZ, LENGTH, dtype=torch.bool)
    keep[0, :5] = False
    x = torch.randn(BSZ, LENGTH, N_HEADS * HEAD_DIM)
    return Model().to(device, dtype), x.to(device, dtype), keep.to(device)


@pytest.mark.parametrize("masked", [False, True])
def test_a_model_under_flash_varlen(device: str, masked: bool, replaced_globally: None) -> None:
    model, x, keep = model_of(device)
    given = (x, keep) if masked else (x,)
    right = model(*given)
    with attention_provider(AttentionProvider.FLASH_VARLEN):
        actual = model(*given)
    close(actual, right)
    with attention_provider("flash_varlen"):
        assert torch.equal(model(*given), actual)


def test_a_model_under_sage_varlen_without_its_kernel_is_refused(replaced_globally: None) -> None:
    """The other provider of the example: without its kernel the error lists every reason, and no other kernel runs."""
    model, x, keep = model_of("cpu")
    with pytest.raises(NoBackendError, match=r"backend='sage' cannot run this call"), attention_provider("sage_varlen"):
        model(x, keep)


def test_the_context_parallel_example_needs_a_mesh_of_torch() -> None:
    """``test_context_torch_ranks`` runs it on ranks. Anything else is not ignored silently."""
    with (
        pytest.raises(TypeError, match=r"mesh: expected a torch DeviceMesh, got types\.SimpleNamespace"),
        attention_provider("_native_flash", mesh=SimpleNamespace(), convert_to_fp32=True, rotate_method="alltoall"),
    ):
        pytest.fail("the block ran")
