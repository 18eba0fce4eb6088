"""The keys that each query may see, and blocks of queries and keys, for attention in XLA operations.

Axes in the comments and einsums: b batch, h kv head, g query head of that kv head, i query, j key, d channel of q and
k, e channel of v.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from attn_core.backends.jax_xla.products import all_finite, finite_only
from attn_core.backends.shared.in_jax import document_numbers, safe_offsets
from attn_core.call.functions import aux_of
from attn_core.call.key_ranges import contains
from attn_core.call.kinds import is_number
from attn_core.call.masks import band
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Inputs

if TYPE_CHECKING:
    import jax


class BlockSizes(NamedTuple):
    """The number of queries and keys (tokens) in a block."""

    queries: int
    keys: int


class RowKeys(NamedTuple):
    """For each query, int32 ``[q_len]``: the keys ``first <= j < stop`` it may see, and the key on its diagonal."""

    first: jax.Array
    stop: jax.Array
    diagonal: jax.Array


class XlaOperands(NamedTuple):
    """The tensors of a call, heads first, its block sizes, and ``zero`` (see ``zero_like``).

    q ``[b, h, g, i, d]``, k ``[b, h, j, d]``, v ``[b, h, j, e]``; mask and bias ``[b, h, g, i, j]`` and slopes
    ``[b, h, g, 1, 1]``, with 1 on any axis along which they broadcast; sinks ``[h, g, 1]``; rng uint32 ``[2]``;
    key_ranges int32 ``[b or 1, h or 1, 1, j, ranges, 2]``; aux the arrays of the call's functions.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    mask: jax.Array | None
    bias: Any
    slopes: jax.Array | None
    sinks: Any
    rng: jax.Array | None
    zero: Any
    blocks: BlockSizes
    key_ranges: Any = None
    aux: tuple[jax.Array, ...] = ()


class ScoreTile(NamedTuple):
    """A block of queries against a block of keys: the start of each (traced) and its length (static).

    The last block of an axis is moved back to end with it; only keys from ``fresh_key`` on are new to this tile.
    """

    query: int | jax.Array
    queries: int
    key: int | jax.Array
    keys: int
    fresh_key: int | jax.Array


class Summand(NamedTuple):
    """Values for a weighted sum: ``clean`` has 0 for NaN and Inf; ``finite``: whether there were none."""

    values: jax.Array
    clean: jax.Array
    finite: jax.Array


def block_sizes(spec: AttentionSpec, largest: BlockSizes) -> BlockSizes:
    """Returns the fewest blocks that are no larger, all of nearly one size. A symbolic length is one block."""

    def size(length: Any, limit: int) -> Any:
        return -(-length // -(-length // limit)) if is_number(length) else length

    return BlockSizes(size(spec.q_len, largest.queries), size(spec.kv_len, largest.keys))


def rows_of(
    spec: AttentionSpec, cu_seqlens_q: jax.Array | None = None, cu_seqlens_k: jax.Array | None = None
) -> RowKeys:
    """Returns the keys that each query may see. Clamps the offsets, which cannot be checked on a device."""
    import jax.numpy as jnp

    query = jnp.arange(spec.q_len, dtype=jnp.int32)
    q_start, q_stop, k_start, k_stop = (jnp.full_like(query, edge) for edge in (0, spec.q_len, 0, spec.kv_len))
    if spec.packed:
        cu_q, cu_k = safe_offsets(cu_seqlens_q, spec.q_len), safe_offsets(cu_seqlens_k, spec.kv_len)  # type: ignore[arg-type]
        document = document_numbers(cu_q[1:], spec.q_len)
        q_start, q_stop, k_start, k_stop = (cu[document + end] for cu in (cu_q, cu_k) for end in (0, 1))
    offset = (k_stop - k_start) - (q_stop - q_start) if spec.alignment == "bottom_right" else 0
    diagonal = query - q_start + offset + k_start
    left, right, _ = band(spec)
    first = k_start if left is None else jnp.maximum(k_start, diagonal - left)
    stop = k_stop if right is None else jnp.minimum(k_stop, diagonal + right + 1)
    return RowKeys(first, stop, diagonal)


def arrange(spec: AttentionSpec, inputs: Inputs, blocks: BlockSizes, *, loops: bool = True) -> XlaOperands:
    """Returns the inputs with heads first. loops: whether a loop needs ``zero``."""
    import jax.numpy as jnp

    heads = (spec.num_kv_heads, spec.group_size)
    keys = (spec.batch, spec.kv_len, spec.num_kv_heads)

    def per_head(array: jax.Array | None, shape: tuple[int, ...] | None) -> jax.Array | None:
        # [b, heads or 1, i, j] -> [b, h, g, i, j]
        if array is None or shape is None:
            return None
        return array.reshape(shape[0], *(heads if shape[1] == spec.num_heads else (1, 1)), *shape[2:])

    slopes_shape = None if spec.alibi_shape is None else (*(1,) * (2 - len(spec.alibi_shape)), *spec.alibi_shape, 1, 1)
    slopes = per_head(inputs.alibi_slopes, slopes_shape)
    bias = per_head(inputs.bias, spec.bias_shape)
    return XlaOperands(
        queries_first(spec, inputs.q),
        inputs.k.reshape(*keys, spec.head_dim).swapaxes(1, 2),
        inputs.v.reshape(*keys, spec.value_dim).swapaxes(1, 2),
        per_head(inputs.mask, spec.mask_shape),
        bias,
        None if slopes is None else slopes.astype(spec.lse_dtype),
        inputs.sinks.reshape(*heads, 1).astype(spec.lse_dtype) if spec.sinks else None,
        inputs.rng.astype(jnp.uint32) if spec.dropout else None,
        zero_like(inputs) if loops else None,
        blocks,
        None if inputs.key_ranges is None else inputs.key_ranges[:, :, None],
        aux_of(inputs),
    )


def zero_like(arrays: Iterable[jax.Array | None]) -> jax.Array:
    """Returns a zero that varies over an array's mesh axes: jax.shard_map checks the types of loop carries."""
    import jax.numpy as jnp

    def zero(array: jax.Array) -> jax.Array:
        # An empty array has no first element, and a symbolic one may have none.
        known = all(map(is_number, array.shape)) and 0 not in array.shape
        # A select instead of ``0 * array``, which would be NaN for a NaN.
        return jnp.where(False, array[(0,) * array.ndim], 0) if known else jnp.where(False, array, 0).sum()

    return sum(zero(array).astype(jnp.float32) for array in arrays if array is not None)  # type: ignore[return-value]


def summands(*arrays: jax.Array) -> tuple[Summand, ...]:
    """Returns the arrays as summands. One test serves all of them."""
    finite = all_finite(*arrays)
    return tuple(Summand(array, finite_only(array), finite) for array in arrays)


def contain(subscripts: str, total: jax.Array, seen: jax.Array, summand: Summand) -> jax.Array:
    """Returns a sum over clean values, with NaN where a NaN or Inf is visible; hidden ones do not affect it.

    Rows that see no NaN keep their bits, because the total is computed from clean values in both cases.
    """
    import jax.numpy as jnp
    from jax import lax

    def marked() -> jax.Array:
        sides = (seen, ~jnp.isfinite(summand.values))
        met = jnp.einsum(subscripts, *(side.astype(jnp.float32) for side in sides))
        return jnp.where(met > 0, jnp.nan, total)

    return lax.cond(summand.finite, lambda: total, marked)


def tile_at(spec: AttentionSpec, call: XlaOperands, start: int | jax.Array, index: int | jax.Array) -> ScoreTile:
    """Returns the tile of the queries from ``start`` on and the key block ``index``."""
    import jax.numpy as jnp

    queries, keys = call.blocks
    return ScoreTile(start, queries, jnp.minimum(index * keys, spec.kv_len - keys), keys, index * keys)


def seen_in_ranges(call: XlaOperands, tile: ScoreTile) -> jax.Array:
    """Returns which pairs of the tile the call's key ranges show, ``[b or 1, h or 1, 1, i, j]``."""
    import jax.numpy as jnp

    ranges = cut(call.key_ranges, tile.key, tile.keys, axis=3)
    return contains(ranges, tile.query + jnp.arange(tile.queries, dtype=jnp.int32))


def key_blocks(
    spec: AttentionSpec, call: XlaOperands, rows: RowKeys, query: int | jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the half-open range of key blocks that any of the rows, which begin at ``query``, may see."""
    import jax.numpy as jnp

    keys = call.blocks.keys
    some = rows.first < rows.stop
    # Rows that see no key must not widen the range. If no row sees one, the range is empty.
    start = jnp.where(some, rows.first, spec.kv_len).min(initial=spec.kv_len)
    stop = jnp.where(some, rows.stop, 0).max(initial=0)
    if call.key_ranges is not None:
        starts, stops = call.key_ranges[..., 0], call.key_ranges[..., 1]
        meets = (starts < query + call.blocks.queries) & (stops > query) & (starts < stops)
        meets, key = meets.any((0, 1, 2, 4)), jnp.arange(spec.kv_len, dtype=jnp.int32)
        start = jnp.maximum(start, jnp.where(meets, key, spec.kv_len).min(initial=spec.kv_len))
        stop = jnp.minimum(stop, jnp.where(meets, key + 1, 0).max(initial=0))
    return start // keys, (stop + keys - 1) // keys


def cut(array: jax.Array, start: int | jax.Array, size: int, axis: int) -> jax.Array:
    """Slices ``size`` elements out of an axis, from a traced ``start`` on."""
    from jax import lax

    return array if array.shape[axis] == size else lax.dynamic_slice_in_dim(array, start, size, axis)


def cut_rows(rows: RowKeys, start: int | jax.Array, size: int) -> RowKeys:
    return RowKeys(*(cut(array, start, size, axis=0) for array in rows))


def cut_summand(summand: Summand, start: int | jax.Array, size: int, axis: int) -> Summand:
    values, clean = (cut(array, start, size, axis) for array in (summand.values, summand.clean))
    return Summand(values, clean, summand.finite)


def cut_tile(array: jax.Array, tile: ScoreTile) -> jax.Array:
    """Slices the tile out of ``[b, h, g, i, j]``; axes of length 1 broadcast."""
    for axis, start, size in ((3, tile.query, tile.queries), (4, tile.key, tile.keys)):
        array = array if array.shape[axis] == 1 else cut(array, start, size, axis)
    return array


def add_at(total: jax.Array, part: jax.Array, starts: dict[int, int | jax.Array]) -> jax.Array:
    """Adds a part to the array, at ``start`` on each named axis and at 0 on the others."""
    import jax.numpy as jnp
    from jax import lax

    where = tuple(jnp.asarray(starts.get(axis, 0), jnp.int32) for axis in range(total.ndim))
    return lax.dynamic_update_slice(total, lax.dynamic_slice(total, where, part.shape) + part, where)


def queries_first(spec: AttentionSpec, array: jax.Array) -> jax.Array:
    """``[b, i, heads, channels]``, or packed without b, as ``[b, h, g, i, channels]``."""
    heads = (spec.num_kv_heads, spec.group_size)
    return array.reshape(spec.batch, spec.q_len, *heads, array.shape[-1]).transpose(0, 2, 3, 1, 4)


def tokens_first(spec: AttentionSpec, array: jax.Array) -> jax.Array:
    """``[b, h, g, i, channels]`` as ``[b, i, heads, channels]``."""
    return array.transpose(0, 3, 1, 2, 4).reshape(spec.batch, spec.q_len, spec.num_heads, array.shape[-1])


def add_to_bias(total: jax.Array, dlogits: jax.Array, tile: ScoreTile) -> jax.Array:
    """Sums over the axes along which the bias was broadcast, and adds at the tile's position on the others."""
    axes = tuple(axis for axis, size in enumerate(total.shape) if size == 1)
    starts = {axis: start for axis, start in ((3, tile.query), (4, tile.key)) if total.shape[axis] != 1}
    return add_at(total, dlogits.sum(axes, keepdims=True), starts)
