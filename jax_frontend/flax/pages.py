"""A Flax layer with its keys and values in pages of a pool."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from attn_core.backends.shared.in_jax.offsets import document_numbers
from attn_core.call.layer_shapes import check_rotary
from attn_core.errors import SpecError
from attn_core.paged.step import Pages, Step, check_paged_layer
from jax_frontend.dispatch.plan import as_array
from jax_frontend.flax.layer import LayerCall, LayerOptions, Projections
from jax_frontend.flax.refusals import check_precision
from jax_frontend.paged.append import append_kv
from jax_frontend.paged.attention import paged_attention


def attend_in_pages(
    layer: LayerOptions,
    projections: Projections,
    x: jax.Array,
    context: jax.Array | None,
    call: LayerCall,
    pages: Pages,
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Appends the keys and values of new tokens ``[tokens, features]`` to the pages, and attends to the pages."""
    if call.store is not None:
        raise SpecError("decode=True: expected False with pages, which then are the layer's cache")
    unsupported: dict[str, Any] = {
        "context": context,
        "mask": call.mask,
        "key_ranges": call.key_ranges,
        "bias": call.bias,
        "alibi_slopes": call.alibi_slopes,
    }
    unsupported |= {"seq_info": call.seq_info, "context_axis": layer.context_axis, **call.functions, **call.segments}
    check_paged_layer(x.shape, layer.alignment, call.dropout, unsupported)
    positions = None if call.positions is None else as_array("positions", call.positions)
    check_rotary(
        rotary=layer.rotary is not None,
        cross=False,
        positions=None if positions is None else positions.shape,
        rows=(1, x.shape[0]),
    )
    q, k, v = projections.query(x), projections.key(x), projections.value(x)  # [tokens, heads, dim]
    dtype = jnp.result_type(q, k, v)
    check_precision(layer.precision, dtype)
    if layer.rotary is not None:
        positions = _sequence_positions(pages.step, x.shape[0]) if positions is None else positions
        # As one row, because rotary functions expect a batch axis.
        q, k = (rows[0].astype(dtype) for rows in layer.rotary(q[None], k[None], positions.reshape(1, -1)))
    tables = pages.step.tables
    # The pool may have another dtype than the layer computes in, and append_kv does not cast. A quantised one takes
    # float32.
    narrow = jnp.float32 if dtype == jnp.float64 else dtype
    kinds = (pages.k.dtype, pages.v.dtype) if pages.k_scales is None else (narrow, narrow)
    new_k, new_v = (rows.astype(kind) for rows, kind in zip((k, v), kinds, strict=True))
    k_pages, v_pages, *scales = append_kv(pages.k, pages.v, new_k, new_v, **tables, **pages.scales)
    updated: dict[str, Any] = dict(zip(pages.scales, scales, strict=True))
    out = paged_attention(
        q.astype(kinds[0]),
        k_pages,
        v_pages,
        **tables,
        **updated,
        max_len_q=pages.step.max_len_q,
        causal=layer.causal,
        window=layer.window,
        softcap=layer.softcap,
        scale=layer.scale,
        sinks=call.sinks,
        deterministic=layer.bitwise_deterministic,
        backend=layer.backend,
        invariant=layer.invariant,
    )
    # The output has the pool's dtype; the projection gets the layer's own.
    return projections.out(out.astype(dtype)), (k_pages, v_pages, *scales)


def _sequence_positions(step: Step, tokens: int) -> jax.Array:
    """Returns the position of each new token in its own sequence, int32 ``[tokens]``."""
    token = jnp.arange(tokens, dtype=jnp.int32)
    lengths = jnp.asarray(step.seq_lens)
    if step.cu_seqlens_q is None:
        return lengths - 1
    ends = jnp.asarray(step.cu_seqlens_q)[1:]
    # Tokens behind the last offset belong to no sequence. The minimum only keeps their index in range.
    sequence = jnp.minimum(document_numbers(ends, tokens), len(ends) - 1)
    return lengths[sequence] - (ends[sequence] - token)
