"""What a Flax layer does between its projections: rotates, reads and writes its cache, and attends."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from attn_core.call.layer_shapes import check_layer_inputs, check_rotary
from attn_core.call.segments import rotary_positions
from attn_core.call.seq_info import SeqInfo
from jax_frontend.context_parallel import layers as context_layers
from jax_frontend.dispatch.plan import as_array
from jax_frontend.flax.batch_axes import batch_axes, fold_tables
from jax_frontend.flax.decode import attend_in_cache, check_decode, check_room
from jax_frontend.flax.layer import LayerCall, LayerOptions, Projections, attend_to_heads, token_positions
from jax_frontend.flax.pages import attend_in_pages
from jax_frontend.flax.refusals import check_precision


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
