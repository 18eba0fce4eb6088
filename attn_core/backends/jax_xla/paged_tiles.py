"""Keys and values in pages for ``fixed_tiles``: gathered, then cut into tiles from each sequence's first key on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from attn_core.backends.jax_xla import fixed_tiles
from attn_core.backends.jax_xla.paged import gathered
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Inputs, PagedInputs


def forward(spec: AttentionSpec, inputs: PagedInputs) -> tuple[Any, Any]:
    """Returns (out, lse) of a paged call; traceable. Clamps page numbers, lengths and offsets.

    Each sequence becomes a packed document that has the keys of a whole row of the table; only those up to its length
    belong to it.
    """
    import jax.numpy as jnp

    paged, batch = spec.paged, spec.documents or 0
    assert paged is not None
    lengths = jnp.clip(inputs.seq_lens, 0, paged.capacity).astype(jnp.int32)
    starts = jnp.zeros_like(lengths) if inputs.kv_starts is None else jnp.clip(inputs.kv_starts, 0, lengths)
    k = gathered(paged, inputs, inputs.k, inputs.k_scales)
    v = gathered(paged, inputs, inputs.v, inputs.v_scales)
    cu_q = inputs.cu_seqlens_q
    cu_q = jnp.arange(batch + 1, dtype=jnp.int32) if cu_q is None else jnp.clip(cu_q, 0, spec.q_len).astype(jnp.int32)
    count = jnp.maximum(cu_q[1:] - cu_q[:-1], 0)
    row = jnp.arange(batch, dtype=jnp.int32)
    keys = lengths - starts
    documents = fixed_tiles.Document(jnp.zeros_like(row), cu_q[:-1], count, row, starts, keys, keys - count)
    dtype = str(k.dtype)
    packed = replace(spec, paged=None, kv_len=paged.capacity, dtype=dtype, max_len_k=paged.capacity)
    dense = Inputs(inputs.q.astype(dtype), k, v, alibi_slopes=inputs.alibi_slopes, sinks=inputs.sinks)
    out, lse = fixed_tiles.forward(packed, dense, documents)
    return out.astype(spec.dtype), lse
