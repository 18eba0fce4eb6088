"""What a Flax layer does between its projections: rotates, appends to its cache or its pages, and attends.

In decode mode the cache's variables are those of Flax's own layers. A query stands at ``index + i`` and sees the keys
up to there. Key ranges say so: they hide the places behind the new tokens, and need O(max_length) numbers where a mask
needs a row per query. With ``invariant`` a length of the rows says so.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from attn_core.call import checks, key_ranges
from attn_core.call.checks import CheckWarning
from attn_core.call.functions import AUX, FUNCTIONS, KINDS
from attn_core.call.layers import IN_PAGES, check_layer_inputs, check_rotary, options_of, rotary_positions
from attn_core.call.options import normalise_window
from attn_core.call.seq_info import SeqInfo
from attn_core.call.spec import DTYPES
from attn_core.errors import DTypeError, ShapeError, SpecError, shown
from attn_core.expressions.tracing import TracedFunction
from attn_core.paged.step import Pages, check_paged_layer
from jax_frontend.dispatch.partitioning import split_as
from jax_frontend.dispatch.plan import as_array, is_on_host, ranges_as_array
from jax_frontend.flax.layer import (
    Cache,
    LayerCall,
    LayerFields,
    Projections,
    attend_to_heads,
    check_precision,
    fold_tables,
    is_context_parallel,
    shard_positions,
    token_positions,
)
from jax_frontend.paged.append import append_kv, new_tokens
from jax_frontend.paged.attention import paged_attention


def attend(
    layer: LayerFields, projections: Projections, x: jax.Array, context: jax.Array | None, call: LayerCall
) -> jax.Array | tuple[jax.Array, tuple[jax.Array, ...]]:
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
        return _attend_in_pages(layer, projections, x, context, call, call.pages)
    if call.store is not None:
        _check_decode(layer, context, call)
    seq_info, batch = SeqInfo.coerce(call.given.get("seq_info")), x.shape[:-2]
    packed = seq_info is not None
    check_layer_inputs(x.shape, None if context is None else context.shape, packed=packed, any_batch=True)
    if packed:
        call = call._replace(given={**call.given, "seq_info": seq_info})
    else:
        call = fold_tables(call, batch, x.shape[-2])
    queries = _as_rows(x)
    positions = rotary_positions(call.positions, call.given, rotary=layer.rotary is not None)
    positions = None if positions is None else as_array("positions", positions)
    check_rotary(layer, positions, (queries.shape[0], queries.shape[1]), cross=context is not None)
    keys = queries if context is None else _as_rows(context)
    q, k, v = projections.query(queries), projections.key(keys), projections.value(keys)
    dtype = jnp.result_type(q, k, v)  # rotary may return float32; all three go back to one dtype
    check_precision(layer.precision, dtype)
    cache = None
    if call.store is not None:
        cache = call.store.read(*(jax.ShapeDtypeStruct((*batch, *heads.shape[1:]), heads.dtype) for heads in (k, v)))
    if cache is not None:
        _check_room(cache, batch, k, v)
    if layer.rotary is not None:
        if positions is None:
            positions = _positions(layer, call, q.shape[1], None if cache is None else cache.cache_index)
        q, k = layer.rotary(q, k, token_positions(positions, seq_info, *q.shape[:2]))
    q, k, v = (heads.astype(dtype) for heads in (q, k, v))
    if cache is None or call.store is None:
        heads = attend_to_heads(layer, q, k, v, call)
    else:
        heads, extended = _attend_in_cache(layer, q, k, v, call, cache)
        call.store.write(extended)  # after the attention, so that a refused call leaves the cache as it was
    out = projections.out(heads)
    return out.reshape(*x.shape[:-1], out.shape[-1])


def _as_rows(x: jax.Array) -> jax.Array:
    """Returns ``[batch..., seq, features]`` as ``[rows, seq, features]``."""
    return x if x.ndim == 3 else jnp.reshape(x, (math.prod(x.shape[:-2]), *x.shape[-2:]))


def _positions(layer: LayerFields, call: LayerCall, seq: int, index: jax.Array | None) -> jax.Array | None:
    """Returns the positions of tokens that do not count from 0: of a shard and behind a cache; else None."""
    if index is not None:
        return index + jnp.arange(seq, dtype=index.dtype)
    # The places of a shard are not consecutive positions, so they cannot be counted from 0.
    if is_context_parallel(layer):
        return shard_positions(layer, call.given.get("seq_info"), seq)
    return None


def _attend_in_pages(
    layer: LayerFields,
    projections: Projections,
    x: jax.Array,
    context: jax.Array | None,
    call: LayerCall,
    pages: Pages,
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Appends the keys and values of new tokens ``[tokens, features]`` to the pages, and attends to the pages."""
    if call.store is not None:
        raise SpecError("decode=True: expected False with pages, which then are the layer's cache")
    unsupported = {"context": context, **call.given, "context_axis": layer.context_axis}
    check_paged_layer(x.shape, layer.alignment, call.dropout, unsupported)
    positions = None if call.positions is None else as_array("positions", call.positions)
    check_rotary(layer, positions, (1, x.shape[0]))
    q, k, v = projections.query(x), projections.key(x), projections.value(x)  # [tokens, heads, dim]
    dtype = jnp.result_type(q, k, v)
    check_precision(layer.precision, dtype)
    if layer.rotary is not None:
        if positions is None:
            lengths, offsets = as_array("seq_lens", pages.step.seq_lens), pages.step.cu_seqlens_q
            offsets = None if offsets is None else as_array("cu_seqlens_q", offsets)
            _, positions = new_tokens(x.shape[0], lengths, offsets)
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
        **options_of(layer, IN_PAGES),
        sinks=call.sinks,
    )
    # The output has the pool's dtype; the projection gets the layer's own.
    return projections.out(out.astype(dtype)), (k_pages, v_pages, *scales)


def _check_decode(layer: LayerFields, context: object, call: LayerCall) -> None:
    """Checks the options and arguments of a layer in decode mode.

    Raises:
        SpecError: naming what a cache of one row of tokens cannot honour.
    """
    refused = {"context": context, "context_axis": layer.context_axis}
    refused |= {name: call.given.get(name) for name in ("seq_info", "q_positions", "kv_positions")}
    for name, value in refused.items():
        if value is not None:
            raise SpecError(
                f"{name}: expected None with decode=True, because the cache has the earlier tokens of x, whole rows of "
                f"one document; call a layer with {name}= without decode"
            )
    right = normalise_window(layer.window, layer.causal)[1]
    if right and not layer.causal:
        raise SpecError(
            f"window={shown(layer.window)}: expected a right distance of 0 or None with decode=True, because later "
            "tokens are not in the cache yet"
        )


def _attend_in_cache(
    layer: LayerFields, q: jax.Array, k: jax.Array, v: jax.Array, call: LayerCall, cache: Cache
) -> tuple[jax.Array, Cache]:
    """Appends rotated keys and values to a cache, and computes the attention of the new tokens to it.

    Args:
        q, k, v: ``[rows, new, heads, dim]``, of one dtype; rows are all batch axes.
        call: with the tables of ``fold_tables``; mask and bias ``[rows or 1, heads or 1, new, max_length]``, key ranges
            ``[rows or 1, kv_heads or 1, max_length, ranges, 2]``, whose queries count in the whole row.

    Returns:
        ``[rows, new, heads, value_dim]`` and the cache with the new tokens.
    """
    (rows, new), index = k.shape[:2], cache.cache_index
    extended = Cache(_written(cache.cached_key, k, index), _written(cache.cached_value, v, index), index + new)
    keys, values = (each.reshape(rows, *each.shape[-3:]) for each in extended[:2])  # [rows, max_length, kv_heads, dim]
    index, max_length = index.astype(jnp.int32), keys.shape[1]
    if layer.invariant is not None:
        heads = q, keys.astype(q.dtype), values.astype(q.dtype)
        return _attend_by_lengths(layer, *heads, call, index + new), extended
    left, first = normalise_window(layer.window, layer.causal)[0], jnp.zeros((), jnp.int32)
    if left is not None and left + new < max_length and not _has_tables(call):
        # No new token sees further back, so a short window in a long cache reads only its own keys.
        first = jnp.clip(index - left, 0, max_length - left - new)
        keys, values = (lax.dynamic_slice_in_dim(each, first, left + new, axis=1) for each in (keys, values))
    ahead = first - index + jnp.arange(keys.shape[1], dtype=jnp.int32)
    given = {
        **call.given,
        **_moved(call.given, index),
        "key_ranges": _within(call.given.get("key_ranges"), _visible(ahead, new, left), index, (rows, keys.shape[2])),
        "bias": _with_alibi(call, index, (rows, q.shape[2], new, max_length)),
        "alibi_slopes": None,
    }
    heads = q, keys.astype(q.dtype), values.astype(q.dtype)
    visible: dict[str, Any] = {"causal": False, "window": None, "alignment": "bottom_right"}
    return attend_to_heads(layer, *heads, call._replace(given=given), **visible), extended


def _attend_by_lengths(
    layer: LayerFields, q: jax.Array, k: jax.Array, v: jax.Array, call: LayerCall, length: jax.Array
) -> jax.Array:
    """Computes attention to the first keys of a cache, as many as ``length`` says, with the layer's ``invariant``.

    No backend has a promise beside key ranges, so lengths of rows say what is visible. The window does not shorten the
    keys, because tiles are counted from the first key of a call.
    """
    window = layer.window if layer.causal else (normalise_window(layer.window, False)[0], None)
    lengths = jnp.full((q.shape[0],), length, jnp.int32)
    visible: dict[str, Any] = {"causal": True, "window": window, "alignment": "bottom_right", "kv_lengths": lengths}
    return attend_to_heads(layer, q, k, v, call, **visible)


def _check_room(cache: Cache, batch: tuple[int, ...], k: jax.Array, v: jax.Array) -> None:
    """Checks that new tokens ``[rows, new, kv_heads, dim]`` of these batch axes fit a cache.

    An index on the CPU is checked. A traced one has no value: then an overflow overwrites the last places, as
    ``lax.dynamic_update_slice`` does, and ``attn_core.checks`` makes the program warn of it.

    Raises:
        ShapeError, SpecError: naming the input or the variable.
    """
    new = k.shape[1]
    for name, array, heads in (("cached_key", cache.cached_key, k), ("cached_value", cache.cached_value, v)):
        if array.ndim < 3 or array.shape[-2:] != heads.shape[-2:]:
            expected = f"[batch..., max_length, {heads.shape[2]}, {heads.shape[3]}]"
            raise ShapeError(f"{name}: expected the layer's {expected}, got {list(array.shape)}")
        if array.shape[:-3] != batch:
            raise ShapeError(
                f"x: expected the batch axes {list(array.shape[:-3])} of {name}, got {list(batch)}; initialise a cache "
                "for this batch"
            )
    max_length = cache.cached_key.shape[-3]
    if cache.cached_value.shape[-3] != max_length or cache.cache_index.shape != ():
        raise ShapeError(
            "cache: expected a cache_index of shape [] and as many keys as values, got cache_index "
            f"{list(cache.cache_index.shape)}, {max_length} keys, {cache.cached_value.shape[-3]} values"
        )
    if new > max_length:
        raise ShapeError(f"x: expected at most the {max_length} tokens of the cache, got {new}")
    report = partial(_overflow, new, max_length)
    if is_on_host(cache.cache_index, or_elsewhere=checks.enabled()):
        with jax.transfer_guard("allow"):
            error = report(int(cache.cache_index))
        if error is not None:
            raise SpecError(error)
    elif checks.enabled():
        jax.debug.callback(lambda index: _warn(report(int(index))), cache.cache_index)


def _overflow(new: int, max_length: int, index: int) -> str | None:
    if 0 <= index <= max_length - new:
        return None
    return (
        f"cache_index={index}: expected room for {new} new tokens in a cache of {max_length}; initialise a longer "
        "cache, or start again with cache_index 0"
    )


def _warn(message: str | None) -> None:
    if message is not None:
        warnings.warn(message, CheckWarning, stacklevel=2)


def _written(cached: jax.Array, heads: jax.Array, index: jax.Array) -> jax.Array:
    """Returns ``[batch..., max_length, heads, dim]`` with new heads ``[rows, new, heads, dim]`` from the index on."""
    new = heads.reshape(*cached.shape[:-3], *heads.shape[1:]).astype(cached.dtype)
    return lax.dynamic_update_slice_in_dim(cached, split_as(new, cached), index, axis=cached.ndim - 3)


def _has_tables(call: LayerCall) -> bool:
    """Returns whether a call has arrays or functions of all places of the cache."""
    return any(name != "seq_info" for name in call.given)


def _visible(ahead: jax.Array, new: int, left: int | None) -> jax.Array:
    """Returns the range of new tokens that see each key, int32 ``[keys, 2]``.

    Args:
        ahead: each key's distance from the first new token, negative for older keys.
        left: how far back a token sees; None: to the start.
    """
    starts = jnp.clip(ahead, 0, new)
    stops = jnp.full_like(starts, new) if left is None else jnp.clip(ahead + left + 1, 0, new)
    return jnp.stack([starts, stops], -1)


def _within(
    ranges: jax.Array | np.ndarray | None, visible: jax.Array, index: jax.Array, sizes: tuple[int, int]
) -> jax.Array:
    """Returns key ranges of the new tokens: the visible ones, inside the caller's ranges of whole rows."""
    if ranges is None:
        return visible[None, None, :, None, :]
    max_length = visible.shape[0]
    array = ranges_as_array(ranges)
    key_ranges.check_shape(array.shape, *sizes, max_length)
    if isinstance(ranges, np.ndarray) or is_on_host(array):
        with jax.transfer_guard("allow"):
            key_ranges.check_values(np.asarray(ranges), max_length)
    # A range outside becomes empty. The axes are [rows or 1, kv_heads or 1, keys, ranges, 2].
    return jnp.clip(array - index, visible[:, None, :1], visible[:, None, 1:])


def _with_alibi(call: LayerCall, index: jax.Array, full: tuple[int, ...]) -> jax.Array | None:
    """Returns the bias with ALiBi's in it, because kernels count ALiBi's distances from the end of the cache.

    Args:
        full: ``(rows, heads, new, max_length)``.
    """
    bias = call.given.get("bias")
    if "alibi_slopes" not in call.given:
        return bias
    slopes = _floats("alibi_slopes", call.given["alibi_slopes"])
    if slopes.shape not in (full[1:2], full[:2]):
        raise ShapeError(
            f"alibi_slopes: expected [heads] = [{full[1]}] or [batch, heads] = {list(full[:2])}, got "
            f"{list(slopes.shape)}"
        )
    queries, keys = (jnp.arange(size, dtype=jnp.int32) for size in full[2:])
    distances = jnp.abs(index + queries[:, None] - keys)  # [new, max_length]
    dtype = jnp.promote_types(slopes.dtype, jnp.float32)
    alibi = -slopes.astype(dtype)[..., None, None] * distances.astype(dtype)  # [rows, heads, new, max_length] or less
    if bias is None:
        return alibi
    bias = _floats("bias", bias)
    missing = 4 - bias.ndim
    if missing < 0 or any(size not in (1, axis) for size, axis in zip(bias.shape, full[missing:], strict=True)):
        raise ShapeError(f"bias: expected a shape broadcastable to {list(full)}, got {list(bias.shape)}")
    return bias.astype(jnp.promote_types(bias.dtype, dtype)) + alibi


def _floats(name: str, value: ArrayLike) -> jax.Array:
    array = as_array(name, value)
    if str(array.dtype) not in DTYPES:
        raise DTypeError(f"{name}: expected one of {', '.join(DTYPES)}, got {array.dtype}")
    return array


def _moved(given: Mapping[str, Any], index: jax.Array) -> dict[str, Any]:
    """Returns mask and score functions whose query counts in the whole row: the index is one more array of theirs."""
    if not any(name in given for name in FUNCTIONS):
        return {}
    aux = given.get("aux", ())
    if len(aux) >= len(AUX):
        raise SpecError(
            f"aux: expected at most {len(AUX) - 1} arrays with decode=True, because cache_index is one more, got "
            f"{len(aux)}"
        )
    moved = {name: _moved_function(name, given[name]) for name in KINDS if name in given}
    return {**moved, "aux": (*aux, index)}


def _moved_function(name: str, function: Callable[..., Any] | TracedFunction) -> Callable[..., Any]:
    if isinstance(function, TracedFunction):
        raise SpecError(
            f"{name}: expected a function with decode=True, got one that is traced already; pass its source"
        )
    if name == "mask_mod":
        return lambda b, h, q, k, *aux: function(b, h, q + aux[-1], k, *aux[:-1])
    return lambda score, b, h, q, k, *aux: function(score, b, h, q + aux[-1], k, *aux[:-1])
