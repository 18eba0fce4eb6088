"""Attention of rows that share a prefix, for torch tensors (see attn_core.unsloth_prefix)."""

from __future__ import annotations

from typing import Any

import torch

from attn_core.unsloth_prefix import SharedPrefixes
from torch_frontend.attention import attention

Tensor = torch.Tensor


def attend(q: Tensor, k: Tensor, v: Tensor, shared: SharedPrefixes, **options: Any) -> Tensor:
    """``[tokens, heads, value_dim]`` of packed q, k, v: what each token sees of its own run, joined with its prefix."""
    own, own_lse = attention(q, k, v, causal=True, seq_info=shared.own, return_lse=True, **options)
    prefix, prefix_lse = attention(q, k, v, seq_info=shared.prefix, return_lse=True, **options)
    share = torch.sigmoid(prefix_lse - own_lse).mT[..., None]  # [tokens, heads, 1]; 0 where no prefix is seen
    return torch.lerp(own.to(share.dtype), prefix.to(share.dtype), share).to(own.dtype)


def on_host(labels: Any) -> Any:
    """Labels of tokens as a numpy array; a GPU is waited for."""
    return labels.cpu().numpy() if isinstance(labels, Tensor) else labels
