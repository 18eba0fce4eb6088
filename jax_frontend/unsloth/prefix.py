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
    """Returns ``[bsz, len, heads, value_dim]``: each token attends to its own run and to its group's shared prefix."""
    shared = shared_prefixes(request, context, np.asarray)
    out = attention(
        *(array.reshape(1, -1, *array.shape[2:]) for array in (q, k, v)),  # [1, bsz * len, heads, head_dim]
        key_ranges=shared.key_ranges,
        softcap=request.softcap,
        scale=request.scale,
        deterministic=request.deterministic,
        invariant=request.invariant,
        backend=backend,
    )
    return out.reshape(*q.shape[:2], *out.shape[2:])
