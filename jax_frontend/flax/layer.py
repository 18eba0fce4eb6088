"""The code that the linen and the NNX attention layers share: everything between their projections."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from attn_core.backends.shared.jax_offsets import document_numbers
from attn_core.call.functions import refuse_over_ranks
from attn_core.call.layer_shapes import check_layer_inputs, check_rotary
from attn_core.call.seq_info import SeqInfo
from attn_core.call.spec import DTYPES
from attn_core.errors import DTypeError, ShapeError
from attn_core.paged.step import Pages, Step, check_paged_layer
from jax_frontend.attention import attention
from jax_frontend.context_parallel import layers as context_layers
from jax_frontend.dispatch.plan import as_array, check_array
from jax_frontend.paged.append import append_kv
from jax_frontend.paged.attention import paged_attention

Rotary = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]


class LayerOptions(Protocol):
    """The options that both layers have, by these names."""

    causal: bool
    alignment: str
    window: int | tuple[int | None, int | None] | None
    softcap: float | None
    scale: float | None
    rotary: Rotary | None
    bitwise_deterministic: bool
    backend: str | tuple[str, ...] | None
    context_axis: str | tuple[str, str] | None
    context_strategy: str | None
    context_layout: str
    context_length: int | tuple[int, int] | None


class Projections(NamedTuple):
    """query, key, value: ``[batch, seq, features] -> [batch, seq, heads, dim]``; out: ``-> [batch, seq, features]``."""

    query: Callable[[jax.Array], jax.Array]
    key: Callable[[jax.Array], jax.Array]
    value: Callable[[jax.Array], jax.Array]
    out: Callable[[jax.Array], jax.Array]


class LayerCall(NamedTuple):
    """The arguments of one call of a layer; dropout is 0 if it is switched off. functions: mask_mod, score_mod, aux."""

    mask: jax.Array | None = None
    bias: jax.Array | None = None
    alibi_slopes: jax.Array | None = None
    sinks: jax.Array | None = None
    seq_info: Any = None
    positions: jax.Array | None = None
    dropout: float = 0.0
    dropout_rng: Any = None
    pages: Pages | None = None
    key_ranges: Any = None
    functions: Any = MappingProxyType({})


def check_inputs(x: Any, context: Any, pages: Any) -> None:
    """Raises an error unless a layer's inputs are arrays; context may be None. ``check_paged_layer`` checks the rank of
    x with pages."""
    for name, array in (("x", x), ("context", context)):
        if isinstance(array, np.ma.MaskedArray):
            raise TypeError(f"{name}: expected an array without a mask, got a numpy.ma.MaskedArray")
        if not (isinstance(array, np.ndarray) or (array is None and name == "context")):
            check_array(name, array)
        if array is not None and array.ndim < 2 and pages is None:
            raise ShapeError(f"{name}: expected [..., seq, features], got {list(array.shape)}")
        if array is not None and str(array.dtype) not in DTYPES:
            raise DTypeError(f"{name}: expected one of {', '.join(DTYPES)}, got {array.dtype}")


def attend(
    layer: LayerOptions, projections: Projections, x: jax.Array, context: jax.Array | None, call: LayerCall
) -> Any:
    """Projects x to q, k and v, rotates q and k, computes attention, and projects the output.

    Args:
        x: ``[batch, seq, features]``; with seq_info ``[tokens, features]`` or ``[1, tokens, features]``.
        context: the source of keys and values, laid out as x; None for self-attention.

    Returns:
        An array with the rank of x and the features of ``projections.out``; with pages ``(out, (k, v))``, where k and
        v are the updated pool.
    """
    if call.pages is not None:
        return _attend_in_pages(layer, projections, x, context, call, call.pages)
    seq_info = SeqInfo.coerce(call.seq_info)
    check_layer_inputs(x.shape, None if context is None else context.shape, packed=seq_info is not None)
    queries = x[None] if x.ndim == 2 else x  # [batch, seq, features]
    positions = None if call.positions is None else as_array("positions", call.positions)
    check_rotary(
        rotary=layer.rotary is not None,
        cross=context is not None,
        positions=None if positions is None else positions.shape,
        rows=(queries.shape[0], queries.shape[1]),
    )
    keys = queries if context is None else context[None] if x.ndim == 2 else context
    q, k, v = projections.query(queries), projections.key(keys), projections.value(keys)
    dtype = jnp.result_type(q, k, v)  # rotary may return float32; all three go back to one dtype
    if layer.rotary is not None:
        # The places of a shard are not consecutive positions, so they cannot be counted from 0.
        if positions is None and context_layers.is_context_parallel(layer):
            positions = context_layers.position_ids(layer, seq_info, q.shape[1])
        q, k = layer.rotary(q, k, token_positions(positions, seq_info, *q.shape[:2]))
    # context_parallel_attention has no dropout, and so no dropout_rng.
    run = partial(attention, dropout_rng=call.dropout_rng)
    if context_layers.is_context_parallel(layer):
        refuse_over_ranks(call.functions)
        run = partial(context_layers.attend, layer)
    out = run(
        *(array.astype(dtype) for array in (q, k, v)),
        causal=layer.causal,
        alignment=layer.alignment,
        window=layer.window,
        softcap=layer.softcap,
        scale=layer.scale,
        # Flax's helpers make float32 masks.
        mask=None if call.mask is None else as_array("mask", call.mask).astype(bool),
        key_ranges=call.key_ranges,
        **call.functions,
        bias=call.bias,
        alibi_slopes=call.alibi_slopes,
        sinks=call.sinks,
        seq_info=seq_info,
        dropout=call.dropout,
        deterministic=layer.bitwise_deterministic,
        backend=layer.backend,
    )
    out = projections.out(out)
    return out[0] if x.ndim == 2 else out


def _attend_in_pages(
    layer: LayerOptions,
    projections: Projections,
    x: jax.Array,
    context: jax.Array | None,
    call: LayerCall,
    pages: Pages,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Appends the keys and values of new tokens ``[tokens, features]`` to the pages, and attends to the pages."""
    unsupported: dict[str, Any] = {
        "context": context,
        "mask": call.mask,
        "key_ranges": call.key_ranges,
        "bias": call.bias,
        "alibi_slopes": call.alibi_slopes,
    }
    unsupported |= {"seq_info": call.seq_info, "context_axis": layer.context_axis, **call.functions}
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
    if layer.rotary is not None:
        positions = _sequence_positions(pages.step, x.shape[0]) if positions is None else positions
        # As one row, because rotary functions expect a batch axis.
        q, k = (rows[0].astype(dtype) for rows in layer.rotary(q[None], k[None], positions.reshape(1, -1)))
    tables = pages.step.tables
    # The pool may have another dtype than the layer computes in, and append_kv does not cast.
    kinds = (pages.k.dtype, pages.v.dtype)
    pool = append_kv(pages.k, pages.v, *(new.astype(kind) for new, kind in zip((k, v), kinds, strict=True)), **tables)
    out = paged_attention(
        q.astype(pages.k.dtype),
        *pool,
        **tables,
        max_len_q=pages.step.max_len_q,
        causal=layer.causal,
        window=layer.window,
        softcap=layer.softcap,
        scale=layer.scale,
        sinks=call.sinks,
        deterministic=layer.bitwise_deterministic,
        backend=layer.backend,
    )
    # The output has the pool's dtype; the projection gets the layer's own.
    return projections.out(out.astype(dtype)), pool


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


def token_positions(positions: jax.Array | None, seq_info: SeqInfo | None, batch: int, seq: int) -> jax.Array:
    """Returns ``[batch, seq]`` int positions: the caller's, or else each token's index in its row or document.

    Args:
        positions: the caller's positions, ``[seq]`` or ``[batch, seq]``; or None.
    """
    if positions is None:
        positions = jnp.arange(seq, dtype=jnp.int32)
        if seq_info is not None:
            starts = jnp.asarray(seq_info.cu_seqlens_q)
            # The inner offsets at or before a token count the documents in front of its own.
            positions = positions - starts[document_numbers(starts[1:-1], seq)]
    return jnp.broadcast_to(positions, (batch, seq))
