"""Rows of a dense cache as key ranges, for JAX arrays: the form of calls with gradients, masks or functions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from attn_core.call import cache_rows
from attn_core.call.cache_rows import CacheRows
from attn_core.call.options import Options, check_options
from attn_core.call.tensors import Inputs
from attn_core.expressions.tracing import TracedFunction
from jax_frontend.bridge.bridged_call import BridgedCall
from jax_frontend.dispatch import explicit_axes, plan
from jax_frontend.dispatch.split import Split
from jax_frontend.dispatch.vmap import MappedCall

Array = jax.Array
Keywords = dict[str, Any]
Window = tuple[int | None, int | None]


def split_of_rows(arrays: dict[str, Array]) -> tuple[Any, Split] | None:
    """Returns the mesh with Explicit axes and how it splits the call, as it would split a dense one; or None.

    arrays: q, k, v, the rows, and others that the call has, by name.
    """
    mesh = explicit_axes.explicit_mesh(arrays)
    if mesh is None:
        return None
    q, *kv = (arrays[name] for name in "qkv")
    rows = [jax.ShapeDtypeStruct((q.shape[0], *each.shape[1:]), each.dtype) for each in kv]
    device = plan.device_name(q)
    spec = plan.spec(plan.metadata(Inputs(q, *rows)), device, check_options(Options()), False, False)
    call = MappedCall(BridgedCall("forward", "", device, spec, tuple(arrays)))
    return mesh, explicit_axes.split_on(mesh, call, list(arrays.values()))


def as_ranges(
    qkv: tuple[Any, ...], rows: CacheRows, window: Window, options: Keywords
) -> tuple[tuple[Any, ...], Keywords]:
    """Returns the arrays and the keywords of ``attention`` for the same call with key ranges."""
    theirs = options["key_ranges"]
    theirs = None if theirs is None else plan.ranges_as_array(theirs)
    key_ranges, k, v = ranges(qkv, rows, theirs, window=window, options=options)
    return with_ranges(qkv[0], k, v, rows, key_ranges, options)


def rows_of(arrays: dict[str, Array]) -> CacheRows:
    """Returns the rows among the arrays of a call."""
    return CacheRows(*(arrays.get(name) for name in CacheRows._fields))


def ranges(
    qkv: tuple[Any, ...], rows: CacheRows, theirs: Any, *, window: Window, options: Keywords
) -> tuple[Array, Array, Array]:
    """Returns the key ranges of the call, and k and v as ``[batch, kv_len, ...]`` with 0 outside of each row.

    theirs: the caller's key ranges, or None.
    """
    q, k, v = qkv
    rows = cache_rows.clamped(rows, k.shape[1], k.shape[0])
    arrays = {"q": q, "k": k, "v": v, **rows._asdict(), "key_ranges": theirs}
    arrays = {name: array for name, array in arrays.items() if array is not None}
    run: Callable[..., Any] = partial(_visible, (q.shape[1], k.shape[1]), window, options)
    on_mesh = split_of_rows(arrays)
    if on_mesh is not None:
        mesh, split = on_mesh
        heads = "one" if theirs is None or theirs.shape[1] == 1 else "kv_heads"
        specs = split.spec(("batch", heads, "keys", "ranges", "ends")), split.spec(("batch", "keys"))
        run = explicit_axes.as_auto(run, mesh, specs)
    key_ranges, inside = run({name: array for name, array in arrays.items() if name not in "qkv"})
    if rows.cache_index is not None:
        read = _rows_read
        if on_mesh is not None:
            out = NamedSharding(mesh, split.spec(("batch", "keys", "kv_heads", "dim")))
            # Recomputed, because JAX cannot hand an index of Auto axes from a jitted function to its eager gradient.
            read = jax.checkpoint(partial(_rows_read, out=out))
        k, v = read(k, rows.cache_index), read(v, rows.cache_index)
    return key_ranges, _within(inside, k), _within(inside, v)


def _rows_read(cache: Array, index: Array, out: Any = None) -> Array:
    return cache.at[index].get(out_sharding=out)


def _visible(
    lengths: tuple[int, int], window: Window, options: Keywords, arrays: dict[str, Array]
) -> tuple[Array, Array]:
    """Returns the key ranges of a call, and which keys belong to each row, bool ``[batch, kv_len]``."""
    rows, theirs = rows_of(arrays), arrays.get("key_ranges")
    edges = window[0], 0 if options["causal"] else window[1]
    key = jnp.arange(lengths[1], dtype=jnp.int32)
    start, stop, inside = cache_rows.queries_of_keys(key, rows, lengths, edges, options["alignment"] == "top_left")
    start, stop = start[:, None, :, None], stop[:, None, :, None]  # [batch, 1, kv_len, 1]
    if theirs is not None:
        start, stop = jnp.maximum(start, theirs[..., 0]), jnp.minimum(stop, theirs[..., 1])
        stop = jnp.maximum(start, stop)
    return jnp.stack((start, stop), -1), inside


def _within(inside: Array, array: Array) -> Array:
    """Returns keys or values with 0 outside of each row."""
    inside = explicit_axes.split_as(inside, array)  # as ``where`` demands
    return jnp.where(inside[:, :, None, None], array, jnp.zeros((), array.dtype))


def with_ranges(
    q: Any, k: Any, v: Any, rows: CacheRows, key_ranges: Any, options: Keywords
) -> tuple[tuple[Any, ...], Keywords]:
    """Returns the arrays and the keywords of ``attention`` for the same call with these key ranges."""
    changed: Keywords = {"key_ranges": key_ranges, "causal": False, "window": None}
    slopes = options["alibi_slopes"]
    if slopes is not None and options["alignment"] == "bottom_right":
        offsets = partial(_offsets, q.shape[1], k.shape[1], q.shape[0])
        dtype = jnp.promote_types(q.dtype, jnp.float32)
        if all(array is None or isinstance(array, jax.Array) for array in (slopes, rows.kv_lengths)):
            arrays = jax.lax.stop_gradient(slopes.astype(dtype)), offsets(rows.kv_lengths)
        else:
            arrays = jax.ShapeDtypeStruct(slopes.shape, dtype), jax.eval_shape(offsets, rows.kv_lengths)
        function = TracedFunction(cache_rows.slopes_of_rows(slopes.ndim), arrays)
        changed |= {"alibi_slopes": None, "score_mod": function}
    return (q, k, v), options | changed


def _offsets(q_len: Any, kv_len: Any, batch: Any, kv_lengths: Any) -> Array:
    """Returns the key at which the first query of each row stands."""
    lengths = jnp.full((batch,), kv_len, jnp.int32) if kv_lengths is None else jnp.clip(kv_lengths, 0, kv_len)
    return lengths - q_len
