"""A block of scores in JAX's operations: mask and score functions, and the sums of its rows.

The sums give the results of a row, and in a backward those of large logits, which an lse does not hold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from attn_core.backends.jax_xla.products import all_finite, product
from attn_core.backends.jax_xla.tiles import ScoreTile, XlaOperands, zero_like
from attn_core.call.arithmetic import LARGE_LSE, may_be_large
from attn_core.call.functions import DAUX, lookup_slopes, slope
from attn_core.call.spec import AttentionSpec
from attn_core.expressions.on_jax import added_at_lookup, evaluate_jax

if TYPE_CHECKING:
    import jax


def seen_by_function(spec: AttentionSpec, call: XlaOperands, tile: ScoreTile) -> jax.Array:
    """Returns which pairs of a tile the mask function shows; broadcasts to ``[b, h, g, i, j]``."""
    return evaluate_jax(spec.mask_mod, _places(spec, tile), None, call.aux, spec.lse_dtype, every_row=True)  # type: ignore[arg-type]


def scored(spec: AttentionSpec, call: XlaOperands, tile: ScoreTile, scores: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the score function's values and its slopes at scores ``[b, h, g, i, j]``."""
    import jax.numpy as jnp

    places, tree = _places(spec, tile), spec.score_mod
    assert tree is not None
    values, slopes = (evaluate_jax(each, places, scores, call.aux, every_row=True) for each in (tree, slope(tree)))
    return jnp.broadcast_to(values, scores.shape), slopes


def with_bias(spec: AttentionSpec, logits: jax.Array, bias: jax.Array) -> jax.Array:
    """Returns the logits plus the bias. Beside a score function both may be the lowest float, whose sum overflows."""
    import jax.numpy as jnp

    total = logits + bias.astype(logits.dtype)
    largest = jnp.finfo(logits.dtype).max
    return total if spec.score_mod is None else jnp.where(jnp.isinf(logits), total, jnp.clip(total, -largest, largest))


def add_to_aux(
    spec: AttentionSpec,
    call: XlaOperands,
    tile: ScoreTile,
    q: jax.Array,
    k: jax.Array,
    dlogits: jax.Array,
    seen: jax.Array | None,
    totals: Sequence[jax.Array],
) -> tuple[jax.Array, ...]:
    """Returns the gradients of the score function's arrays, as ``spec.aux_gradients`` orders them, with a tile's share.

    Args:
        q, k: of the tile, ``[b, h, g, i, d]`` and ``[b, h, j, d]``.
        dlogits: gradients of the function's values, ``[b, h, g, i, j]``, 0 where hidden. seen: what is not, or None.
    """
    import jax.numpy as jnp

    scores = spec.scale * product("bhgid,bhjd->bhgij", q, k, spec.lse_dtype)  # type: ignore[operator]
    if spec.softcap is not None:
        scores = spec.softcap * jnp.tanh(scores / spec.softcap)
    places, sums = _places(spec, tile), dict(zip(spec.aux_gradients, totals, strict=True))
    for node, tree in lookup_slopes(spec.score_mod, spec.aux_gradients):
        summand = dlogits * evaluate_jax(tree, places, scores, call.aux, every_row=True)
        # The slope of a hidden pair may be infinite.
        summand = jnp.broadcast_to(summand if seen is None else jnp.where(seen, summand, 0), scores.shape)
        number = int(node.value or 0)
        sums[number] = added_at_lookup(sums[number], node, summand, places, scores, call.aux)
    return tuple(sums.values())


def named_gradients(spec: AttentionSpec, sums: Sequence[jax.Array]) -> dict[str, jax.Array]:
    """Returns the sums of ``add_to_aux`` as fields of ``Gradients``, in the dtypes of the arrays."""
    pairs = zip(spec.aux_gradients, sums, strict=True)
    return {DAUX[number]: total.astype(spec.aux[number].dtype) for number, total in pairs}


def _places(spec: AttentionSpec, tile: ScoreTile) -> tuple[jax.Array, ...]:
    """Returns b, h, q and k of a tile: int32, each with five axes, of which it uses its own."""
    import jax.numpy as jnp

    def count(size: int, *shape: int, start: int | jax.Array = 0) -> jax.Array:
        return (start + jnp.arange(size, dtype=jnp.int32)).reshape(shape)

    return (
        count(spec.batch, -1, 1, 1, 1, 1),
        count(spec.num_heads, 1, spec.num_kv_heads, spec.group_size, 1, 1),
        count(tile.queries, 1, 1, 1, -1, 1, start=tile.query),
        count(tile.keys, 1, 1, 1, 1, -1, start=tile.key),
    )


def exact_lse(
    spec: AttentionSpec,
    lse: jax.Array,
    sums: Callable[[], tuple[jax.Array, jax.Array]],
    read: Sequence[jax.Array | None],
    *,
    in_loop: bool = True,
) -> tuple[jax.Array, jax.Array | None]:
    """Returns two numbers for each row, whose sum is the log-sum-exp; the second is 0 but in rows of large logits.

    The second is None if the call has no such rows.

    Args:
        lse: of whole rows.
        sums: returns each row's largest logit, and its sum of exp(logit - largest); called if a row needs them.
        read: what ``sums`` reads, as arrays or their ``zero_like``.
        in_loop: whether a loop of the caller makes a GPU's host wait, as a branch does.
    """
    import jax.numpy as jnp
    from jax import lax

    if spec.partial or not may_be_large(spec):  # the rest of a partial row is elsewhere
        return lse, None
    large = jnp.isfinite(lse) & (jnp.abs(lse) >= LARGE_LSE)

    def exact() -> tuple[jax.Array, jax.Array]:
        top, total = sums()
        return jnp.where(large, top, lse), jnp.where(large, jnp.log(total), 0)

    def rounded() -> tuple[jax.Array, jax.Array]:
        zeros = jnp.zeros_like(lse) + zero_like((*read, lse)).astype(lse.dtype)
        return lse + zeros, zeros

    def usual() -> tuple[jax.Array, jax.Array]:
        return lax.cond(all_finite(jnp.where(large, jnp.inf, 0)), rounded, exact)

    if in_loop:
        return usual()
    return lax.platform_dependent(cpu=usual, default=exact)


def log_weights(logits: jax.Array, lse: jax.Array, rest: jax.Array | None) -> jax.Array:
    """Returns the logarithms of weights; lse and rest are of ``exact_lse``."""
    return logits - lse if rest is None else logits - lse - rest


def with_sink(sinks: jax.Array | None, top: jax.Array, total: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the largest logit and the sum with the sink, for rows that see a key; 0 and 1 for a row without either.

    The largest logit is a constant for forward mode; see ``attention._attend``.
    """
    import jax.numpy as jnp
    from jax import lax

    largest = top if sinks is None else lax.stop_gradient(jnp.maximum(top, sinks))
    base, total, _ = joined(sinks, top, total, largest)
    return base, jnp.where(total == 0, 1, total)


def joined(
    sinks: jax.Array | None, top: jax.Array, total: jax.Array, largest: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the base of rows that a sink joins, or None, their total, and the factor of the sums so far.

    Args:
        largest: the larger of top and sinks.
    """
    import jax.numpy as jnp

    base = jnp.where(largest == -jnp.inf, 0, largest)
    fade = jnp.exp(top - base)
    return base, fade * total if sinks is None else fade * total + jnp.exp(sinks - base), fade


def finish(
    spec: AttentionSpec, call: XlaOperands, top: jax.Array, total: jax.Array, summed: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Adds the sink and divides by the total. A row that saw no key has top -inf and gets 0 and -inf."""
    import jax.numpy as jnp

    empty = total == 0  # not top == -inf: XLA may drop a NaN from a maximum, and a row that saw one is not empty
    if spec.sinks:
        top, total, fade = joined(call.sinks, top, total, jnp.maximum(top, call.sinks))
        summed = fade[..., None] * summed
    total = jnp.where(empty, 1, total)
    out = jnp.where(empty[..., None], 0, summed / total[..., None])
    return out.astype(spec.dtype), jnp.where(empty, -jnp.inf, top + jnp.log(total))


def sinks_gradient(call: XlaOperands, lse: jax.Array, shift: jax.Array) -> jax.Array:
    """Returns ``[heads]``: the sum of each row's sink weight ``exp(sink - lse)`` times its shift; empty rows add 0."""
    import jax.numpy as jnp

    weights = jnp.where(lse == -jnp.inf, 0, jnp.exp(call.sinks - lse))
    return jnp.where(lse == -jnp.inf, 0, weights * shift).sum((0, 3)).reshape(-1)
