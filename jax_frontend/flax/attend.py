"""What a Flax layer does between its projections: rotates, reads and writes its cache, and attends."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from attn_core.backends.shared.in_jax.offsets import document_numbers
from attn_core.call.layer_shapes import check_layer_inputs, check_rotary
from attn_core.call.segments import rotary_positions
from attn_core.call.seq_info import SeqInfo
from attn_core.errors import SpecError
from attn_core.paged.step import Pages, Step, check_paged_layer
from jax_frontend.context_parallel import layers as context_layers
from jax_frontend.dispatch.plan import as_array
from jax_frontend.flax.batch_axes import batch_axes, fold_tables
from jax_frontend.flax.decode import attend_in_cache, check_decode, check_room
from jax_frontend.flax.layer import LayerCall, LayerOptions, Projections, attend_to_heads, token_positions
from jax_frontend.flax.refusals import check_precision
from jax_frontend.paged.append import append_kv
from jax_frontend.paged.attention import paged_attention


def attend(
    layer: LayerOptions, projections: Projections, x: jax.Array, context: jax.Array | None, call: LayerCall
) -> Any:
    """Projects x to q, k and v, rotates q and k, computes attention, and projects the output.

    Args:
        x: ``[batch..., seq, features]``; with seq_info ``[tokens, features]`` or ``[1, tokens, features]``.
        context: the source of keys and values, laid out as x; None for self-attention.

    Returns:
        An array with the rank of x and the features of ``projections.out``; with pages ``(out, (k, v))``, where k and
        v are the updated pool.
    """
    check_precision(layer.precision, None)
    if call.pages is not None:
        return attend_in_pages(layer, projections, x, context, call, call.pages)
    if call.store is not None:
        check_decode(layer, context, call)
    seq_info = SeqInfo.coerce(call.seq_info)
    batch, call = _folded(x, context, call._replace(seq_info=seq_info))
    queries = _as_rows(x)
    positions = rotary_positions(call.positions, call.segments, rotary=layer.rotary is not None)
    positions = None if positions is None else as_array("positions", positions)
    check_rotary(
        rotary=layer.rotary is not None,
        cross=context is not None,
        positions=None if positions is None else positions.shape,
        rows=(queries.shape[0], queries.shape[1]),
    )
    keys = queries if context is None else _as_rows(context)
    q, k, v = projections.query(queries), projections.key(keys), projections.value(keys)
    dtype = jnp.result_type(q, k, v)  # rotary may return float32; all three go back to one dtype
    check_precision(layer.precision, dtype)
    cache = None
    if call.store is not None:
        cache = call.store.read(*(jax.ShapeDtypeStruct((*batch, *heads.shape[1:]), heads.dtype) for heads in (k, v)))
    if cache is not None:
        check_room(cache, batch, k, v)
    if layer.rotary is not None:
        if positions is None:
            positions = _positions(layer, call, q.shape[1], None if cache is None else cache.cache_index)
        q, k = layer.rotary(q, k, token_positions(positions, seq_info, *q.shape[:2]))
    q, k, v = (heads.astype(dtype) for heads in (q, k, v))
    if cache is None or call.store is None:
        heads = attend_to_heads(layer, q, k, v, call)
    else:
        heads, extended = attend_in_cache(layer, q, k, v, call, cache)
        call.store.write(extended)  # after the attention, so that a refused call leaves the cache as it was
    out = projections.out(heads)
    return out.reshape(*x.shape[:-1], out.shape[-1])


def _folded(x: jax.Array, context: jax.Array | None, call: LayerCall) -> tuple[tuple[int, ...], LayerCall]:
    """Returns the batch axes of x, and the call with tables of one batch axis."""
    shapes = x.shape, None if context is None else context.shape
    if call.seq_info is not None:
        check_layer_inputs(*shapes, packed=True)
        return x.shape[:-2], call
    batch = batch_axes(*shapes)
    return batch, fold_tables(call, batch, x.shape[-2])


def _as_rows(x: jax.Array) -> jax.Array:
    """Returns ``[batch..., seq, features]`` as ``[rows, seq, features]``."""
    return x if x.ndim == 3 else jnp.reshape(x, (math.prod(x.shape[:-2]), *x.shape[-2:]))


def _positions(layer: LayerOptions, call: LayerCall, seq: int, index: jax.Array | None) -> jax.Array | None:
    """Returns the positions of tokens that do not count from 0: of a shard and behind a cache; else None."""
    if index is not None:
        return index + jnp.arange(seq, dtype=index.dtype)
    # The places of a shard are not consecutive positions, so they cannot be counted from 0.
    if context_layers.is_context_parallel(layer):
        return context_layers.position_ids(layer, call.seq_info, seq)
    return None


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
