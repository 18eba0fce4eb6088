"""Dense caches with a length per row: kv_lengths, kv_starts and cache_index of ``attention``, for JAX arrays.

``attn_core.call.cache_rows`` says what they mean, and which of three forms a call takes. JAX says only while it
differentiates whether a call needs gradients, so a call on pages has a derivative: that of the call with key ranges.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from attn_core.call import cache_rows, checks
from attn_core.call.arguments import Arrays
from attn_core.call.cache_rows import CacheRows
from attn_core.call.key_ranges import check_values
from attn_core.call.kinds import check_int32
from attn_core.call.options import PLAIN, Options, check_options, requested_names
from attn_core.call.seq_info import SeqInfo
from attn_core.call.tensors import Inputs
from attn_core.errors import SpecError
from attn_core.expressions.tracing import TracedFunction
from attn_core.selection import Selection, override
from attn_core.selection.dense_caches import Form, form_of
from jax_frontend.bridge.bridged_call import BridgedCall
from jax_frontend.dispatch import partitioning, plan, value_checks
from jax_frontend.dispatch.partitioning import Split
from jax_frontend.dispatch.plan import ArrayOrShape
from jax_frontend.dispatch.vmap import MappedCall
from jax_frontend.paged.attention import explain_paged, paged_attention

Array = jax.Array
Shaped = tuple[ArrayOrShape, ArrayOrShape, ArrayOrShape]
Keywords = dict[str, Any]


class _Call(NamedTuple):
    """The static part of a call on pages."""

    attention: Callable[..., Any]
    """The frontend's, for the derivative."""
    options: Options
    backend: tuple[str, ...] | None
    packed: bool
    """Whether the call runs as packed documents."""

    def keywords(self, arrays: dict[str, Array]) -> Keywords:
        """Returns all arguments of ``attention`` but q, k, v, layout and the rows, by name."""
        plain = {name: getattr(self.options, name) for name in PLAIN}
        tables = {name: arrays.get(name) for name in ("sinks", "alibi_slopes")}
        return {**cache_rows.ABSENT, **plain, **tables, "backend": self.backend}


def attend(
    attention: Callable[..., Array | tuple[Array, ...]],
    qkv: tuple[Array, Array, Array],
    rows: CacheRows,
    options: Keywords,
    *,
    shifted: bool = False,
) -> Array | tuple[Array, ...]:
    """Runs ``attention`` on the keys of each row of a cache.

    Args:
        qkv: with the sequence before the heads; rows: as the caller passed them.
        options: all other arguments of ``attention`` but layout, by name.
        shifted: as ``cache_rows.value_check`` has it.
    """
    rows, options = _checked(qkv, rows, options, shifted=shifted)
    form = _form(qkv, rows, options)
    if form == "ranges":
        tensors, others = as_ranges(qkv, rows, options)
        return attention(*tensors, **others)
    if checks.enabled():
        value_checks.check_cache(*as_ranges(qkv, rows, options))
    # As one differentiable function, because pages have no derivative: its rule takes the form of ranges.
    call = _Call(attention, Options.of(options), requested_names(options["backend"]), form == "documents")
    arrays = {**dict(zip("qkv", qkv, strict=True)), **rows._asdict()}
    arrays |= {name: options[name] for name in ("sinks", "alibi_slopes")}
    return _jit_from_pages(call, {name: array for name, array in arrays.items() if array is not None})


def explain(
    explain: Callable[..., Selection],
    qkv: Shaped,
    rows: CacheRows,
    options: Keywords,
    needs_backward: bool | None,
) -> Selection:
    """Returns what would run the form that the call takes.

    Args:
        explain: the frontend's, for a call in the form of key ranges.
        qkv, rows, options: as ``attend`` has them; arrays or their shapes.
    """
    rows, options = _checked(qkv, rows, options, shapes_only=True)
    q, k, v = qkv
    form = "ranges" if needs_backward else _form(qkv, rows, options)
    if form == "ranges":
        key_ranges, k, v = jax.eval_shape(partial(ranges, options=options), qkv, rows, options["key_ranges"])
        tensors, others = with_ranges(q, k, v, rows, key_ranges, options)
        return explain(*tensors, **others, needs_backward=needs_backward)
    if form == "documents":
        arrays, keywords = shapes_of_documents(qkv, options)
        return explain(*arrays, **keywords, needs_backward=needs_backward)
    shape = (q.shape[0] * q.shape[1], *q.shape[2:])
    queries = q.reshape(shape) if isinstance(q, jax.Array) else jax.ShapeDtypeStruct(shape, q.dtype)
    tables = jax.eval_shape(partial(_pool_tables, q.shape[:2], k.shape[:2]), rows)
    more = {name: options[name] for name in cache_rows.ON_POOL}
    return explain_paged(queries, k, v, **tables, **more, max_len_q=q.shape[1])


def _checked(
    qkv: Shaped, rows: CacheRows, options: Keywords, *, shapes_only: bool = False, shifted: bool = False
) -> tuple[CacheRows, Keywords]:
    """Checks every argument, on a CPU by value; returns the rows as JAX's arrays, the options with window as a pair."""
    q, k, v = qkv
    inputs = Inputs(q, k, v, *(options[name] for name in ("mask", "bias", "alibi_slopes", "sinks")))
    plan.check_arrays(inputs, shapes_only=shapes_only)
    for name, array in zip(rows._fields, rows):
        if array is not None and not isinstance(array, np.ndarray):
            plan.check_array(name, array, shapes_only=shapes_only)
    cache_rows.check_arguments(rows, {"q": q.shape, "k": k.shape, "v": v.shape}, options)
    call = check_options(Options.of(options))
    if rows.cache_index is not None:  # it selects rows of a larger cache
        k_read, v_read = (jax.ShapeDtypeStruct((q.shape[0], *a.shape[1:]), a.dtype) for a in (k, v))
        inputs = inputs._replace(k=k_read, v=v_read)
    # Its errors name these arguments; those of pages would name others.
    plan.spec(plan.metadata(inputs), plan.device_name(q), call)
    theirs = options["key_ranges"]
    if theirs is not None:
        check_int32("key_ranges", theirs.dtype)
    if theirs is not None and plan.is_on_host(theirs):
        check_values(np.asarray(theirs), q.shape[1])
    on_host = CacheRows(*(array if plan.is_on_host(array) else None for array in rows))
    options = options | {"window": call.window}
    check = cache_rows.value_check(q.shape[1], k.shape[1], options, shifted=shifted)
    check(on_host, k.shape[1], k.shape[0])
    # Copied, because JAX may share the memory of numpy's arrays, which the caller may write to too early.
    moved = (jax.device_put(array.copy()) if isinstance(array, np.ndarray) else array for array in rows)
    return CacheRows(*moved), options


def _form(qkv: Shaped, rows: CacheRows, options: Keywords) -> Form:
    """Returns the form that a checked call, of arrays or their shapes, takes as long as nothing is differentiated."""
    q, k, v = qkv
    device, names = plan.device_name(q), requested_names(options["backend"]) or override.requested()
    inputs = Inputs(q, k, v, alibi_slopes=options["alibi_slopes"], sinks=options["sinks"])
    arrays = Arrays(*plan.facts_of(plan.metadata(inputs), device))
    sizes = (*q.shape[:2], k.shape[1], k.shape[0])
    return form_of(rows, sizes, options, arrays, ("jax", device), names)


def _pool_tables(queries: tuple[int, ...], cache: tuple[int, ...], rows: CacheRows) -> dict[str, Array | None]:
    """Returns the tables of the call on a pool, in which each row of the cache is a page.

    Args:
        queries: (batch, q_len). cache: (rows, kv_len).
    """
    (batch, count), (cache_batch, kv_len) = queries, cache
    rows = cache_rows.clamped(rows, kv_len, cache_batch)
    # A page is a row, so a sequence has one page, and the table one column.
    index = jnp.arange(batch, dtype=jnp.int32) if rows.cache_index is None else rows.cache_index
    lengths = jnp.full((batch,), kv_len, jnp.int32) if rows.kv_lengths is None else rows.kv_lengths
    offsets = None if count == 1 else jnp.arange(0, batch * count + 1, count, dtype=jnp.int32)
    return {"block_table": index[:, None], "seq_lens": lengths, "cu_seqlens_q": offsets, "kv_starts": rows.kv_starts}


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _from_pages(call: _Call, arrays: dict[str, Array]) -> Array | tuple[Array, Array]:
    run, on_mesh = partial(_run, call), split_of_rows(arrays)
    if on_mesh is None:
        return run(arrays)
    mesh, split = on_mesh
    return partitioning.as_auto(run, mesh, _specs(call, split))(arrays)


def _specs(call: _Call, split: Split) -> P | tuple[P, P]:
    """Returns the PartitionSpecs of the results."""
    out, lse = split.spec(("batch", "queries", "heads", "dim")), split.spec(("batch", "heads", "queries"))
    return (out, lse) if call.options.return_lse else out


def _run(call: _Call, arrays: dict[str, Array]) -> Array | tuple[Array, Array]:
    """Runs a call on a cache with lengths: as packed documents, or as a pool in which each row is a page."""
    q, k, v = (arrays[name] for name in "qkv")
    batch, count = q.shape[:2]
    options = call.keywords(arrays)
    if call.packed:
        documents, keywords = as_documents(q, k, v, rows_of(arrays), options)
        results = call.attention(*documents, **keywords)
    else:
        tables = _pool_tables((batch, count), k.shape[:2], rows_of(arrays))
        keywords = {name: options[name] for name in cache_rows.ON_POOL} | tables
        results = paged_attention(q.reshape(batch * count, *q.shape[2:]), k, v, **keywords, max_len_q=count)
    out, lse = results if options["return_lse"] else (results, None)
    out = out.reshape(batch, count, *out.shape[1:])
    # [heads, batch * q_len] -> [batch, heads, q_len]
    return out if lse is None else (out, lse.reshape(-1, batch, count).swapaxes(0, 1))


# Symbolic zeros tell whether anything is differentiated.
@partial(_from_pages.defjvp, symbolic_zeros=True)
def _derivative(call: _Call, primals: Any, tangents: Any) -> tuple[Any, Any]:
    """Returns the results and their tangents: those of the same call with key ranges, because pages have none."""
    zero = jax.custom_derivatives.SymbolicZero
    (arrays,), (moved,) = primals, tangents
    moving = {name: tangent for name, tangent in moved.items() if not isinstance(tangent, zero)}
    if not moving:
        results = _from_pages(call, arrays)
        return results, jax.tree.map(jnp.zeros_like, results)
    if "alibi_slopes" in moving:
        raise SpecError("alibi_slopes: expected no gradient, it is not defined here; use jax.lax.stop_gradient")

    def run(some: dict[str, Array]) -> Any:
        every = arrays | some
        qkv = every["q"], every["k"], every["v"]
        tensors, others = as_ranges(qkv, rows_of(every), call.keywords(every))
        results, on_mesh = call.attention(*tensors, **others), split_of_rows(arrays)
        if on_mesh is None:
            return results
        mesh, split = on_mesh
        return jax.sharding.reshard(results, jax.tree.map(partial(NamedSharding, mesh), _specs(call, split)))

    return jax.jvp(run, ({name: arrays[name] for name in moving},), (moving,))  # type: ignore[return-value]


def as_documents(
    q: Array, k: Array, v: Array, rows: CacheRows, options: Keywords
) -> tuple[tuple[Array, ...], Keywords]:
    """Returns the arrays and the keywords of ``attention`` for the same call on documents, see ``cache_rows``."""
    (batch, count), kv_len = q.shape[:2], k.shape[1]
    first = jnp.arange(0, batch * kv_len, kv_len, dtype=jnp.int32)
    queries = jnp.repeat(jnp.arange(0, batch * count + 1, count, dtype=jnp.int32), 2)
    return cache_rows.as_documents(jnp, (q, k, v), rows, (first, queries), options)


def shapes_of_documents(qkv: Shaped, options: Keywords) -> tuple[tuple[jax.ShapeDtypeStruct, ...], Keywords]:
    """Returns ``as_documents`` of arrays or their shapes, with shapes in place of arrays."""
    (batch, count), kv_len = qkv[0].shape[:2], qkv[1].shape[1]
    plain = {name: options[name] for name in (*PLAIN, "sinks", "alibi_slopes", "backend")}
    offsets = jax.ShapeDtypeStruct((2 * batch + 2,), jnp.int32)
    packed = tuple(jax.ShapeDtypeStruct((batch * each.shape[1], *each.shape[2:]), each.dtype) for each in qkv)
    return packed, plain | {"seq_info": SeqInfo(offsets, offsets, count, 2 * kv_len)}


def split_of_rows(arrays: dict[str, Array]) -> tuple[Any, Split] | None:
    """Returns the mesh with Explicit axes and how it splits the call, as it would split a dense one; or None.

    arrays: q, k, v, the rows, and others that the call has, by name.
    """
    mesh = partitioning.explicit_mesh(arrays)
    if mesh is None:
        return None
    q, *kv = (arrays[name] for name in "qkv")
    rows = [jax.ShapeDtypeStruct((q.shape[0], *each.shape[1:]), each.dtype) for each in kv]
    device = plan.device_name(q)
    spec = plan.spec(plan.metadata(Inputs(q, *rows)), device, check_options(Options()))
    call = MappedCall(BridgedCall("forward", "", device, spec, tuple(arrays)))
    return mesh, partitioning.split_on(mesh, call, list(arrays.values()))


def as_ranges(qkv: tuple[Array, Array, Array], rows: CacheRows, options: Keywords) -> tuple[tuple[Any, ...], Keywords]:
    """Returns the arrays and the keywords of ``attention`` for the same call with key ranges."""
    theirs = options["key_ranges"]
    theirs = None if theirs is None else plan.ranges_as_array(theirs)
    key_ranges, k, v = ranges(qkv, rows, theirs, options=options)
    return with_ranges(qkv[0], k, v, rows, key_ranges, options)


def rows_of(arrays: dict[str, Array]) -> CacheRows:
    """Returns the rows among the arrays of a call."""
    return CacheRows(*(arrays.get(name) for name in CacheRows._fields))


def ranges(
    qkv: tuple[Array, Array, Array], rows: CacheRows, theirs: Array | None, *, options: Keywords
) -> tuple[Array, Array, Array]:
    """Returns the key ranges of the call, and k and v as ``[batch, kv_len, ...]`` with 0 outside of each row.

    theirs: the caller's key ranges, or None.
    """
    q, k, v = qkv
    rows = cache_rows.clamped(rows, k.shape[1], k.shape[0])
    arrays = {"q": q, "k": k, "v": v, **rows._asdict(), "key_ranges": theirs}
    arrays = {name: array for name, array in arrays.items() if array is not None}
    run: Callable[..., Any] = partial(_visible, q.shape[1], k.shape[1], options)
    on_mesh = split_of_rows(arrays)
    if on_mesh is not None:
        mesh, split = on_mesh
        heads = "one" if theirs is None or theirs.shape[1] == 1 else "kv_heads"
        specs = split.spec(("batch", heads, "keys", "ranges", "ends")), split.spec(("batch", "keys"))
        run = partitioning.as_auto(run, mesh, specs)
    key_ranges, inside = run({name: array for name, array in arrays.items() if name not in "qkv"})
    if rows.cache_index is not None:
        read = _rows_read
        if on_mesh is not None:
            out = NamedSharding(mesh, split.spec(("batch", "keys", "kv_heads", "dim")))
            # Recomputed, because JAX cannot hand an index of Auto axes from a jitted function to its eager gradient.
            read = jax.checkpoint(partial(_rows_read, out=out))
        k, v = read(k, rows.cache_index), read(v, rows.cache_index)
    return key_ranges, _within(inside, k), _within(inside, v)


def _rows_read(cache: Array, index: Array, out: NamedSharding | None = None) -> Array:
    return cache.at[index].get(out_sharding=out)


def _visible(q_len: int, kv_len: int, options: Keywords, arrays: dict[str, Array]) -> tuple[Array, Array]:
    """Returns the key ranges of a call, and which keys belong to each row, bool ``[batch, kv_len]``."""
    key = jnp.arange(kv_len, dtype=jnp.int32)
    return cache_rows.key_ranges_of(jnp, key, rows_of(arrays), q_len, arrays.get("key_ranges"), options)


def _within(inside: Array, array: Array) -> Array:
    """Returns keys or values with 0 outside of each row."""
    inside = partitioning.split_as(inside, array)  # as ``where`` demands
    return jnp.where(inside[:, :, None, None], array, jnp.zeros((), array.dtype))


def with_ranges(
    q: ArrayOrShape, k: ArrayOrShape, v: ArrayOrShape, rows: CacheRows, key_ranges: ArrayOrShape, options: Keywords
) -> tuple[tuple[ArrayOrShape, ...], Keywords]:
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


def _offsets(q_len: int, kv_len: int, batch: int, kv_lengths: Array | None) -> Array:
    """Returns the key at which the first query of each row stands."""
    lengths = jnp.full((batch,), kv_len, jnp.int32) if kv_lengths is None else jnp.clip(kv_lengths, 0, kv_len)
    return lengths - q_len


_jit_from_pages = jax.jit(_from_pages, static_argnums=0, inline=True)
