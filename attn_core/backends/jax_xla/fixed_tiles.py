"""Attention in tiles of one size: a result's bits then depend on nothing but the tokens that it belongs to.

A document (a row of a batch, one of packed documents, or a sequence in pages) is cut into tiles of QUERY_TILE positions
and KEY_TILE keys, both counted from the document's first key. So a token is in the same row of the same tile in a whole
prompt, in a chunk of it and alone. Loops run over heads of documents, tiles of queries and tiles of keys, and one body
computes a tile of one head: XLA compiles the same products and sums for every batch. No loop has a length that XLA
knows, because it would compile a loop of one round in another way.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from attn_core.backends.jax_xla.one_channel import filled, filled_inputs, of_two_channels
from attn_core.backends.jax_xla.products import product
from attn_core.backends.jax_xla.row_sums import exact_lse, log_weights, with_sink
from attn_core.backends.jax_xla.tile_documents import (
    KEY_TILE,
    QUERY_TILE,
    Document,
    Tiled,
    arrange,
    documents_of,
    indices,
)
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Gradients, Inputs


def forward(spec: AttentionSpec, inputs: Inputs, documents: Document | None = None) -> tuple[Any, Any]:
    """See ``Backend.forward``. Traceable.

    Args:
        documents: None for those of the call. With documents k and v are ``[rows, kv_len, kv_heads, dim]``, as many
            rows as there are documents.
    """
    import jax.numpy as jnp
    from jax import lax

    if 1 in (spec.head_dim, spec.value_dim):
        wider = of_two_channels(spec)
        out, lse = forward(wider, filled_inputs(wider, inputs), documents)
        return out[..., : spec.value_dim], lse
    tiled = arrange(spec, inputs)
    documents = documents_of(spec, inputs) if documents is None else documents
    shape = tiled.q.shape[:4]  # [b, i, h, g]
    out = jnp.zeros((*shape, spec.value_dim), spec.dtype) + tiled.zero.astype(spec.dtype)
    lse = jnp.full((*shape, 1), -jnp.inf, spec.lse_dtype) + tiled.zero.astype(spec.lse_dtype)

    def tile(number: Any, document: Document, head: Any, results: tuple[Any, ...]) -> tuple[Any, ...]:
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


def _over_tiles(spec: AttentionSpec, tiled: Tiled, documents: Document, tile: Any, results: Any) -> Any:
    """Runs ``tile(number, document, head, results)`` for each tile of queries of each head of each document."""
    from jax import lax

    def of_head(index: Any, results: Any) -> Any:
        document = documents.at(index // spec.num_kv_heads)
        head = index % spec.num_kv_heads
        return lax.fori_loop(
            0, document.tiles(), lambda number, results: tile(number, document, head, results), results
        )

    # An int32 0 of the data, because XLA would unroll a loop of one round.
    return lax.fori_loop(0, documents.q_start.shape[0] * spec.num_kv_heads + tiled.hidden_zero, of_head, results)


def _attend(spec: AttentionSpec, tiled: Tiled, document: Document, head: Any, number: Any) -> tuple[Any, Any]:
    """Returns out ``[g * QUERY_TILE, value_dim]`` and lse ``[g * QUERY_TILE, 1]`` of a tile of queries."""
    import jax.numpy as jnp
    from jax import lax

    q = tiled.queries(tiled.q, document, head, number)

    def step(block: Any, state: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
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
        joined = jnp.maximum(top, sinks)
        base = jnp.where(joined == -jnp.inf, 0, joined)
        fade = jnp.exp(top - base)
        top, total, summed = base, fade * total + jnp.exp(sinks - base), fade * summed
    total = jnp.where(empty, 1, total)
    out = jnp.where(empty, 0, summed / total)
    # -0 becomes 0, because its sign depends on how many empty tiles were added.
    out = jnp.where(jnp.isnan(out), jnp.nan, jnp.where(out == 0, 0, out))
    lse = jnp.where(empty, -jnp.inf, top + jnp.log(total))
    return out, jnp.where(jnp.isnan(lse), jnp.nan, lse)


def _scores(
    spec: AttentionSpec, tiled: Tiled, document: Document, head: Any, number: Any, block: Any, q: Any
) -> tuple[Any, Any, Any]:
    """Returns the scores ``[g * QUERY_TILE, KEY_TILE]``, -inf where hidden; what is seen; the softcap's slope."""
    import jax.numpy as jnp

    scores = spec.scale * product("id,jd->ij", q, tiled.keys(tiled.k, document, head, block), spec.lse_dtype)
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


def _sums(spec: AttentionSpec, tiled: Tiled, document: Document, head: Any, number: Any, q: Any) -> tuple[Any, Any]:
    """Returns the largest score of each row of a tile of queries, and the sum of exp(score - largest)."""
    import jax.numpy as jnp
    from jax import lax

    def step(block: Any, state: tuple[Any, Any]) -> tuple[Any, Any]:
        scores, _, _ = _scores(spec, tiled, document, head, number, block, q)
        top = jnp.maximum(state[0], scores.max(-1, keepdims=True))
        base = jnp.where(top == -jnp.inf, 0, top)
        return top, jnp.exp(state[0] - base) * state[1] + jnp.exp(scores - base).sum(-1, keepdims=True)

    zero = jnp.zeros((q.shape[0], 1), spec.lse_dtype) + tiled.zero.astype(spec.lse_dtype)
    sums = lax.fori_loop(*document.blocks(spec, number), step, (zero - jnp.inf, zero))
    return with_sink(None if tiled.sinks is None else tiled.sinks_of(head), *sums)


def _contained(subscripts: str, weights: Any, seen: Any, values: Any, dtype: str) -> Any:
    """Returns the product of weights and values, in which a NaN or Inf reaches only the sums that see it."""
    import jax.numpy as jnp
    from jax import lax

    finite = jnp.isfinite(values)
    total = product(subscripts, weights, jnp.where(finite, values, 0), dtype)

    def marked() -> Any:
        met = product(subscripts, seen.astype(dtype), (~finite).astype(dtype), dtype)
        return jnp.where(met > 0, jnp.nan, total)

    return lax.cond(finite.all(), lambda: total, marked)


def _put(whole: Any, rows: Any, document: Document, head: Any, start: Any) -> Any:
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


def _add_keys(whole: Any, part: Any, document: Document, head: Any, block: Any) -> Any:
    """Adds a tile ``[KEY_TILE, channels]`` to the document's keys in ``[b, h, j, channels]``."""
    import jax.numpy as jnp
    from jax import lax

    where = indices(document.k_row, head, document.k_start + block * KEY_TILE, 0)
    before = lax.dynamic_slice(whole, where, (1, 1, *part.shape))
    real = block * KEY_TILE + jnp.arange(KEY_TILE, dtype=jnp.int32)[:, None] < document.k_count
    return lax.dynamic_update_slice(whole, jnp.where(real, before + part, before), where)


def backward(spec: AttentionSpec, inputs: Inputs, out: Any, lse: Any, dout: Any, dlse: Any) -> Gradients:
    """See ``Backend.backward``. Traceable."""
    import jax.numpy as jnp
    from jax import lax

    if 1 in (spec.head_dim, spec.value_dim):
        wider = of_two_channels(spec)
        out, dout = (filled(array, wider.value_dim) for array in (out, dout))
        found = backward(wider, filled_inputs(wider, inputs), out, lse, dout, dlse)
        dq, dk, dv = found.dq[..., : spec.head_dim], found.dk[..., : spec.head_dim], found.dv[..., : spec.value_dim]
        return found._replace(dq=dq, dk=dk, dv=dv)
    tiled, documents, wide = arrange(spec, inputs, lse, dout), documents_of(spec, inputs), spec.lse_dtype

    def rows_last(array: Any) -> Any:  # [b, heads, i], or packed without b -> [b, i, heads]
        return array.reshape(spec.batch, spec.num_heads, spec.q_len).transpose(0, 2, 1).astype(wide)

    lse = rows_last(lse)
    dlse = jnp.zeros_like(lse) if dlse is None else rows_last(dlse)
    saved = [tiled.padded_rows(spec, array) for array in (dout.astype(wide), out.astype(wide), lse, dlse)]
    start_values = [jnp.zeros(array.shape, wide) + tiled.zero.astype(wide) for array in (tiled.q, tiled.k, tiled.v)]

    def tile(number: Any, document: Document, head: Any, totals: Any) -> Any:
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

        def step(block: Any, sums: Any) -> Any:
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
    dq = spec.scale * dq[:, QUERY_TILE : QUERY_TILE + spec.q_len]
    dk, dv = (array[:, :, : spec.kv_len].transpose(0, 2, 1, 3) for array in (spec.scale * dk, dv))
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
