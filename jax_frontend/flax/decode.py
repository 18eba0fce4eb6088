"""A Flax layer in decode mode: appends new tokens to its cache and attends to the cache.

The variables are those of Flax's own layers. A query stands at ``index + i`` and sees the keys up to there. Key ranges
say so: they hide the places behind the new tokens, and need O(max_length) numbers where a mask needs a row per query.
With ``invariant`` a length of the rows says so. Apart from ``attend``, which has no cache.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from attn_core.call import checks, key_ranges
from attn_core.call.checks import CheckWarning
from attn_core.call.functions import AUX
from attn_core.call.options import normalise_window
from attn_core.call.spec import DTYPES
from attn_core.errors import DTypeError, ShapeError, SpecError, shown
from attn_core.expressions.tracing import TracedFunction
from jax_frontend.dispatch.explicit_axes import split_as
from jax_frontend.dispatch.plan import as_array, ranges_as_array
from jax_frontend.dispatch.value_checks import values_here
from jax_frontend.flax.layer import Cache, LayerCall, LayerOptions, attend_to_heads


def check_decode(layer: LayerOptions, context: Any, call: LayerCall) -> None:
    """Checks the options and arguments of a layer in decode mode.

    Raises:
        SpecError: naming what a cache of one row of tokens cannot honour.
    """
    refused = {"context": context, "seq_info": call.seq_info, "context_axis": layer.context_axis}
    refused |= {name: call.segments.get(name) for name in ("q_positions", "kv_positions")}
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


def attend_in_cache(
    layer: LayerOptions, q: jax.Array, k: jax.Array, v: jax.Array, call: LayerCall, cache: Cache
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
    tables = {
        "key_ranges": _within(call.key_ranges, _visible(ahead, new, left), index, (rows, keys.shape[2])),
        "functions": _moved(call.functions, index),
        "bias": _with_alibi(call, index, (rows, q.shape[2], new, max_length)),
        "alibi_slopes": None,
    }
    heads = q, keys.astype(q.dtype), values.astype(q.dtype)
    return attend_to_heads(layer, *heads, call._replace(**tables), causal=False, window=None), extended


def _attend_by_lengths(
    layer: LayerOptions, q: jax.Array, k: jax.Array, v: jax.Array, call: LayerCall, length: jax.Array
) -> jax.Array:
    """Computes attention to the first keys of a cache, as many as ``length`` says, with the layer's ``invariant``.

    No backend has a promise beside key ranges, so lengths of rows say what is visible. The window does not shorten the
    keys, because tiles are counted from the first key of a call.
    """
    window = layer.window if layer.causal else (normalise_window(layer.window, False)[0], None)
    lengths = jnp.full((q.shape[0],), length, jnp.int32)
    return attend_to_heads(layer, q, k, v, call, causal=True, window=window, kv_lengths=lengths)


def check_room(cache: Cache, batch: tuple[int, ...], k: jax.Array, v: jax.Array) -> None:
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
    if values_here(cache.cache_index, on_gpu=checks.enabled()):
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
    tables = call.mask, call.bias, call.alibi_slopes, call.key_ranges
    return bool(call.functions or call.segments) or any(table is not None for table in tables)


def _visible(ahead: jax.Array, new: int, left: int | None) -> jax.Array:
    """Returns the range of new tokens that see each key, int32 ``[keys, 2]``.

    Args:
        ahead: each key's distance from the first new token, negative for older keys.
        left: how far back a token sees; None: to the start.
    """
    starts = jnp.clip(ahead, 0, new)
    stops = jnp.full_like(starts, new) if left is None else jnp.clip(ahead + left + 1, 0, new)
    return jnp.stack([starts, stops], -1)


def _within(ranges: Any, visible: jax.Array, index: jax.Array, sizes: tuple[int, int]) -> jax.Array:
    """Returns key ranges of the new tokens: the visible ones, inside the caller's ranges of whole rows."""
    if ranges is None:
        return visible[None, None, :, None, :]
    max_length = visible.shape[0]
    array = ranges_as_array(ranges)
    key_ranges.check_shape(array.shape, *sizes, max_length)
    if isinstance(ranges, np.ndarray) or values_here(array):
        with jax.transfer_guard("allow"):
            key_ranges.check_values(np.asarray(ranges), max_length)
    # A range outside becomes empty. The axes are [rows or 1, kv_heads or 1, keys, ranges, 2].
    return jnp.clip(array - index, visible[:, None, :1], visible[:, None, 1:])


def _with_alibi(call: LayerCall, index: jax.Array, full: tuple[int, ...]) -> Any:
    """Returns the bias with ALiBi's in it, because kernels count ALiBi's distances from the end of the cache.

    Args:
        full: ``(rows, heads, new, max_length)``.
    """
    if call.alibi_slopes is None:
        return call.bias
    slopes = _floats("alibi_slopes", call.alibi_slopes)
    if slopes.shape not in (full[1:2], full[:2]):
        raise ShapeError(
            f"alibi_slopes: expected [heads] = [{full[1]}] or [batch, heads] = {list(full[:2])}, got "
            f"{list(slopes.shape)}"
        )
    queries, keys = (jnp.arange(size, dtype=jnp.int32) for size in full[2:])
    distances = jnp.abs(index + queries[:, None] - keys)  # [new, max_length]
    dtype = jnp.promote_types(slopes.dtype, jnp.float32)
    alibi = -slopes.astype(dtype)[..., None, None] * distances.astype(dtype)  # [rows, heads, new, max_length] or less
    if call.bias is None:
        return alibi
    bias = _floats("bias", call.bias)
    missing = 4 - bias.ndim
    if missing < 0 or any(size not in (1, axis) for size, axis in zip(bias.shape, full[missing:], strict=True)):
        raise ShapeError(f"bias: expected a shape broadcastable to {list(full)}, got {list(bias.shape)}")
    return bias.astype(jnp.promote_types(bias.dtype, dtype)) + alibi


def _floats(name: str, value: Any) -> jax.Array:
    array = as_array(name, value)
    if str(array.dtype) not in DTYPES:
        raise DTypeError(f"{name}: expected one of {', '.join(DTYPES)}, got {array.dtype}")
    return array


def _moved(functions: Mapping[str, Any], index: jax.Array) -> Mapping[str, Any]:
    """Returns mask and score functions whose query counts in the whole row: the index is one more array of theirs."""
    if not functions:
        return functions
    aux = functions["aux"]
    if len(aux) >= len(AUX):
        raise SpecError(
            f"aux: expected at most {len(AUX) - 1} arrays with decode=True, because cache_index is one more, got "
            f"{len(aux)}"
        )
    moved = {name: _moved_function(name, functions[name]) for name in ("mask_mod", "score_mod")}
    return MappingProxyType({**moved, "aux": (*aux, index)})


def _moved_function(name: str, function: Any) -> Callable[..., Any] | None:
    if function is None:
        return None
    if isinstance(function, TracedFunction):
        raise SpecError(
            f"{name}: expected a function with decode=True, got one that is traced already; pass its source"
        )
    if name == "mask_mod":
        return lambda b, h, q, k, *aux: function(b, h, q + aux[-1], k, *aux[:-1])
    return lambda score, b, h, q, k, *aux: function(score, b, h, q + aux[-1], k, *aux[:-1])
