"""Attention in plain XLA operations: every feature of the spec, forward and explicit backward, in blocks.

Documents, causal and window together leave each query one unbroken range of keys, so what is visible is two integers
per query (``Rows``) and the caller's mask. A loop over blocks of queries runs an inner loop over just those blocks of
keys that some query of the block may see, with the running softmax of FlashAttention (Dao et al. 2022,
arXiv:2205.14135): memory per head is O(block of queries * block of keys), and the trace holds one body whatever the
lengths.

Products accumulate in float32 (float64 for float64 inputs) and never round float32 operands to TF32. Axes in the
einsums: b batch, h kv head, g query head of that kv head, i query, j key, d channel of q and k, e channel of v.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from attn_core import dropout
from attn_core.backends import Gradients, Inputs
from attn_core.masks import band
from attn_core.spec import AttentionSpec


class Blocks(NamedTuple):
    """How many queries and keys (tokens) a block holds."""

    queries: int
    keys: int


class Rows(NamedTuple):
    """For each query, int32 ``[q_len]``: the keys ``first <= j < stop`` it may see, and the key on its diagonal."""

    first: Any
    stop: Any
    diagonal: Any


class Call(NamedTuple):
    """The tensors of a call, heads first, its block sizes, and ``zero`` (see ``_zero_like``).

    q ``[b, h, g, i, d]``, k ``[b, h, j, d]``, v ``[b, h, j, e]``; mask and bias ``[b, h, g, i, j]`` and slopes
    ``[b, h, g, 1, 1]``, with 1 on any axis along which they broadcast; sinks ``[h, g, 1]``; rng uint32 ``[2]``.
    """

    q: Any
    k: Any
    v: Any
    mask: Any
    bias: Any
    slopes: Any
    sinks: Any
    rng: Any
    zero: Any
    blocks: Blocks


class Tile(NamedTuple):
    """A block of queries against a block of keys: where each starts (traced) and how many (static).

    The last block of an axis is moved back to end with it; only keys from ``fresh_key`` on are new to this tile.
    """

    query: Any
    queries: int
    key: Any
    keys: int
    fresh_key: Any


class Summand(NamedTuple):
    """Values to be summed over with softmax weights: ``clean`` has 0 for NaN and Inf; ``finite`` says nothing was."""

    values: Any
    clean: Any
    finite: Any


def block_sizes(spec: AttentionSpec, largest: Blocks) -> Blocks:
    """The fewest blocks none of which is larger, all of nearly one size."""
    lengths = ((spec.q_len, largest.queries), (spec.kv_len, largest.keys))
    return Blocks(*(-(-length // -(-length // limit)) for length, limit in lengths))


def forward(spec: AttentionSpec, inputs: Inputs, blocks: Blocks) -> tuple[Any, Any]:
    """(out, lse) in ``spec.out_shape`` and ``spec.lse_shape``; traceable, never for an empty spec."""
    import jax.numpy as jnp
    from jax import lax

    call, rows = arrange(spec, inputs, blocks), rows_of(spec, inputs.cu_seqlens_q, inputs.cu_seqlens_k)
    (value,) = summands(call.v)
    queries = blocks.queries

    def block(index: Any, results: tuple[Any, Any]) -> tuple[Any, Any]:
        start = jnp.minimum(index * queries, spec.q_len - queries)
        made = _attend(spec, call, value, _cut_rows(rows, start, queries), start)
        out, lse = (
            lax.dynamic_update_slice_in_dim(whole, part, start, axis=3)
            for whole, part in zip(results, made, strict=True)
        )
        return out, lse

    lse = jnp.zeros(call.q.shape[:4], spec.lse_dtype) + call.zero.astype(spec.lse_dtype)
    out = jnp.zeros((*call.q.shape[:4], spec.value_dim), spec.dtype) + call.zero.astype(spec.dtype)
    out, lse = lax.fori_loop(0, -(-spec.q_len // queries), block, (out, lse))
    return _tokens_first(spec, out).reshape(spec.out_shape), lse.reshape(spec.lse_shape)


def backward(
    spec: AttentionSpec, inputs: Inputs, blocks: Blocks, out: Any, lse: Any, dout: Any, dlse: Any
) -> Gradients:
    """The gradients from the saved out and lse, in one pass over the blocks (Dao et al. 2022, algorithm 4)."""
    import jax.numpy as jnp
    from jax import lax

    call, rows = arrange(spec, inputs, blocks), rows_of(spec, inputs.cu_seqlens_q, inputs.cu_seqlens_k)
    out, dout = (_queries_first(spec, array) for array in (out, dout))
    lse = lse.reshape(call.q.shape[:4])
    # How each row's logits move together: dlse - sum(dout * out).
    shift = -jnp.einsum("bhgie,bhgie->bhgi", *(array.astype(spec.lse_dtype) for array in (dout, out)))
    if dlse is not None:
        shift = shift + dlse.reshape(shift.shape).astype(shift.dtype)
    zero = _zero_like((call.zero, lse, shift)).astype(spec.lse_dtype)
    summed = (call.q, call.k, call.v, call.bias) if spec.bias_gradient else (call.q, call.k, call.v)
    totals = tuple(jnp.zeros(array.shape, zero.dtype) + zero for array in summed)
    queries = blocks.queries
    sources = summands(call.q, call.k, dout)

    def block(index: Any, totals: tuple[Any, ...]) -> tuple[Any, ...]:
        start = jnp.minimum(index * queries, spec.q_len - queries)
        cut = _cut_rows(rows, start, queries)
        stale = start + jnp.arange(queries, dtype=jnp.int32) < index * queries  # the block before has counted them
        cut = cut._replace(stop=jnp.where(stale, 0, cut.stop))
        return _gradients(spec, call, sources, (lse, shift), totals, cut, start)

    dq, dk, dv, *dbias = lax.fori_loop(0, -(-spec.q_len // queries), block, totals)
    return Gradients(
        _tokens_first(spec, spec.scale * dq).astype(inputs.q.dtype).reshape(inputs.q.shape),
        (spec.scale * dk).swapaxes(1, 2).astype(inputs.k.dtype).reshape(inputs.k.shape),
        dv.swapaxes(1, 2).astype(inputs.v.dtype).reshape(inputs.v.shape),
        dbias[0].astype(inputs.bias.dtype).reshape(inputs.bias.shape) if dbias else None,
        _sinks_gradient(call, lse, shift).astype(inputs.sinks.dtype) if spec.sinks else None,
    )


def log_sum_exp(spec: AttentionSpec, inputs: Inputs) -> Any:
    """The lse of a small call without sinks, from one matrix of all its scores."""
    from jax.scipy.special import logsumexp

    whole = Blocks(spec.q_len, spec.kv_len)
    call, rows = arrange(spec, inputs, whole), rows_of(spec, inputs.cu_seqlens_q, inputs.cu_seqlens_k)
    logits, _, _ = _logits(spec, call, call.q, call.k, rows, _tile(spec, call, 0, 0))
    return logsumexp(logits, axis=-1).reshape(spec.lse_shape)


def rows_of(spec: AttentionSpec, cu_seqlens_q: Any = None, cu_seqlens_k: Any = None) -> Rows:
    """What each query may see. Offsets on the device cannot be trusted: they are made safe here."""
    import jax.numpy as jnp

    query = jnp.arange(spec.q_len, dtype=jnp.int32)
    q_start, q_stop, k_start, k_stop = (jnp.full_like(query, edge) for edge in (0, spec.q_len, 0, spec.kv_len))
    if spec.packed:
        cu_q, cu_k = safe_offsets(cu_seqlens_q, spec.q_len), safe_offsets(cu_seqlens_k, spec.kv_len)
        document = jnp.searchsorted(cu_q[1:], query, side="right")
        q_start, q_stop, k_start, k_stop = (cu[document + end] for cu in (cu_q, cu_k) for end in (0, 1))
    offset = (k_stop - k_start) - (q_stop - q_start) if spec.alignment == "bottom_right" else 0
    diagonal = query - q_start + offset + k_start
    left, right, _ = band(spec)
    reach = spec.q_len + spec.kv_len  # as good as any longer distance, and int32 holds it
    first = k_start if left is None else jnp.maximum(k_start, diagonal - min(left, reach))
    stop = k_stop if right is None else jnp.minimum(k_stop, diagonal + min(right, reach) + 1)
    return Rows(first, stop, diagonal)


def safe_offsets(cu_seqlens: Any, tokens: int) -> Any:
    """Offsets that start at 0, never decrease and end at ``tokens``, whatever the array holds; valid ones unchanged."""
    import jax.numpy as jnp
    from jax import lax

    bounded = jnp.clip(cu_seqlens.astype(jnp.int32), 0, tokens).at[0].set(0).at[-1].set(tokens)
    return lax.cummax(bounded)


def arrange(spec: AttentionSpec, inputs: Inputs, blocks: Blocks) -> Call:
    """The inputs, heads first."""
    import jax.numpy as jnp

    heads = (spec.num_kv_heads, spec.group_size)
    keys = (spec.batch, spec.kv_len, spec.num_kv_heads)

    def per_head(array: Any, shape: tuple[int, ...] | None) -> Any:  # [b, heads or 1, i, j] -> [b, h, g, i, j]
        if shape is None:
            return None
        return array.reshape(shape[0], *(heads if shape[1] == spec.num_heads else (1, 1)), *shape[2:])

    slopes_shape = None if spec.alibi_shape is None else (*(1,) * (2 - len(spec.alibi_shape)), *spec.alibi_shape, 1, 1)
    slopes = per_head(inputs.alibi_slopes, slopes_shape)
    bias = per_head(inputs.bias, spec.bias_shape)
    return Call(
        _queries_first(spec, inputs.q),
        inputs.k.reshape(*keys, spec.head_dim).swapaxes(1, 2),
        inputs.v.reshape(*keys, spec.value_dim).swapaxes(1, 2),
        per_head(inputs.mask, spec.mask_shape),
        bias,
        None if slopes is None else slopes.astype(spec.lse_dtype),
        inputs.sinks.reshape(*heads, 1).astype(spec.lse_dtype) if spec.sinks else None,
        inputs.rng.astype(jnp.uint32) if spec.dropout else None,
        _zero_like(inputs),
        blocks,
    )


def _zero_like(arrays: Any) -> Any:
    """A zero typed as varying over every mesh axis that an array varies over: jax.shard_map checks what loops carry."""
    import jax.numpy as jnp

    zeros = (jnp.where(False, array[(0,) * array.ndim], 0) for array in arrays if array is not None)
    return sum(zero.astype(jnp.float32) for zero in zeros)


def summands(*arrays: Any) -> tuple[Summand, ...]:
    """The arrays as summands. One test for all, and for every element of a vmap, so that a cond on it stays a cond."""
    import jax.numpy as jnp
    from jax.custom_batching import custom_vmap

    @custom_vmap
    def all_finite(*arrays: Any) -> Any:
        return jnp.stack([jnp.isfinite(array).all() for array in arrays]).all()

    @all_finite.def_vmap
    def _(axis_size: int, batched: Any, *arrays: Any) -> tuple[Any, bool]:
        return all_finite(*arrays), False

    finite = all_finite(*arrays)
    return tuple(Summand(array, jnp.where(jnp.isfinite(array), array, 0), finite) for array in arrays)


def contain(subscripts: str, total: Any, seen: Any, summand: Summand) -> Any:
    """The total of a sum over clean values, with NaN where a NaN or Inf was seen: ``0 * NaN`` of hidden ones stays out.

    The total itself has the same bits either way, so what saw no NaN does not notice one elsewhere.
    """
    import jax.numpy as jnp
    from jax import lax

    def marked() -> Any:
        sides = (seen, ~jnp.isfinite(summand.values))
        met = jnp.einsum(subscripts, *(side.astype(jnp.float32) for side in sides))
        return jnp.where(met > 0, jnp.nan, total)

    return lax.cond(summand.finite, lambda: total, marked)


def _attend(spec: AttentionSpec, call: Call, value: Summand, rows: Rows, start: Any) -> tuple[Any, Any]:
    """(out, lse) of one block of queries, ``[b, h, g, i, e]`` in the inputs' dtype and ``[b, h, g, i]``."""
    import jax.numpy as jnp
    from jax import lax

    queries, keys = call.blocks
    q = _cut(call.q, start, queries, axis=3)

    def step(index: Any, state: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        top, total, summed = state
        tile = _tile(spec, call, start, index)
        logits, seen, _ = _logits(spec, call, q, _cut(call.k, tile.key, keys, axis=2), rows, tile)
        new_top = jnp.maximum(top, logits.max(-1))
        base = jnp.where(new_top == -jnp.inf, 0, new_top)  # no key seen yet: exp(-inf - 0) is the 0 wanted
        weights = jnp.exp(logits - base[..., None])
        fade = jnp.exp(top - base)
        total = fade * total + weights.sum(-1)
        weights = _dropped(spec, call, weights, tile)
        part = _sum_over(spec, "bhgij,bhje->bhgie", weights, seen, _cut_summand(value, tile.key, keys, axis=2))
        return new_top, total, fade[..., None] * summed + part

    zero = jnp.zeros(q.shape[:4], spec.lse_dtype) + call.zero.astype(spec.lse_dtype)
    state = (zero - jnp.inf, zero, jnp.broadcast_to(zero[..., None], (*zero.shape, spec.value_dim)))
    return _finish(spec, call, *lax.fori_loop(*_key_blocks(spec, call, rows), step, state))


def _finish(spec: AttentionSpec, call: Call, top: Any, total: Any, summed: Any) -> tuple[Any, Any]:
    """Lets the sink join, and divides; a row that saw no key has top -inf and gets 0 and -inf."""
    import jax.numpy as jnp

    empty = top == -jnp.inf
    if spec.sinks:
        joined = jnp.maximum(top, call.sinks)
        base = jnp.where(joined == -jnp.inf, 0, joined)
        fade = jnp.exp(top - base)
        top, total, summed = base, fade * total + jnp.exp(call.sinks - base), fade[..., None] * summed
    total = jnp.where(empty, 1, total)
    out = jnp.where(empty[..., None], 0, summed / total[..., None])
    return out.astype(spec.dtype), jnp.where(empty, -jnp.inf, top + jnp.log(total))


def _gradients(
    spec: AttentionSpec,
    call: Call,
    sources: tuple[Summand, ...],
    saved: tuple[Any, Any],
    totals: tuple[Any, ...],
    rows: Rows,
    start: Any,
) -> tuple[Any, ...]:
    """Adds one block of queries to the gradients so far: dq and dk (before scale), dv, and dbias where asked for."""
    import jax.numpy as jnp
    from jax import lax

    queries, keys = call.blocks
    q, dout = (_cut_summand(sources[at], start, queries, axis=3) for at in (0, 2))
    lse, shift = (_cut(array, start, queries, axis=3)[..., None] for array in saved)
    lse = jnp.where(lse == -jnp.inf, jnp.inf, lse)  # a row that saw nothing: exp(s - inf) = 0

    def step(index: Any, totals: tuple[Any, ...]) -> tuple[Any, ...]:
        tile = _tile(spec, call, start, index)
        k = _cut_summand(sources[1], tile.key, keys, axis=2)
        v = _cut(call.v, tile.key, keys, axis=2)
        logits, seen, slope = _logits(spec, call, q.values, k.values, rows, tile)
        weights = jnp.where(seen, jnp.exp(logits - lse), 0)
        dweights = _dropped(spec, call, _dot("bhgie,bhje->bhgij", dout.values, v, spec.lse_dtype), tile)
        dlogits = jnp.where(seen, weights * (dweights + shift), 0)
        dscores = dlogits if slope is None else jnp.where(seen, dlogits * slope, 0)
        dq, dk, dv, *dbias = totals
        dq = _add(dq, _sum_over(spec, "bhgij,bhjd->bhgid", dscores, seen, k), {3: start})
        dk = _add(dk, _sum_over(spec, "bhgij,bhgid->bhjd", dscores, seen, q), {2: tile.key})
        weights = _dropped(spec, call, weights, tile)
        dv = _add(dv, _sum_over(spec, "bhgij,bhgie->bhje", weights, seen, dout), {2: tile.key})
        return (dq, dk, dv, *(_add_to_bias(total, dlogits, tile) for total in dbias))

    return lax.fori_loop(*_key_blocks(spec, call, rows), step, totals)


def _logits(spec: AttentionSpec, call: Call, q: Any, k: Any, rows: Rows, tile: Tile) -> tuple[Any, Any, Any]:
    """(logits, seen, slope) of a tile, ``[b, h, g, i, j]``: -inf where hidden; slope: softcap's derivative, or None."""
    import jax.numpy as jnp

    logits = spec.scale * _dot("bhgid,bhjd->bhgij", q, k, spec.lse_dtype)
    slope = None
    if spec.softcap is not None:
        bent = jnp.tanh(logits / spec.softcap)
        logits, slope = spec.softcap * bent, 1 - bent * bent
    keys = tile.key + jnp.arange(tile.keys, dtype=jnp.int32)
    first, stop, diagonal = (array[:, None] for array in rows)
    seen = (keys >= jnp.maximum(first, tile.fresh_key)) & (keys < stop)
    if call.slopes is not None:
        logits = logits - call.slopes * jnp.abs(diagonal - keys).astype(logits.dtype)
    if call.bias is not None:
        bias = _cut_tile(call.bias, tile)
        logits, seen = logits + bias.astype(logits.dtype), seen & (bias != -jnp.inf)
    if call.mask is not None:
        seen = seen & _cut_tile(call.mask, tile)
    seen = jnp.broadcast_to(seen, logits.shape)
    return jnp.where(seen, logits, -jnp.inf), seen, slope


def _dropped(spec: AttentionSpec, call: Call, weights: Any, tile: Tile) -> Any:
    """The weights times 0 or ``1 / (1 - dropout)``."""
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
    kept = dropout.keep(call.rng, indices, spec.dropout, jnp.uint32)
    return weights * jnp.where(kept, 1 / (1 - spec.dropout), 0).astype(weights.dtype)


def _sum_over(spec: AttentionSpec, subscripts: str, weights: Any, seen: Any, summand: Summand) -> Any:
    """The product of weights and values. float16 would lose small weights, so only bfloat16 multiplies as it is."""
    dtype = "bfloat16" if spec.dtype == "bfloat16" else spec.lse_dtype
    total = _dot(subscripts, weights.astype(dtype), summand.clean.astype(dtype), spec.lse_dtype)
    return contain(subscripts, total, seen, summand)


def _dot(subscripts: str, left: Any, right: Any, dtype: str) -> Any:
    import jax.numpy as jnp
    from jax.lax import Precision

    precision = None if left.dtype.itemsize == 2 else Precision.HIGHEST
    return jnp.einsum(subscripts, left, right, precision=precision, preferred_element_type=dtype)


def _sinks_gradient(call: Call, lse: Any, shift: Any) -> Any:
    """``[heads]``: each row's sink weight ``exp(sink - lse)`` times its shift, summed; a row that saw none adds 0."""
    import jax.numpy as jnp

    weights = jnp.where(lse == -jnp.inf, 0, jnp.exp(call.sinks - lse))
    return jnp.where(lse == -jnp.inf, 0, weights * shift).sum((0, 3)).reshape(-1)


def _add_to_bias(total: Any, dlogits: Any, tile: Tile) -> Any:
    """Sums over the axes along which the bias was broadcast, and adds where the tile lies in the others."""
    axes = tuple(axis for axis, size in enumerate(total.shape) if size == 1)
    starts = {axis: start for axis, start in ((3, tile.query), (4, tile.key)) if total.shape[axis] > 1}
    return _add(total, dlogits.sum(axes, keepdims=True), starts)


def _add(total: Any, part: Any, starts: dict[int, Any]) -> Any:
    """Adds a part of the array at the given start on each named axis, and at 0 on the others."""
    import jax.numpy as jnp
    from jax import lax

    where = tuple(jnp.asarray(starts.get(axis, 0), jnp.int32) for axis in range(total.ndim))
    return lax.dynamic_update_slice(total, lax.dynamic_slice(total, where, part.shape) + part, where)


def _tile(spec: AttentionSpec, call: Call, start: Any, index: Any) -> Tile:
    import jax.numpy as jnp

    queries, keys = call.blocks
    return Tile(start, queries, jnp.minimum(index * keys, spec.kv_len - keys), keys, index * keys)


def _key_blocks(spec: AttentionSpec, call: Call, rows: Rows) -> tuple[Any, Any]:
    """The half-open range of key blocks that any of the rows may see."""
    import jax.numpy as jnp

    keys = call.blocks.keys
    some = rows.first < rows.stop
    start = jnp.where(some, rows.first, spec.kv_len).min()
    stop = jnp.where(some, rows.stop, 0).max()
    return start // keys, (stop + keys - 1) // keys


def _cut(array: Any, start: Any, size: int, axis: int) -> Any:
    from jax import lax

    return array if array.shape[axis] == size else lax.dynamic_slice_in_dim(array, start, size, axis)


def _cut_rows(rows: Rows, start: Any, size: int) -> Rows:
    return Rows(*(_cut(array, start, size, axis=0) for array in rows))


def _cut_summand(summand: Summand, start: Any, size: int, axis: int) -> Summand:
    values, clean = (_cut(array, start, size, axis) for array in (summand.values, summand.clean))
    return Summand(values, clean, summand.finite)


def _cut_tile(array: Any, tile: Tile) -> Any:
    """The tile's part of ``[b, h, g, i, j]``, where an axis of 1 broadcasts."""
    for axis, start, size in ((3, tile.query, tile.queries), (4, tile.key, tile.keys)):
        array = array if array.shape[axis] == 1 else _cut(array, start, size, axis)
    return array


def _queries_first(spec: AttentionSpec, array: Any) -> Any:
    """``[b, i, heads, channels]``, or packed without b, as ``[b, h, g, i, channels]``."""
    heads = (spec.num_kv_heads, spec.group_size)
    return array.reshape(spec.batch, spec.q_len, *heads, array.shape[-1]).transpose(0, 2, 3, 1, 4)


def _tokens_first(spec: AttentionSpec, array: Any) -> Any:
    """``[b, h, g, i, channels]`` as ``[b, i, heads, channels]``."""
    return array.transpose(0, 3, 1, 2, 4).reshape(spec.batch, spec.q_len, spec.num_heads, array.shape[-1])
