"""Attention in tiles of one size: a result's bits then depend on nothing but the tokens that it belongs to.

A document (a row of a batch, one of packed documents, or a sequence in pages) is cut into tiles of QUERY_TILE positions
and KEY_TILE keys, both counted from the document's first key. So a token is in the same row of the same tile in a whole
prompt, in a chunk of it and alone. Loops run over heads of documents, tiles of queries and tiles of keys, and one body
computes a tile of one head: XLA compiles the same products and sums for every batch. No loop has a length that XLA
knows, because it would compile a loop of one round in another way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from attn_core.backends.jax_xla.products import product
from attn_core.backends.jax_xla.scores import exact_lse, joined, log_weights, with_sink
from attn_core.backends.jax_xla.tiles import zero_like
from attn_core.backends.shared.in_jax import safe_offsets
from attn_core.call.masks import band
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Gradients, Inputs

if TYPE_CHECKING:
    import jax

QUERY_TILE = 64
"""Positions of a tile. One new token computes as many rows, because all products must have the same shape."""
KEY_TILE = 128


class Document(NamedTuple):
    """Where documents are: int32 ``[documents]`` each, or the numbers of one.

    q_row, k_row: the row of the batch. q_start, k_start: the first token in it. offset: the key at the position of the
    first query, counted from k_start.
    """

    q_row: jax.Array
    q_start: jax.Array
    q_count: jax.Array
    k_row: jax.Array
    k_start: jax.Array
    k_count: jax.Array
    offset: jax.Array

    def at(self, index: jax.Array) -> Document:
        """Returns one of them."""
        return Document(*(array[index] for array in self))

    def tiles(self) -> jax.Array:
        """Returns the number of tiles of queries; 0 if the document has no queries or no keys."""
        import jax.numpy as jnp

        count = (self.q_count + self.offset % QUERY_TILE + QUERY_TILE - 1) // QUERY_TILE
        return jnp.where((self.q_count > 0) & (self.k_count > 0), count, 0)

    def tile_start(self, number: jax.Array) -> jax.Array:
        """Returns the query in a tile's first row, which may be below 0."""
        return number * QUERY_TILE - self.offset % QUERY_TILE

    def is_query(self, number: jax.Array, group: int) -> jax.Array:
        """Returns bool ``[group * QUERY_TILE, 1]``: which rows of a tile are queries."""
        import jax.numpy as jnp

        query = self.tile_start(number) + jnp.arange(QUERY_TILE, dtype=jnp.int32)
        return jnp.tile((query >= 0) & (query < self.q_count), group)[:, None]

    def blocks(self, spec: AttentionSpec, number: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the first and the last (exclusive) tile of keys that some query of a tile sees."""
        import jax.numpy as jnp

        left, right, _ = band(spec)
        start = self.tile_start(number)
        first, last = jnp.maximum(start, 0), jnp.minimum(start + QUERY_TILE, self.q_count) - 1
        begin = 0 if left is None else jnp.maximum(0, first + self.offset - left)
        end = self.k_count if right is None else jnp.minimum(self.k_count, last + self.offset + right + 1)
        begin, end = jnp.asarray(begin, jnp.int32) // KEY_TILE, (end + KEY_TILE - 1) // KEY_TILE
        return begin, jnp.maximum(begin, end)

    def pairs(self, spec: AttentionSpec, number: jax.Array, block: jax.Array) -> tuple[jax.Array, jax.Array]:
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
    """Returns the documents of a call: packed ones, or the rows of a batch.

    A mask or a bias may hide padding at the ends of a row. Such a row is cut to the tokens between, because tiles are
    counted from the first key: so a token has the bits that it has without the padding.
    """
    import jax.numpy as jnp

    rows = jnp.arange(spec.batch, dtype=jnp.int32)
    if spec.packed:
        return _packed(spec, inputs)
    if inputs.mask is not None or inputs.bias is not None:
        return _unpadded(spec, inputs, rows)
    zeros, full = jnp.zeros_like(rows), jnp.full_like
    return Document(
        q_row=rows,
        q_start=zeros,
        q_count=full(rows, spec.q_len),
        k_row=rows,
        k_start=zeros,
        k_count=full(rows, spec.kv_len),
        offset=full(rows, band(spec).offset),
    )


def _packed(spec: AttentionSpec, inputs: Inputs) -> Document:
    """Returns packed documents, all of which are in row 0."""
    import jax.numpy as jnp

    cu_q = safe_offsets(inputs.cu_seqlens_q, spec.q_len)
    cu_k = safe_offsets(inputs.cu_seqlens_k, spec.kv_len)
    queries, keys = cu_q[1:] - cu_q[:-1], cu_k[1:] - cu_k[:-1]
    offset = keys - queries if spec.alignment == "bottom_right" else jnp.zeros_like(keys)
    row = jnp.zeros_like(queries)
    return Document(row, cu_q[:-1], queries, row, cu_k[:-1], keys, offset)


def _unpadded(spec: AttentionSpec, inputs: Inputs, rows: jax.Array) -> Document:
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

    def ends(used: jax.Array, length: int) -> tuple[jax.Array, jax.Array]:
        # [b, length] -> first used, number up to the last used
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
    k: jax.Array
    v: jax.Array
    slopes: Any
    sinks: jax.Array | None
    mask: jax.Array | None
    bias: jax.Array | None
    zero: jax.Array
    hidden_zero: jax.Array

    def padded_rows(self, spec: AttentionSpec, array: jax.Array) -> jax.Array:
        """Returns ``[b, i, heads, channels]`` or without channels, or packed without b, as ``q`` is."""
        import jax.numpy as jnp

        array = array.reshape(spec.batch, spec.q_len, spec.num_kv_heads, spec.group_size, -1)
        return jnp.pad(array, ((0, 0), (QUERY_TILE, QUERY_TILE), (0, 0), (0, 0), (0, 0)))

    def queries(self, padded: jax.Array, document: Document, head: jax.Array, number: jax.Array) -> jax.Array:
        """Returns a tile ``[g * QUERY_TILE, channels]`` of one head; 0 in rows that are no queries."""
        import jax.numpy as jnp
        from jax import lax

        group, channels = padded.shape[3:]
        where = indices(document.q_row, document.q_start + document.tile_start(number) + QUERY_TILE, head, 0, 0)
        rows = lax.dynamic_slice(padded, where, (1, QUERY_TILE, 1, group, channels))[0, :, 0]
        rows = rows.transpose(1, 0, 2).reshape(group * QUERY_TILE, channels)
        return jnp.where(document.is_query(number, group), rows, 0)

    def keys(self, padded: jax.Array, document: Document, head: jax.Array, block: jax.Array) -> jax.Array:
        """Returns a tile ``[KEY_TILE, channels]`` of one head; 0 behind the document's end."""
        import jax.numpy as jnp
        from jax import lax

        where = indices(document.k_row, head, document.k_start + block * KEY_TILE, 0)
        rows = lax.dynamic_slice(padded, where, (1, 1, KEY_TILE, padded.shape[3]))[0, 0]
        real = block * KEY_TILE + jnp.arange(KEY_TILE, dtype=jnp.int32)[:, None] < document.k_count
        return jnp.where(real, rows, 0)

    def slopes_of(self, document: Document, head: jax.Array) -> jax.Array:
        """Returns the slopes ``[g]`` of a kv head."""
        return self.slopes[document.q_row if self.slopes.shape[0] > 1 else 0, head]

    def sinks_of(self, head: jax.Array) -> jax.Array:
        """Returns the sinks of a kv head for the rows of a tile, ``[g * QUERY_TILE, 1]``."""
        import jax.numpy as jnp
        from jax import lax

        return jnp.repeat(lax.dynamic_index_in_dim(self.sinks, head, 0, False), QUERY_TILE)[:, None]

    def table(
        self, padded: jax.Array, document: Document, head: jax.Array, number: jax.Array, block: jax.Array
    ) -> jax.Array:
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


def indices(*places: int | jax.Array) -> tuple[jax.Array, ...]:
    """Returns where a slice begins, all in int32.

    JAX reads a host integer as int64 if 64-bit numbers are enabled, and takes no mixture.
    """
    import jax.numpy as jnp

    return tuple(jnp.asarray(each, jnp.int32) for each in places)


def arrange(spec: AttentionSpec, inputs: Inputs, *more: jax.Array) -> Tiled:
    """Returns the padded operands. more: arrays whose mesh axes a loop's results vary over, too."""
    import jax.numpy as jnp
    from jax import lax

    wide, heads = spec.lse_dtype, (spec.num_kv_heads, spec.group_size)

    def keys_of(array: jax.Array) -> jax.Array:
        rows = array.reshape(-1, spec.kv_len, spec.num_kv_heads, array.shape[-1]).astype(wide).transpose(0, 2, 1, 3)
        return jnp.pad(rows, ((0, 0), (0, 0), (0, KEY_TILE), (0, 0)))

    def padded(table: jax.Array | None) -> jax.Array | None:
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


def forward(spec: AttentionSpec, inputs: Inputs, documents: Document | None = None) -> tuple[jax.Array, jax.Array]:
    """See ``Backend.forward``. Traceable.

    Args:
        documents: None for those of the call. With documents k and v are ``[rows, kv_len, kv_heads, dim]``, as many
            rows as there are documents.
    """
    import jax.numpy as jnp
    from jax import lax

    if 1 in (spec.head_dim, spec.value_dim):
        wider = _of_two_channels(spec)
        out, lse = forward(wider, _filled_inputs(wider, inputs), documents)
        return out[..., : spec.value_dim], lse
    tiled = arrange(spec, inputs)
    documents = documents_of(spec, inputs) if documents is None else documents
    shape = tiled.q.shape[:4]  # [b, i, h, g]
    out = jnp.zeros((*shape, spec.value_dim), spec.dtype) + tiled.zero.astype(spec.dtype)
    lse = jnp.full((*shape, 1), -jnp.inf, spec.lse_dtype) + tiled.zero.astype(spec.lse_dtype)

    def tile(
        number: jax.Array, document: Document, head: jax.Array, results: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, ...]:
        start = document.tile_start(number)
        part = _attend(spec, tiled, document, head, number)
        return tuple(
            _put(whole, rows.astype(whole.dtype), document, head, start)
            for whole, rows in zip(results, part, strict=True)
        )

    out, lse = _over_tiles(spec, tiled, documents, tile, (out, lse))
    heads = (spec.batch, spec.q_len, spec.num_heads)
    out, lse = (array[:, QUERY_TILE : QUERY_TILE + spec.q_len] for array in (out, lse))
    lse = lse.reshape(heads).transpose(0, 2, 1)
    return out.reshape(spec.out_shape), lax.stop_gradient(lse).reshape(spec.lse_shape)


def _over_tiles(
    spec: AttentionSpec,
    tiled: Tiled,
    documents: Document,
    tile: Callable[..., tuple[jax.Array, ...]],
    results: tuple[jax.Array, ...],
) -> tuple[jax.Array, ...]:
    """Runs ``tile(number, document, head, results)`` for each tile of queries of each head of each document."""
    from jax import lax

    def of_head(index: jax.Array, results: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        document = documents.at(index // spec.num_kv_heads)
        head = index % spec.num_kv_heads
        return lax.fori_loop(
            0, document.tiles(), lambda number, results: tile(number, document, head, results), results
        )

    # An int32 0 of the data, because XLA would unroll a loop of one round.
    return lax.fori_loop(0, documents.q_start.shape[0] * spec.num_kv_heads + tiled.hidden_zero, of_head, results)


def _attend(
    spec: AttentionSpec, tiled: Tiled, document: Document, head: jax.Array, number: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns out ``[g * QUERY_TILE, value_dim]`` and lse ``[g * QUERY_TILE, 1]`` of a tile of queries."""
    import jax.numpy as jnp
    from jax import lax

    q = tiled.queries(tiled.q, document, head, number)

    def step(block: jax.Array, state: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        top, total, summed = state
        scores, seen, _ = _scores(spec, tiled, document, head, number, block, q)
        new_top = jnp.maximum(top, scores.max(-1, keepdims=True))
        base = jnp.where(new_top == -jnp.inf, 0, new_top)
        weights, fade = jnp.exp(scores - base), jnp.exp(top - base)
        part = _contained("ij,je->ie", weights, seen, tiled.keys(tiled.v, document, head, block), spec.lse_dtype)
        return new_top, fade * total + weights.sum(-1, keepdims=True), fade * summed + part

    zero = jnp.zeros((q.shape[0], 1), spec.lse_dtype) + tiled.zero.astype(spec.lse_dtype)
    state = (zero - jnp.inf, zero, jnp.broadcast_to(zero, (q.shape[0], spec.value_dim)))
    top, total, summed = lax.fori_loop(*document.blocks(spec, number), step, state)
    empty = total == 0
    if tiled.sinks is not None:
        sinks = tiled.sinks_of(head)
        top, total, fade = joined(sinks, top, total, jnp.maximum(top, sinks))
        summed = fade * summed
    total = jnp.where(empty, 1, total)
    out = jnp.where(empty, 0, summed / total)
    # -0 becomes 0, because its sign depends on how many empty tiles were added.
    out = jnp.where(jnp.isnan(out), jnp.nan, jnp.where(out == 0, 0, out))
    lse = jnp.where(empty, -jnp.inf, top + jnp.log(total))
    return out, jnp.where(jnp.isnan(lse), jnp.nan, lse)


def _scores(
    spec: AttentionSpec,
    tiled: Tiled,
    document: Document,
    head: jax.Array,
    number: jax.Array,
    block: jax.Array,
    q: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Returns the scores ``[g * QUERY_TILE, KEY_TILE]``, -inf where hidden; what is seen; the softcap's slope."""
    import jax.numpy as jnp

    scores = spec.scale * product("id,jd->ij", q, tiled.keys(tiled.k, document, head, block), spec.lse_dtype)  # type: ignore[operator]
    slope = None
    if spec.softcap is not None:
        bent = jnp.tanh(scores / spec.softcap)
        scores, slope = spec.softcap * bent, 1 - bent * bent
    seen, distance = document.pairs(spec, number, block)
    group = spec.group_size
    if tiled.slopes is not None:
        scores = scores - jnp.repeat(tiled.slopes_of(document, head), QUERY_TILE)[:, None] * jnp.tile(
            jnp.abs(distance).astype(scores.dtype), (group, 1)
        )
    seen = jnp.tile(seen, (group, 1))
    if tiled.bias is not None:
        bias = tiled.table(tiled.bias, document, head, number, block)
        scores, seen = scores + bias.astype(scores.dtype), seen & (bias != -jnp.inf)
    if tiled.mask is not None:
        seen = seen & tiled.table(tiled.mask, document, head, number, block)
    return jnp.where(seen, scores, -jnp.inf), seen, slope


def _sums(
    spec: AttentionSpec, tiled: Tiled, document: Document, head: jax.Array, number: jax.Array, q: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the largest score of each row of a tile of queries, and the sum of exp(score - largest)."""
    import jax.numpy as jnp
    from jax import lax

    def step(block: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        scores, _, _ = _scores(spec, tiled, document, head, number, block, q)
        top = jnp.maximum(state[0], scores.max(-1, keepdims=True))
        base = jnp.where(top == -jnp.inf, 0, top)
        return top, jnp.exp(state[0] - base) * state[1] + jnp.exp(scores - base).sum(-1, keepdims=True)

    zero = jnp.zeros((q.shape[0], 1), spec.lse_dtype) + tiled.zero.astype(spec.lse_dtype)
    sums = lax.fori_loop(*document.blocks(spec, number), step, (zero - jnp.inf, zero))
    return with_sink(None if tiled.sinks is None else tiled.sinks_of(head), *sums)


def _contained(subscripts: str, weights: jax.Array, seen: jax.Array, values: jax.Array, dtype: str) -> jax.Array:
    """Returns the product of weights and values, in which a NaN or Inf reaches only the sums that see it."""
    import jax.numpy as jnp
    from jax import lax

    finite = jnp.isfinite(values)
    total = product(subscripts, weights, jnp.where(finite, values, 0), dtype)

    def marked() -> jax.Array:
        met = product(subscripts, seen.astype(dtype), (~finite).astype(dtype), dtype)
        return jnp.where(met > 0, jnp.nan, total)

    return lax.cond(finite.all(), lambda: total, marked)


def _put(whole: jax.Array, rows: jax.Array, document: Document, head: jax.Array, start: jax.Array) -> jax.Array:
    """Writes a tile's rows that are queries of the document into ``[b, i, h, g, channels]``."""
    import jax.numpy as jnp
    from jax import lax

    group, channels = whole.shape[3], whole.shape[4]
    rows = rows.reshape(group, QUERY_TILE, channels).transpose(1, 0, 2)[None, :, None]
    where = indices(document.q_row, document.q_start + start + QUERY_TILE, head, 0, 0)
    before = lax.dynamic_slice(whole, where, rows.shape)
    query = start + jnp.arange(QUERY_TILE, dtype=jnp.int32)
    real = ((query >= 0) & (query < document.q_count))[None, :, None, None, None]
    return lax.dynamic_update_slice(whole, jnp.where(real, rows, before), where)


def _add_keys(whole: jax.Array, part: jax.Array, document: Document, head: jax.Array, block: jax.Array) -> jax.Array:
    """Adds a tile ``[KEY_TILE, channels]`` to the document's keys in ``[b, h, j, channels]``."""
    import jax.numpy as jnp
    from jax import lax

    where = indices(document.k_row, head, document.k_start + block * KEY_TILE, 0)
    before = lax.dynamic_slice(whole, where, (1, 1, *part.shape))
    real = block * KEY_TILE + jnp.arange(KEY_TILE, dtype=jnp.int32)[:, None] < document.k_count
    return lax.dynamic_update_slice(whole, jnp.where(real, before + part, before), where)


def backward(
    spec: AttentionSpec, inputs: Inputs, out: jax.Array, lse: jax.Array, dout: jax.Array, dlse: jax.Array | None
) -> Gradients:
    """See ``Backend.backward``. Traceable."""
    import jax.numpy as jnp
    from jax import lax

    if 1 in (spec.head_dim, spec.value_dim):  # the comment below says why
        wider = _of_two_channels(spec)
        out, dout = (_filled(array, wider.value_dim) for array in (out, dout))
        found = backward(wider, _filled_inputs(wider, inputs), out, lse, dout, dlse)
        dq, dk, dv = found.dq[..., : spec.head_dim], found.dk[..., : spec.head_dim], found.dv[..., : spec.value_dim]
        return found._replace(dq=dq, dk=dk, dv=dv)
    tiled, documents, wide = arrange(spec, inputs, lse, dout), documents_of(spec, inputs), spec.lse_dtype

    def rows_last(array: jax.Array) -> jax.Array:  # [b, heads, i], or packed without b -> [b, i, heads]
        return array.reshape(spec.batch, spec.num_heads, spec.q_len).transpose(0, 2, 1).astype(wide)

    lse = rows_last(lse)
    dlse = jnp.zeros_like(lse) if dlse is None else rows_last(dlse)
    saved = [tiled.padded_rows(spec, array) for array in (dout.astype(wide), out.astype(wide), lse, dlse)]
    start_values = [jnp.zeros(array.shape, wide) + tiled.zero.astype(wide) for array in (tiled.q, tiled.k, tiled.v)]

    def tile(
        number: jax.Array, document: Document, head: jax.Array, totals: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, ...]:
        """Adds what a tile of queries of one head contributes: its dq as a whole, and its shares of dk and dv."""
        dq, *others = totals
        q, here, row_out, row_lse, row_dlse = (
            tiled.queries(array, document, head, number) for array in (tiled.q, *saved)
        )
        # The term that all logits of a row share. Here, because the shape of a sum decides its order.
        row_term = jnp.where(row_lse == -jnp.inf, 0, row_dlse - (here * row_out).sum(-1, keepdims=True))
        sums = partial(_sums, spec, tiled, document, head, number, q)
        row_lse, rest = exact_lse(spec, row_lse, sums, (tiled.zero,))
        # A row that sees no key, and one that is no query: exp(s - inf) = 0.
        real = document.is_query(number, spec.group_size)
        row_lse = jnp.where(real & (row_lse != -jnp.inf), row_lse, jnp.inf)

        def step(
            block: jax.Array, sums: tuple[jax.Array, jax.Array, jax.Array]
        ) -> tuple[jax.Array, jax.Array, jax.Array]:
            """Adds a tile of keys. of_tile: the sums of dq."""
            of_tile, dk, dv = sums
            k, v = (tiled.keys(array, document, head, block) for array in (tiled.k, tiled.v))
            scores, seen, slope = _scores(spec, tiled, document, head, number, block, q)
            seen = seen & real
            weights = jnp.where(seen, jnp.exp(log_weights(scores, row_lse, rest)), 0)
            dscores = jnp.where(seen, weights * (product("ie,je->ij", here, v, wide) + row_term), 0)
            dscores = dscores if slope is None else jnp.where(seen, dscores * slope, 0)
            of_tile = of_tile + _contained("ij,jd->id", dscores, seen, k, wide)
            dk = _add_keys(dk, _contained("ij,id->jd", dscores, seen, q, wide), document, head, block)
            dv = _add_keys(dv, _contained("ij,ie->je", weights, seen, here, wide), document, head, block)
            return of_tile, dk, dv

        of_tile = jnp.zeros(q.shape, wide) + tiled.zero.astype(wide)
        of_tile, *others = lax.fori_loop(*document.blocks(spec, number), step, (of_tile, *others))
        return _put(dq, of_tile, document, head, document.tile_start(number)), *others

    dq, dk, dv = _over_tiles(spec, tiled, documents, tile, tuple(start_values))
    # Without the padding: a tile of rows on either side of the queries, and one behind the keys.
    dq = spec.scale * dq[:, QUERY_TILE : QUERY_TILE + spec.q_len]  # type: ignore[operator]
    dk, dv = (array[:, :, : spec.kv_len].transpose(0, 2, 1, 3) for array in (spec.scale * dk, dv))  # type: ignore[operator]
    dsinks = None
    if spec.sinks:
        heads = (spec.batch, spec.q_len, spec.num_heads)
        term = dlse - (dout.astype(wide) * out.astype(wide)).sum(-1).reshape(heads)
        weights = jnp.where(lse == -jnp.inf, 0, jnp.exp(inputs.sinks.astype(wide) - lse))
        term = jnp.where(lse == -jnp.inf, 0, term)
        dsinks = (weights * term).sum((0, 1)).astype(inputs.sinks.dtype)
    pairs = zip((dq, dk, dv), inputs[:3], strict=True)
    dq, dk, dv = (array.astype(like.dtype).reshape(like.shape) for array, like in pairs)
    return Gradients(dq, dk, dv, dsinks=dsinks)


# Calls of one channel as calls of two: XLA makes sums of a product of one column, and fuses them with what is beside
# them in a program, so their bits would depend on the program.


def _of_two_channels(spec: AttentionSpec) -> AttentionSpec:
    """Returns the call with two channels instead of one."""
    return replace(spec, head_dim=max(spec.head_dim, 2), value_dim=max(spec.value_dim, 2))


def _filled_inputs(wider: AttentionSpec, inputs: Inputs) -> Inputs:
    """Returns the inputs of the call with two channels."""
    q, k, v = inputs[:3]
    return inputs._replace(q=_filled(q, wider.head_dim), k=_filled(k, wider.head_dim), v=_filled(v, wider.value_dim))


def _filled(array: jax.Array, channels: int) -> jax.Array:
    """Returns an array with 0 behind its channels, the last axis."""
    import jax.numpy as jnp

    return jnp.pad(array, (*[(0, 0)] * (array.ndim - 1), (0, channels - array.shape[-1])))
