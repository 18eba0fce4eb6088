"""Attention in plain XLA operations: every feature of the spec, forward and explicit backward, in blocks.

Documents, causal and window together leave each query one unbroken range of keys, so two integers per query and the
caller's mask describe visibility (``RowKeys``). A loop over blocks of queries runs an inner loop over the blocks of
keys that some query may see, with the running softmax of FlashAttention (Dao et al. 2022, arXiv:2205.14135): memory per
head is O(block of queries * block of keys), and the trace holds one body for all lengths.

Products accumulate in float32 (float64 for float64 inputs) and round float32 operands only if
``jax.default_matmul_precision`` is set (``xla_precision``). Axes in the einsums: b batch, h kv head, g query head of
that kv head, i query, j key, d channel of q and k, e channel of v.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attn_core.backends.jax_xla.products import product, sum_dtype
from attn_core.backends.jax_xla.scores import (
    add_to_aux,
    exact_lse,
    finish,
    log_weights,
    named_gradients,
    scored,
    seen_by_function,
    sinks_gradient,
    with_bias,
    with_sink,
)
from attn_core.backends.jax_xla.tiles import (
    BlockSizes,
    RowKeys,
    ScoreTile,
    Summand,
    XlaOperands,
    add_at,
    add_to_bias,
    arrange,
    contain,
    cut,
    cut_rows,
    cut_summand,
    cut_tile,
    key_blocks,
    queries_first,
    rows_of,
    seen_in_ranges,
    summands,
    tile_at,
    tokens_first,
    zero_like,
)
from attn_core.call.arithmetic import dropout_keeps
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Gradients, Inputs

if TYPE_CHECKING:
    import jax


def forward(spec: AttentionSpec, inputs: Inputs, blocks: BlockSizes) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns out in ``spec.out_shape``, and lse and the row maxima in ``spec.lse_shape``. Traceable; never called for
    an empty spec."""
    import jax.numpy as jnp
    from jax import lax

    call, rows = arrange(spec, inputs, blocks), rows_of(spec, inputs.cu_seqlens_q, inputs.cu_seqlens_k)
    (value,) = summands(call.v)
    queries = blocks.queries

    def block(index: jax.Array, results: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        start = jnp.minimum(index * queries, spec.q_len - queries)
        parts = _attend(spec, call, value, cut_rows(rows, start, queries), start)
        return tuple(
            lax.dynamic_update_slice_in_dim(whole, part, start, axis=3)
            for whole, part in zip(results, parts, strict=True)
        )

    # Plus ``zero``, because under jax.shard_map a loop's carry must vary over the mesh axes of the inputs.
    lse = jnp.zeros(call.q.shape[:4], spec.lse_dtype) + call.zero.astype(spec.lse_dtype)
    out = jnp.zeros((*call.q.shape[:4], spec.value_dim), spec.dtype) + call.zero.astype(spec.dtype)
    out, lse, top = lax.fori_loop(0, -(-spec.q_len // queries), block, (out, lse, lse))
    return tokens_first(spec, out).reshape(spec.out_shape), lse.reshape(spec.lse_shape), top.reshape(spec.lse_shape)


def backward(
    spec: AttentionSpec,
    inputs: Inputs,
    blocks: BlockSizes,
    out: jax.Array,
    lse: jax.Array,
    dout: jax.Array,
    dlse: jax.Array | None,
) -> Gradients:
    """Returns the gradients from the saved out and lse, in one pass over the blocks (Dao et al. 2022, algorithm 4)."""
    import jax.numpy as jnp
    from jax import lax

    call, rows = arrange(spec, inputs, blocks), rows_of(spec, inputs.cu_seqlens_q, inputs.cu_seqlens_k)
    out, dout = (queries_first(spec, array) for array in (out, dout))
    lse = lse.reshape(call.q.shape[:4])
    # The term that all logits of a row share: dlse - sum(dout * out). Not an einsum, which XLA might round.
    shift = -(dout.astype(spec.lse_dtype) * out.astype(spec.lse_dtype)).sum(-1)
    if dlse is not None:
        shift = shift + dlse.reshape(shift.shape).astype(shift.dtype)
    zero = zero_like((call.zero, lse, shift)).astype(spec.lse_dtype)
    summed = (call.q, call.k, call.v, call.bias) if spec.bias_gradient else (call.q, call.k, call.v)
    shapes = [*(array.shape for array in summed), *(spec.aux[number].shape for number in spec.aux_gradients)]
    totals = tuple(jnp.zeros(shape, zero.dtype) + zero for shape in shapes)
    queries = blocks.queries
    sources = summands(call.q, call.k, dout)

    def block(index: jax.Array, totals: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        start = jnp.minimum(index * queries, spec.q_len - queries)
        cut = cut_rows(rows, start, queries)
        # The last block overlaps the one before it. Hide the rows that the other block has already added.
        repeated = start + jnp.arange(queries, dtype=jnp.int32) < index * queries
        cut = cut._replace(stop=jnp.where(repeated, 0, cut.stop))
        return _gradients(spec, call, sources, (lse, shift), totals, cut, start)

    dq, dk, dv, *others = lax.fori_loop(0, -(-spec.q_len // queries), block, totals)
    dbias, daux = others[: spec.bias_gradient], others[spec.bias_gradient :]
    return Gradients(
        tokens_first(spec, spec.scale * dq).astype(inputs.q.dtype).reshape(inputs.q.shape),
        (spec.scale * dk).swapaxes(1, 2).astype(inputs.k.dtype).reshape(inputs.k.shape),
        dv.swapaxes(1, 2).astype(inputs.v.dtype).reshape(inputs.v.shape),
        dbias[0].astype(inputs.bias.dtype).reshape(inputs.bias.shape) if dbias else None,
        sinks_gradient(call, lse, shift).astype(inputs.sinks.dtype) if spec.sinks else None,
        **named_gradients(spec, tuple(daux)),
    )


def _attend(
    spec: AttentionSpec, call: XlaOperands, value: Summand, rows: RowKeys, start: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns out ``[b, h, g, i, e]`` of a block of queries, in the inputs' dtype; lse and maxima ``[b, h, g, i]``."""
    import jax.numpy as jnp
    from jax import lax

    queries, keys = call.blocks
    q = cut(call.q, start, queries, axis=3)

    def step(index: jax.Array, state: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        top, total, summed = state
        tile = tile_at(spec, call, start, index)
        logits, seen, _ = _logits_in(spec, call, q, cut(call.k, tile.key, keys, axis=2), rows, tile)
        # The maximum cancels, so forward mode may treat it as a constant. It must: XLA may compute the logits twice
        # with different rounding, and a maximum that no logit equals would have a tangent of 0 / 0.
        new_top = jnp.maximum(top, lax.stop_gradient(logits.max(-1, initial=-jnp.inf)))
        base = jnp.where(new_top == -jnp.inf, 0, new_top)  # no key seen yet: exp(-inf - 0) is 0, as it should be
        weights = jnp.exp(logits - base[..., None])
        fade = jnp.exp(top - base)
        total = fade * total + weights.sum(-1)
        weights = dropped(spec, call, weights, tile)
        part = _sum_over(spec, "bhgij,bhje->bhgie", weights, seen, cut_summand(value, tile.key, keys, axis=2))
        return new_top, total, fade[..., None] * summed + part

    zero = jnp.zeros(q.shape[:4], spec.lse_dtype) + call.zero.astype(spec.lse_dtype)
    state = (zero - jnp.inf, zero, jnp.broadcast_to(zero[..., None], (*zero.shape, spec.value_dim)))
    top, total, summed = lax.fori_loop(*key_blocks(spec, call, rows, start), step, state)
    return *finish(spec, call, top, total, summed), top


def _gradients(
    spec: AttentionSpec,
    call: XlaOperands,
    sources: tuple[Summand, ...],
    saved: tuple[jax.Array, jax.Array],
    totals: tuple[jax.Array, ...],
    rows: RowKeys,
    start: jax.Array,
) -> tuple[jax.Array, ...]:
    """Adds one block of queries to the gradients so far: dq and dk (before scale), dv, dbias and daux if requested."""
    import jax.numpy as jnp
    from jax import lax

    queries, keys = call.blocks
    q, dout = (cut_summand(sources[at], start, queries, axis=3) for at in (0, 2))
    lse, shift = (cut(array, start, queries, axis=3)[..., None] for array in saved)

    def sums() -> tuple[jax.Array, jax.Array]:
        """The maximum and the sum of each row, computed again where the lse is too large to hold them both."""

        def step(index: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            tile = tile_at(spec, call, start, index)
            logits, _, _ = _logits_in(spec, call, q.values, cut(call.k, tile.key, keys, axis=2), rows, tile)
            top = jnp.maximum(state[0], lax.stop_gradient(logits.max(-1, initial=-jnp.inf)))
            base = jnp.where(top == -jnp.inf, 0, top)
            return top, jnp.exp(state[0] - base) * state[1] + jnp.exp(logits - base[..., None]).sum(-1)

        zero = jnp.zeros(q.values.shape[:4], spec.lse_dtype) + call.zero.astype(spec.lse_dtype)
        top, total = lax.fori_loop(*key_blocks(spec, call, rows, start), step, (zero - jnp.inf, zero))
        return tuple(each[..., None] for each in with_sink(call.sinks, top, total))  # type: ignore[return-value]

    lse, rest = exact_lse(spec, lse, sums, (call.zero,))
    lse = jnp.where(lse == -jnp.inf, jnp.inf, lse)  # a row that saw no key: exp(s - inf) = 0

    def step(index: jax.Array, totals: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        tile = tile_at(spec, call, start, index)
        k = cut_summand(sources[1], tile.key, keys, axis=2)
        v = cut(call.v, tile.key, keys, axis=2)
        logits, seen, slope = _logits_in(spec, call, q.values, k.values, rows, tile)
        weights = jnp.where(seen, jnp.exp(log_weights(logits, lse, rest)), 0)
        dweights = dropped(spec, call, product("bhgie,bhje->bhgij", dout.values, v, spec.lse_dtype), tile)
        dlogits = jnp.where(seen, weights * (dweights + shift), 0)
        dscores = dlogits if slope is None else jnp.where(seen, dlogits * slope, 0)
        dq, dk, dv, *others = totals
        dbias, daux = others[: spec.bias_gradient], others[spec.bias_gradient :]
        if daux:
            daux = list(add_to_aux(spec, call, tile, q.values, k.values, dlogits, seen, daux))
        dq = add_at(dq, _sum_over(spec, "bhgij,bhjd->bhgid", dscores, seen, k), {3: start})
        dk = add_at(dk, _sum_over(spec, "bhgij,bhgid->bhjd", dscores, seen, q), {2: tile.key})
        weights = dropped(spec, call, weights, tile)
        dv = add_at(dv, _sum_over(spec, "bhgij,bhgie->bhje", weights, seen, dout), {2: tile.key})
        return (dq, dk, dv, *(add_to_bias(total, dlogits, tile) for total in dbias), *daux)

    return lax.fori_loop(*key_blocks(spec, call, rows, start), step, totals)


def _logits_in(
    spec: AttentionSpec, call: XlaOperands, q: jax.Array, k: jax.Array, rows: RowKeys, tile: ScoreTile
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Returns (logits, seen, slope) of a tile, ``[b, h, g, i, j]``. slope: of softcap and score function, or None."""
    import jax.numpy as jnp

    logits = spec.scale * product("bhgid,bhjd->bhgij", q, k, spec.lse_dtype)  # type: ignore[operator]
    slope = None
    if spec.softcap is not None:
        bent = jnp.tanh(logits / spec.softcap)
        logits, slope = spec.softcap * bent, 1 - bent * bent
    keys = tile.key + jnp.arange(tile.keys, dtype=jnp.int32)
    first, stop, diagonal = (array[:, None] for array in rows)
    seen = (keys >= jnp.maximum(first, tile.fresh_key)) & (keys < stop)
    if spec.score_mod is not None:
        logits, bent = scored(spec, call, tile, logits)
        slope, seen = bent if slope is None else bent * slope, seen & (logits != -jnp.inf)
    if call.slopes is not None:
        logits = logits - call.slopes * jnp.abs(diagonal - keys).astype(logits.dtype)
    if call.bias is not None:
        bias = cut_tile(call.bias, tile)
        logits, seen = with_bias(spec, logits, bias), seen & (bias != -jnp.inf)
    if call.mask is not None:
        seen = seen & cut_tile(call.mask, tile)
    if call.key_ranges is not None:
        seen = seen & seen_in_ranges(call, tile)
    if spec.mask_mod is not None:
        seen = seen & seen_by_function(spec, call, tile)
    seen = jnp.broadcast_to(seen, logits.shape)
    return jnp.where(seen, logits, -jnp.inf), seen, slope


def dropped(spec: AttentionSpec, call: XlaOperands, weights: jax.Array, tile: ScoreTile) -> jax.Array:
    """Returns the weights times 0 or ``1 / (1 - dropout)``."""
    import jax.numpy as jnp

    if not spec.dropout:
        return weights
    batch, kv_head, head = (jnp.arange(size, dtype=jnp.uint32) for size in weights.shape[:3])
    query, key = (jnp.arange(size, dtype=jnp.uint32) for size in weights.shape[3:])
    indices = (
        batch[:, None, None, None, None],
        (kv_head[:, None] * jnp.uint32(spec.group_size) + head)[:, :, None, None],
        (query + jnp.asarray(tile.query, jnp.uint32))[:, None],
        key + jnp.asarray(tile.key, jnp.uint32),
    )
    retained = dropout_keeps(call.rng, indices, spec.dropout, jnp.uint32)
    return weights * jnp.where(retained, 1 / (1 - spec.dropout), 0).astype(weights.dtype)


def _sum_over(spec: AttentionSpec, subscripts: str, weights: jax.Array, seen: jax.Array, summand: Summand) -> jax.Array:
    """Returns the product of weights and values."""
    dtype = sum_dtype(spec)
    total = product(subscripts, weights.astype(dtype), summand.clean.astype(dtype), spec.lse_dtype)
    return contain(subscripts, total, seen, summand)


def row_maximum(spec: AttentionSpec, inputs: Inputs, blocks: BlockSizes) -> jax.Array:
    """Returns the row maxima in ``spec.lse_shape``, without the values. Traceable; never called for an empty spec."""
    import jax.numpy as jnp
    from jax import lax

    call, rows = arrange(spec, inputs, blocks), rows_of(spec, inputs.cu_seqlens_q, inputs.cu_seqlens_k)
    queries, keys = blocks

    def block(index: jax.Array, result: jax.Array) -> jax.Array:
        start = jnp.minimum(index * queries, spec.q_len - queries)
        some, q = cut_rows(rows, start, queries), cut(call.q, start, queries, axis=3)

        def step(index: jax.Array, top: jax.Array) -> jax.Array:
            tile = tile_at(spec, call, start, index)
            logits, _, _ = _logits_in(spec, call, q, cut(call.k, tile.key, keys, axis=2), some, tile)
            return jnp.maximum(top, logits.max(-1, initial=-jnp.inf))

        top = lax.fori_loop(*key_blocks(spec, call, some, start), step, empty(q.shape[:4]))
        return lax.dynamic_update_slice_in_dim(result, top, start, axis=3)

    def empty(shape: tuple[int, ...]) -> jax.Array:
        # Plus ``zero``, because under jax.shard_map a loop's carry must vary over the mesh axes of the inputs.
        return jnp.full(shape, -jnp.inf, spec.lse_dtype) + call.zero.astype(spec.lse_dtype)

    result = lax.fori_loop(0, -(-spec.q_len // queries), block, empty(call.q.shape[:4]))
    return result.reshape(spec.lse_shape)
