"""The largest logit of each row in plain XLA operations: the loops of ``attention.py`` without the values."""

from __future__ import annotations

from typing import Any

from attn_core.backends.jax_xla.attention import logits_in
from attn_core.backends.jax_xla.tiles import BlockSizes, arrange, cut, cut_rows, key_blocks, rows_of, tile_at
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Inputs


def row_maximum(spec: AttentionSpec, inputs: Inputs, blocks: BlockSizes) -> Any:
    """Returns the row maxima in ``spec.lse_shape``. Traceable; never called for an empty spec."""
    import jax.numpy as jnp
    from jax import lax

    call, rows = arrange(spec, inputs, blocks), rows_of(spec, inputs.cu_seqlens_q, inputs.cu_seqlens_k)
    queries, keys = blocks

    def block(index: Any, result: Any) -> Any:
        start = jnp.minimum(index * queries, spec.q_len - queries)
        some, q = cut_rows(rows, start, queries), cut(call.q, start, queries, axis=3)

        def step(index: Any, top: Any) -> Any:
            tile = tile_at(spec, call, start, index)
            logits, _, _ = logits_in(spec, call, q, cut(call.k, tile.key, keys, axis=2), some, tile)
            return jnp.maximum(top, logits.max(-1, initial=-jnp.inf))

        top = lax.fori_loop(*key_blocks(spec, call, some, start), step, empty(q.shape[:4]))
        return lax.dynamic_update_slice_in_dim(result, top, start, axis=3)

    def empty(shape: tuple[int, ...]) -> Any:
        # Plus ``zero``, because under jax.shard_map a loop's carry must vary over the mesh axes of the inputs.
        return jnp.full(shape, -jnp.inf, spec.lse_dtype) + call.zero.astype(spec.lse_dtype)

    result = lax.fori_loop(0, -(-spec.q_len // queries), block, empty(call.q.shape[:4]))
    return result.reshape(spec.lse_shape)
