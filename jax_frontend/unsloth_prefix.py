"""Attention of rows that share a prefix, for JAX arrays (see attn_core.unsloth_prefix)."""

from __future__ import annotations

from typing import Any

import jax

from attn_core.unsloth_prefix import SharedPrefixes
from jax_frontend.attention import attention

Array = jax.Array


def attend(q: Array, k: Array, v: Array, shared: SharedPrefixes, **options: Any) -> Array:
    """``[tokens, heads, value_dim]`` of packed q, k, v: what each token sees of its own run, joined with its prefix."""
    own, own_lse = attention(q, k, v, causal=True, seq_info=shared.own, return_lse=True, **options)
    prefix, prefix_lse = attention(q, k, v, seq_info=shared.prefix, return_lse=True, **options)
    share = jax.nn.sigmoid(prefix_lse - own_lse).mT[..., None]  # [tokens, heads, 1]; 0 where no prefix is seen
    first, second = own.astype(share.dtype), prefix.astype(share.dtype)
    return (first + share * (second - first)).astype(own.dtype)
