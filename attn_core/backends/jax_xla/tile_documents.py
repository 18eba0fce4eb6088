"""The documents and operands of ``fixed_tiles``: where each document begins and ends, as traced integers."""

from __future__ import annotations

from typing import Any, NamedTuple

from attn_core.backends.jax_xla.tiles import zero_like
from attn_core.backends.shared.in_jax.offsets import safe_offsets
from attn_core.call.masks import band
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Inputs

QUERY_TILE = 64
"""Positions of a tile. One new token computes as many rows, because all products must have the same shape."""
KEY_TILE = 128


class Document(NamedTuple):
    """Where documents are: int32 ``[documents]`` each, or the numbers of one.

    q_row, k_row: the row of the batch. q_start, k_start: the first token in it. offset: the key at the position of the
    first query, counted from k_start.
    """

    q_row: Any
    q_start: Any
    q_count: Any
    k_row: Any
    k_start: Any
    k_count: Any
    offset: Any

    def at(self, index: Any) -> Document:
        """Returns one of them."""
        return Document(*(array[index] for array in self))

    def tiles(self) -> Any:
        """Returns the number of tiles of queries; 0 if the document has no queries or no keys."""
        import jax.numpy as jnp

        count = (self.q_count + self.offset % QUERY_TILE + QUERY_TILE - 1) // QUERY_TILE
        return jnp.where((self.q_count > 0) & (self.k_count > 0), count, 0)

    def tile_start(self, number: Any) -> Any:
        """Returns the query in a tile's first row, which may be below 0."""
        return number * QUERY_TILE - self.offset % QUERY_TILE

    def is_query(self, number: Any, group: int) -> Any:
        """Returns bool ``[group * QUERY_TILE, 1]``: which rows of a tile are queries."""
        import jax.numpy as jnp

        query = self.tile_start(number) + jnp.arange(QUERY_TILE, dtype=jnp.int32)
        return jnp.tile((query >= 0) & (query < self.q_count), group)[:, None]

    def blocks(self, spec: AttentionSpec, number: Any) -> tuple[Any, Any]:
        """Returns the first and the last (exclusive) tile of keys that some query of a tile sees."""
        import jax.numpy as jnp

        left, right, _ = band(spec)
        start = self.tile_start(number)
        first, last = jnp.maximum(start, 0), jnp.minimum(start + QUERY_TILE, self.q_count) - 1
        begin = 0 if left is None else jnp.maximum(0, first + self.offset - left)
        end = self.k_count if right is None else jnp.minimum(self.k_count, last + self.offset + right + 1)
        begin, end = jnp.asarray(begin, jnp.int32) // KEY_TILE, (end + KEY_TILE - 1) // KEY_TILE
        return begin, jnp.maximum(begin, end)

    def pairs(self, spec: AttentionSpec, number: Any, block: Any) -> tuple[Any, Any]:
        """Returns which pairs band and lengths show, and their distances from the diagonal."""
        import jax.numpy as jnp

        query = self.tile_start(number) + jnp.arange(QUERY_TILE, dtype=jnp.int32)
        key = block * KEY_TILE + jnp.arange(KEY_TILE, dtype=jnp.int32)
        edge = band(spec)
        distance = key - (query + self.offset)[:, None]
        seen = jnp.broadcast_to(key < self.k_count, distance.shape)
        if edge.left is not None:
            seen = seen & (distance >= -edge.left)
        if edge.right is not None:
            seen = seen & (distance <= edge.right)
        return seen, distance


def documents_of(spec: AttentionSpec, inputs: Inputs) -> Document:
    """Returns the documents of a call; a row with a mask without the padding at its ends."""
    import jax.numpy as jnp

    rows = jnp.arange(spec.batch, dtype=jnp.int32)
    if spec.packed:
        cu_q = safe_offsets(inputs.cu_seqlens_q, spec.q_len)
        cu_k = safe_offsets(inputs.cu_seqlens_k, spec.kv_len)
        counts = cu_q[1:] - cu_q[:-1], cu_k[1:] - cu_k[:-1]
        offset = counts[1] - counts[0] if spec.alignment == "bottom_right" else jnp.zeros_like(counts[0])
        row = jnp.zeros_like(counts[0])
        return Document(row, cu_q[:-1], counts[0], row, cu_k[:-1], counts[1], offset)
    if inputs.mask is not None or inputs.bias is not None:
        return _unpadded(spec, inputs, rows)
    full = jnp.full_like
    return Document(rows, full(rows, 0), full(rows, spec.q_len), rows, full(rows, 0), full(rows, spec.kv_len),
                    full(rows, band(spec).offset))  # fmt: skip


def _unpadded(spec: AttentionSpec, inputs: Inputs, rows: Any) -> Document:
    """Returns the rows without queries and keys at their ends that are in no visible pair: padding, on either side."""
    import jax.numpy as jnp

    edge = band(spec)
    seen = jnp.ones((1, 1, 1), bool)
    for table in (inputs.mask, None if inputs.bias is None else inputs.bias != -jnp.inf):
        if table is not None:
            seen = seen & table.any(1)
    queries, keys = (jnp.arange(length, dtype=jnp.int32) for length in (spec.q_len, spec.kv_len))
    seen = seen & edge.contains(queries[:, None], keys)
    seen = jnp.broadcast_to(seen, (spec.batch, spec.q_len, spec.kv_len))

    def ends(used: Any, length: int) -> tuple[Any, Any]:  # [b, length] -> first used, number up to the last used
        first = jnp.argmax(used, 1).astype(jnp.int32)
        last = length - jnp.argmax(used[:, ::-1], 1).astype(jnp.int32)
        return first, jnp.where(used.any(1), last - first, 0)

    (q_start, q_count), (k_start, k_count) = ends(seen.any(2), spec.q_len), ends(seen.any(1), spec.kv_len)
    return Document(rows, q_start, q_count, rows, k_start, k_count, edge.offset + q_start - k_start)


class Tiled(NamedTuple):
    """The operands of a call, padded so that every tile lies inside.

    q ``[b, QUERY_TILE + i + QUERY_TILE, h, g, d]``; k, v ``[b, h, j + KEY_TILE, dim]``; slopes ``[b or 1, h, g]``;
    sinks ``[h, g]``; mask, bias ``[b or 1, heads or 1, i or 1, j or 1]``, long axes padded alike. zero: see
    ``zero_like``; hidden_zero: an int32 0 that XLA cannot know.
    """

    spec: AttentionSpec
    q: Any
    k: Any
    v: Any
    slopes: Any
    sinks: Any
    mask: Any
    bias: Any
    zero: Any
    hidden_zero: Any

    def padded_rows(self, spec: AttentionSpec, array: Any) -> Any:
        """Returns ``[b, i, heads, channels]`` or without channels, or packed without b, as ``q`` is."""
        import jax.numpy as jnp

        array = array.reshape(spec.batch, spec.q_len, spec.num_kv_heads, spec.group_size, -1)
        return jnp.pad(array, ((0, 0), (QUERY_TILE, QUERY_TILE), (0, 0), (0, 0), (0, 0)))

    def queries(self, padded: Any, document: Document, head: Any, number: Any) -> Any:
        """Returns a tile ``[g * QUERY_TILE, channels]`` of one head; 0 in rows that are no queries."""
        import jax.numpy as jnp
        from jax import lax

        group, channels = padded.shape[3:]
        where = indices(document.q_row, document.q_start + document.tile_start(number) + QUERY_TILE, head, 0, 0)
        rows = lax.dynamic_slice(padded, where, (1, QUERY_TILE, 1, group, channels))[0, :, 0]
        rows = rows.transpose(1, 0, 2).reshape(group * QUERY_TILE, channels)
        return jnp.where(document.is_query(number, group), rows, 0)

    def keys(self, padded: Any, document: Document, head: Any, block: Any) -> Any:
        """Returns a tile ``[KEY_TILE, channels]`` of one head; 0 behind the document's end."""
        import jax.numpy as jnp
        from jax import lax

        where = indices(document.k_row, head, document.k_start + block * KEY_TILE, 0)
        rows = lax.dynamic_slice(padded, where, (1, 1, KEY_TILE, padded.shape[3]))[0, 0]
        real = block * KEY_TILE + jnp.arange(KEY_TILE, dtype=jnp.int32)[:, None] < document.k_count
        return jnp.where(real, rows, 0)

    def slopes_of(self, document: Document, head: Any) -> Any:
        """Returns the slopes ``[g]`` of a kv head."""
        return self.slopes[document.q_row if self.slopes.shape[0] > 1 else 0, head]

    def sinks_of(self, head: Any) -> Any:
        """Returns the sinks of a kv head for the rows of a tile, ``[g * QUERY_TILE, 1]``."""
        import jax.numpy as jnp
        from jax import lax

        return jnp.repeat(lax.dynamic_index_in_dim(self.sinks, head, 0, False), QUERY_TILE)[:, None]

    def table(self, padded: Any, document: Document, head: Any, number: Any, block: Any) -> Any:
        """Returns a tile of a mask or bias, ``[g * QUERY_TILE, KEY_TILE]``."""
        import jax.numpy as jnp
        from jax import lax

        batch, heads, queries, keys = padded.shape
        group = self.spec.group_size
        query = document.q_start + document.tile_start(number) + QUERY_TILE
        key = document.k_start + block * KEY_TILE
        where = indices(
            document.q_row if batch > 1 else 0,
            head * group if heads > 1 else 0,
            query if queries > 1 else 0,
            key if keys > 1 else 0,
        )
        sizes = (1, group if heads > 1 else 1, QUERY_TILE if queries > 1 else 1, KEY_TILE if keys > 1 else 1)
        part = lax.dynamic_slice(padded, where, sizes)[0]
        return jnp.broadcast_to(part, (group, QUERY_TILE, KEY_TILE)).reshape(group * QUERY_TILE, KEY_TILE)


def indices(*places: Any) -> tuple[Any, ...]:
    """Returns where a slice begins, all in int32.

    JAX reads a host integer as int64 if 64-bit numbers are enabled, and takes no mixture.
    """
    import jax.numpy as jnp

    return tuple(jnp.asarray(each, jnp.int32) for each in places)


def arrange(spec: AttentionSpec, inputs: Inputs, *more: Any) -> Tiled:
    """Returns the padded operands. more: arrays whose mesh axes a loop's results vary over, too."""
    import jax.numpy as jnp
    from jax import lax

    wide, heads = spec.lse_dtype, (spec.num_kv_heads, spec.group_size)

    def keys_of(array: Any) -> Any:
        rows = array.reshape(-1, spec.kv_len, spec.num_kv_heads, array.shape[-1]).astype(wide).transpose(0, 2, 1, 3)
        return jnp.pad(rows, ((0, 0), (0, 0), (0, KEY_TILE), (0, 0)))

    def padded(table: Any) -> Any:
        if table is None:
            return None
        queries, keys = (length > 1 for length in table.shape[2:])
        pads = (QUERY_TILE, QUERY_TILE) if queries else (0, 0), (0, KEY_TILE) if keys else (0, 0)
        return jnp.pad(table, ((0, 0), (0, 0), *pads))

    slopes = None if inputs.alibi_slopes is None else inputs.alibi_slopes.astype(wide).reshape(-1, *heads)
    sinks = None if inputs.sinks is None else inputs.sinks.astype(wide).reshape(heads)
    zero = zero_like((*inputs[:3], inputs.mask, inputs.bias, inputs.alibi_slopes, inputs.sinks, *more))
    sign = lax.bitcast_convert_type(inputs.q.reshape(-1)[:1].astype(jnp.float32), jnp.int32)[0] >> 31  # 0 or -1
    tiled = Tiled(spec, None, keys_of(inputs.k), keys_of(inputs.v), slopes, sinks, padded(inputs.mask),
                  padded(inputs.bias), zero, sign * (sign + 1))  # fmt: skip
    return tiled._replace(q=tiled.padded_rows(spec, inputs.q.astype(wide)))
