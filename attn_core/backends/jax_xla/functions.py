"""Mask and score functions of a call on a block of scores, in JAX's operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from attn_core.backends.jax_xla.products import product
from attn_core.backends.jax_xla.tiles import ScoreTile, XlaOperands
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
