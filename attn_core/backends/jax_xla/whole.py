"""Attention of small calls in plain XLA operations: one matrix of all scores, without a loop, so that XLA has little
to compile.

The results are those of ``attention.py``. Only hidden values need care: the weight of a hidden key is 0, and 0 times a
NaN or Inf is NaN. So the products take 0 for NaN and Inf wherever something is hidden. The forward then writes NaN into
the rows and channels that see one. The backward needs no second pass, because the gradient of a score is NaN already if
its query, its key or its row of dout is; only the weights of a row must become NaN with its dout, for dv.

Axes in the einsums: b batch, h kv head, g query head of that kv head, i query, j key, d channel of q and k, e channel
of v.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attn_core.backends.jax_xla.attention import dropped
from attn_core.backends.jax_xla.products import (
    all_finite,
    finite_constant,
    finite_only,
    finite_rows,
    product,
    sum_dtype,
    sum_over_queries,
)
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
    XlaOperands,
    arrange,
    queries_first,
    rows_of,
    tile_at,
    tokens_first,
)
from attn_core.call.functions import has_functions
from attn_core.call.key_ranges import contains
from attn_core.call.masks import band
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Gradients, Inputs

if TYPE_CHECKING:
    import jax

LONG_ROWS = 512
"""Keys from which XLA takes longer to copy bfloat16's scores than to multiply in float32."""


def forward(spec: AttentionSpec, inputs: Inputs) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns out in ``spec.out_shape``, and lse and the row maxima in ``spec.lse_shape``. Traceable; never called for
    an empty spec."""
    call, g = _without_groups(spec, _arrange(spec, inputs))
    seen = _visible_pairs(spec, call, inputs)
    scores = product(f"bh{g}id,bhjd->bh{g}ij", call.q, call.k, spec.lse_dtype)
    logits, _, seen = _logits_of(spec, call, inputs, scores, seen)
    weights, top, total = _softmax(spec, call, logits, seen)
    dtype = sum_dtype(spec)
    v = call.v if seen is None else finite_only(call.v)
    summed = product(f"bh{g}ij,bhje->bh{g}ie", weights.astype(dtype), v.astype(dtype), spec.lse_dtype)
    if seen is not None:
        summed = _with_nan(spec, call, summed, seen, inputs, g)
    out, lse = _results(spec, call, top, total, summed)
    out = tokens_first(spec, out) if g else out.swapaxes(1, 2)
    return out.reshape(spec.out_shape), lse.reshape(spec.lse_shape), top.reshape(spec.lse_shape)


def _without_groups(spec: AttentionSpec, call: XlaOperands) -> tuple[XlaOperands, str]:
    """Returns the operands without the axis g of length 1 if that is faster, and "g" if they still have it.

    XLA copies the scores to another layout of such an axis. But without it, XLA multiplies bfloat16 in float32, which
    takes longer than the copy of short rows, and the backward would compute other scores than the forward.
    """
    wide = spec.dtype in ("float32", "float64")
    tables = spec.mask_shape is not None or spec.key_ranges_shape is not None or has_functions(spec)
    hidden = spec.packed or tables or not band(spec).hides_nothing(spec.q_len, spec.kv_len)
    long_rows = spec.kv_len >= LONG_ROWS and not hidden
    # ``dropped`` and functions count the heads of g.
    if spec.group_size != 1 or spec.dropout or spec.needs_backward or not (wide or long_rows) or has_functions(spec):
        return call, "g"
    names = ("q", "mask", "bias", "slopes", "key_ranges")
    arrays = {name: array.squeeze(2) for name in names if (array := getattr(call, name)) is not None}
    return call._replace(**arrays, sinks=None if call.sinks is None else call.sinks.squeeze(1)), ""


def _with_nan(
    spec: AttentionSpec, call: XlaOperands, summed: jax.Array, seen: jax.Array, inputs: Inputs, g: str
) -> jax.Array:
    """Returns the sums of values with NaN where a NaN or Inf is visible."""
    import jax.numpy as jnp
    from jax import lax

    # A branch makes a GPU's host wait for the condition, which takes longer than the products of a small call.
    shape = summed.shape
    v = inputs.v.reshape(spec.batch, spec.kv_len, spec.num_kv_heads, spec.value_dim)

    def marked() -> jax.Array:
        bad = ~jnp.isfinite(v)
        tables = call.mask, call.bias, call.key_ranges, spec.mask_mod, spec.score_mod
        if all(table is None for table in tables):  # every head sees the same keys
            here = _visible_pairs(spec, call, inputs)  # again, so that the usual branch need not store it
            met = jnp.einsum("ij,bjhe->bhie", here.astype(jnp.float32), bad.astype(jnp.float32))  # type: ignore[union-attr]
            met = met[:, :, None] if g else met
        else:
            here = jnp.broadcast_to(seen, (*shape[:-1], spec.kv_len))
            met = jnp.einsum(f"bh{g}ij,bjhe->bh{g}ie", here.astype(jnp.float32), bad.astype(jnp.float32))
        return jnp.where(met > 0, jnp.nan, summed).reshape(flat)

    # Without g, which is 1 in most calls: XLA would copy the array to another order of its axes.
    flat = (*shape[:2], -1, shape[-1])

    def usual() -> jax.Array:
        return lax.cond(all_finite(inputs.v), lambda: summed.reshape(flat), marked)

    return lax.platform_dependent(cpu=usual, default=marked).reshape(shape)


def backward(
    spec: AttentionSpec, inputs: Inputs, out: jax.Array, lse: jax.Array, dout: jax.Array, dlse: jax.Array | None
) -> Gradients:
    """Returns the gradients from the saved out and lse."""
    import jax.numpy as jnp

    call, wide = _arrange(spec, inputs), spec.lse_dtype
    scores = product("bhgid,bhjd->bhgij", call.q, call.k, wide)
    visible = _visible_pairs(spec, call, inputs)
    logits, slope, seen = _logits_of(spec, call, inputs, scores, visible)

    def per_row(array: jax.Array) -> jax.Array:  # [b, i, heads], or packed without b, as [b, h, g, i, 1]
        rows = array.reshape(spec.batch, spec.q_len, spec.num_kv_heads, spec.group_size, 1)
        return rows.transpose(0, 2, 3, 1, 4)

    # The term that all logits of a row share: dlse - sum(dout * out). Not an einsum, which XLA might round.
    shift = -per_row((dout.astype(wide) * out.astype(wide)).sum(-1))
    lse = lse.reshape(call.q.shape[:4])
    if dlse is not None:
        shift = shift + dlse.reshape(shift.shape).astype(shift.dtype)

    # The weights, from the saved log-sum-exp; of rows with large logits from sums that are computed again.
    def sums_again() -> tuple[jax.Array, jax.Array]:
        again, _, shown = _logits_of(spec, call, inputs, scores, visible)
        return with_sink(call.sinks, *_softmax(spec, call, again, shown)[1:])

    saved, rest = exact_lse(spec, lse, sums_again, inputs, in_loop=False)
    saved, rest = saved[..., None], None if rest is None else rest[..., None]
    douts = queries_first(spec, dout)
    if seen is not None:  # NaN in dout makes the weights of its row NaN, so no product needs the NaN itself
        saved = jnp.where(per_row(finite_rows(dout)), saved, jnp.nan)
        douts = finite_constant(douts)
    if _may_be_empty(spec):
        saved = jnp.where(saved == -jnp.inf, jnp.inf, saved)  # a row that saw no key: exp(s - inf) = 0
    weights = jnp.exp(log_weights(logits, saved, rest))
    if seen is not None:
        weights = jnp.where(seen, weights, 0)
    # Their gradients, and those of the logits and of the scores before score function and softcap.
    tile = tile_at(spec, call, 0, 0)
    dweights = dropped(spec, call, product("bhgie,bhje->bhgij", douts, call.v, wide), tile)
    dlogits = weights * (dweights + shift)
    dscores = spec.scale * (dlogits if slope is None else dlogits * slope)  # type: ignore[operator]
    q, k = call.q, call.k
    if seen is not None:  # 0 times the NaN of a hidden key is NaN
        dscores = jnp.where(seen, dscores, 0)
        q, k = finite_constant(q), finite_constant(k)
    dtype = sum_dtype(spec)
    dscores, weights = dscores.astype(dtype), dropped(spec, call, weights, tile).astype(dtype)
    q, k, douts = (array.astype(dtype) for array in (q, k, douts))
    dq = product("bhgij,bhjd->bhgid", dscores, k, wide)
    dk, dv = (sum_over_queries(spec, *pair) for pair in ((dscores, q), (weights, douts)))
    dbias = None
    if spec.bias_gradient:
        axes = tuple(axis for axis, size in enumerate(call.bias.shape) if size == 1)
        dlogits = dlogits if seen is None else jnp.where(seen, dlogits, 0)
        dbias = dlogits.sum(axes, keepdims=True).astype(inputs.bias.dtype).reshape(inputs.bias.shape)
    daux: dict[str, Any] = {}
    if spec.aux_gradients:
        zeros = tuple(jnp.zeros(spec.aux[number].shape, wide) for number in spec.aux_gradients)
        sums = add_to_aux(spec, call, tile, call.q, call.k, dlogits, seen, zeros)
        daux = named_gradients(spec, sums)
    return Gradients(
        tokens_first(spec, dq.astype(inputs.q.dtype)).reshape(inputs.q.shape),
        dk.astype(inputs.k.dtype).reshape(inputs.k.shape),
        dv.astype(inputs.v.dtype).reshape(inputs.v.shape),
        dbias,
        sinks_gradient(call, lse, shift[..., 0]).astype(inputs.sinks.dtype) if spec.sinks else None,
        **daux,
    )


def _arrange(spec: AttentionSpec, inputs: Inputs) -> XlaOperands:
    return arrange(spec, inputs, BlockSizes(spec.q_len, spec.kv_len), loops=False)


def _visible_pairs(spec: AttentionSpec, call: XlaOperands, inputs: Inputs) -> jax.Array | None:
    """Returns the visible pairs, which broadcast to ``[b, h, g, i, j]``; None if every query sees every key."""
    import jax.numpy as jnp
    from jax import lax

    shape, edge = (spec.q_len, spec.kv_len), band(spec)
    parts = [] if call.mask is None else [call.mask]
    if call.bias is not None:
        parts.append(call.bias != -jnp.inf)
    if spec.mask_mod is not None:
        parts.append(seen_by_function(spec, call, tile_at(spec, call, 0, 0)))
    if call.key_ranges is not None:
        parts.append(contains(call.key_ranges, jnp.arange(spec.q_len, dtype=jnp.int32)))
    if spec.packed:
        first, stop, _ = (array[:, None] for array in rows_of(spec, inputs.cu_seqlens_q, inputs.cu_seqlens_k))
        keys = jnp.arange(spec.kv_len, dtype=jnp.int32)
        parts.append((keys >= first) & (keys < stop))
    elif not edge.hides_nothing(*shape):
        rows, columns = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
        parts.append(edge.contains(rows, columns))
    seen = None
    for part in parts:
        seen = part if seen is None else seen & part
    return seen


def _may_be_empty(spec: AttentionSpec) -> bool:
    """Returns whether some query may see no key."""
    tables = spec.mask_shape, spec.bias_shape, spec.key_ranges_shape
    if spec.packed or has_functions(spec) or any(shape is not None for shape in tables):
        return True
    return band(spec).empties_a_row(spec.q_len, spec.kv_len)


def _logits_of(
    spec: AttentionSpec, call: XlaOperands, inputs: Inputs, scores: jax.Array, seen: jax.Array | None
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """Returns (logits, slope, seen), ``[b, h, g, i, j]``, the logits of hidden pairs as well.

    slope: of softcap and score function, or None. seen: without the pairs that the score function hides.
    """
    import jax.numpy as jnp

    logits, slope = spec.scale * scores, None  # type: ignore[operator]
    if spec.softcap is not None:
        bent = jnp.tanh(logits / spec.softcap)
        logits, slope = spec.softcap * bent, 1 - bent * bent
    if spec.score_mod is not None:
        logits, bent = scored(spec, call, tile_at(spec, call, 0, 0), logits)
        slope, shown = bent if slope is None else bent * slope, logits != -jnp.inf
        seen = shown if seen is None else seen & shown
    if call.slopes is not None:
        diagonal = rows_of(spec, inputs.cu_seqlens_q, inputs.cu_seqlens_k).diagonal[:, None]
        distance = jnp.abs(diagonal - jnp.arange(spec.kv_len, dtype=jnp.int32))
        logits = logits - call.slopes * distance.astype(logits.dtype)
    if call.bias is not None:
        logits = with_bias(spec, logits, call.bias)
    return logits, slope, seen


def _softmax(
    spec: AttentionSpec, call: XlaOperands, logits: jax.Array, seen: jax.Array | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns (weights with dropout, their maximum logit, their total without dropout)."""
    import jax.numpy as jnp
    from jax import lax

    if seen is not None:
        logits = jnp.where(seen, logits, -jnp.inf)
    # A constant for forward mode: the maximum cancels. See ``attention._attend``.
    top = lax.stop_gradient(logits.max(-1))
    base = jnp.where(top == -jnp.inf, 0, top) if _may_be_empty(spec) else top
    weights = jnp.exp(logits - base[..., None])
    total = weights.sum(-1)
    return dropped(spec, call, weights, tile_at(spec, call, 0, 0)), top, total


def _results(
    spec: AttentionSpec, call: XlaOperands, top: jax.Array, total: jax.Array, summed: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns (out, lse), ``[b, h, g, i, e]`` and ``[b, h, g, i]``."""
    import jax.numpy as jnp

    if spec.sinks or _may_be_empty(spec):
        return finish(spec, call, top, total, summed)
    return (summed / total[..., None]).astype(spec.dtype), top + jnp.log(total)


# Few queries: XLA copies keys and values to multiply head by head, which takes longer than all the rest. So all heads
# share one product, or the products take the arrays as they are in memory. Axes in the einsums: r query rows of all
# heads, c channels of all kv heads.

FEW_QUERIES = 16
"""The most queries of a call whose forward runs here."""

MOST_PRODUCTS = 32
"""The most queries * kv heads for which one product multiplies all heads. It does the work once for each kv head."""


def forward_of_few_queries(spec: AttentionSpec, inputs: Inputs) -> tuple[jax.Array, jax.Array]:
    """Returns (out, lse) in ``spec.out_shape`` and ``spec.lse_shape``. Traceable; never called for an empty spec."""
    from jax.lax import platform_dependent

    # On a CPU, one product for all heads has k and v as they are in memory. XLA would copy them to multiply head by
    # head. With bfloat16 it copies them in any case, to float32.
    if spec.dtype == "bfloat16" or spec.q_len * spec.num_kv_heads > MOST_PRODUCTS:
        return _few_queries(spec, inputs, joint=False)
    return platform_dependent(
        cpu=lambda: _few_queries(spec, inputs, joint=True), default=lambda: _few_queries(spec, inputs, joint=False)
    )


def _few_queries(spec: AttentionSpec, inputs: Inputs, joint: bool) -> tuple[jax.Array, jax.Array]:
    """Returns (out, lse) of few queries; joint: by one product for all heads.

    Nothing is contained at first, because with few queries that takes about as long as the attention itself. Only if a
    sum is not finite, a second pass keeps a NaN from the rows that do not see it.
    """
    import jax.numpy as jnp
    from jax import lax

    call = _arrange(spec, inputs)
    seen = _visible_pairs(spec, call, inputs)

    def attend(k: jax.Array, v: jax.Array) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        """Returns (out, lse) and whether they are finite. Nothing is contained: a hidden NaN makes them NaN."""
        scores = (_joint_scores if joint else _scores)(spec, call, k)
        weights, top, total = _softmax(spec, call, _logits_of(spec, call, inputs, scores, seen)[0], seen)
        summed = (_joint_sums if joint else _sums)(spec, weights.astype(sum_dtype(spec)), v.astype(sum_dtype(spec)))
        # A NaN in a key of one head is in the joint scores of all heads.
        return _results(spec, call, top, total, summed), all_finite(summed, *([scores] if joint else []))

    def contained() -> tuple[jax.Array, jax.Array]:
        out, lse = attend(finite_only(inputs.k), finite_only(inputs.v))[0]
        bad = [~jnp.isfinite(inputs.k).all(-1, keepdims=True), ~jnp.isfinite(inputs.v)]
        here = jnp.ones((), bool) if seen is None else seen
        here = jnp.broadcast_to(here, (*out.shape[:4], spec.kv_len)).astype(jnp.float32)
        met = jnp.einsum("bhgij,bjhe->bhgie", here, jnp.concatenate(bad, -1).astype(jnp.float32)) > 0
        right = jnp.where(met[..., :1] | met[..., 1:], jnp.nan, out), jnp.where(met[..., 0], jnp.nan, lse)
        # XLA may round differently here. Rows that no NaN has reached keep their bits.
        return tuple(jnp.where(jnp.isfinite(a), a, b) for a, b in zip(usual, right, strict=True))  # type: ignore[return-value]

    usual, finite = attend(inputs.k, inputs.v)
    # If every key is visible, so is every NaN.
    out, lse = usual if seen is None and not joint else lax.cond(finite, lambda: usual, contained)
    return tokens_first(spec, out).reshape(spec.out_shape), lse.reshape(spec.lse_shape)


def _scores(spec: AttentionSpec, call: XlaOperands, k: jax.Array) -> jax.Array:
    return product("bhgid,bjhd->bhgij", call.q, k, spec.lse_dtype)


def _sums(spec: AttentionSpec, weights: jax.Array, v: jax.Array) -> jax.Array:
    return product("bhgij,bjhe->bhgie", weights, v, spec.lse_dtype)


def _joint_scores(spec: AttentionSpec, call: XlaOperands, k: jax.Array) -> jax.Array:
    """Returns ``_scores`` from one product: each query has zeros for the channels of the other kv heads."""
    import jax.numpy as jnp
    from jax import lax

    own = jnp.eye(spec.num_kv_heads, dtype=call.q.dtype)
    q = call.q.transpose(0, 1, 4, 2, 3)[:, None] * own[:, :, None, None, None]  # [b, H, h, d, g, i]
    q = q.transpose(0, 1, 3, 2, 4, 5).reshape(spec.batch, spec.num_kv_heads * spec.head_dim, -1)
    # A barrier, because XLA would exchange the factors to save the transpose, and then multiply slowly.
    scores = lax.optimization_barrier(product("bjc,bcr->bjr", k.reshape(*k.shape[:2], -1), q, spec.lse_dtype))
    return scores.swapaxes(1, 2).reshape(*call.q.shape[:4], spec.kv_len)


def _joint_sums(spec: AttentionSpec, weights: jax.Array, v: jax.Array) -> jax.Array:
    """Returns ``_sums`` from one product, which also has each query's sums of the other heads' values."""
    import jax.numpy as jnp

    rows = weights.reshape(spec.batch, -1, spec.kv_len)
    wide = product("brj,bjc->brc", rows, v.reshape(*v.shape[:2], -1), spec.lse_dtype)
    wide = wide.reshape(*weights.shape[:4], spec.num_kv_heads, spec.value_dim)
    return jnp.moveaxis(jnp.diagonal(wide, axis1=1, axis2=4), -1, 1)
