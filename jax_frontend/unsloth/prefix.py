"""Computes attention of rows that share a prefix, for JAX arrays (see attn_core.dropins.unsloth.prefix)."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from attn_core.dropins.unsloth.arguments import AttentionContext
from attn_core.dropins.unsloth.prefix import shared_prefixes
from attn_core.dropins.unsloth.request import UnslothRequest
from jax_frontend.attention import attention

Array = jax.Array


def attend(q: Array, k: Array, v: Array, request: UnslothRequest, context: AttentionContext, backend: Any) -> Array:
    """Returns ``[bsz, len, heads, value_dim]``: each token's attention to its own run, merged with its prefix."""
    shared = shared_prefixes(request, context, np.asarray)
    rows = [array.reshape(-1, *array.shape[2:]) for array in (q, k, v)]  # [bsz * len, heads, head_dim]
    options: dict[str, Any] = {"softcap": request.softcap, "scale": request.scale}
    options |= {"deterministic": request.deterministic, "backend": backend, "return_lse": True}
    own, own_lse = attention(*rows, causal=True, seq_info=shared.own, **options)
    prefix, prefix_lse = attention(*rows, seq_info=shared.prefix, **options)
    # Two softmaxes merge with the weights exp(lse) / sum of both, which is a sigmoid of the difference.
    share = jax.nn.sigmoid(prefix_lse - own_lse).mT[..., None]  # [bsz * len, heads, 1]; 0 where no prefix is seen
    first, second = own.astype(share.dtype), prefix.astype(share.dtype)
    joined = (first + share * (second - first)).astype(own.dtype)
    return joined.reshape(*q.shape[:2], *joined.shape[1:])
