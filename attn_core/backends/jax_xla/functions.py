"""Mask and score functions of a call on a block of scores, in JAX's operations."""

from __future__ import annotations

from typing import Any

from attn_core.backends.jax_xla.tiles import ScoreTile, XlaOperands
from attn_core.call.functions import slope
from attn_core.call.spec import AttentionSpec
from attn_core.expressions.on_jax import evaluate_jax


def seen_by_function(spec: AttentionSpec, call: XlaOperands, tile: ScoreTile) -> Any:
    """Returns which pairs of a tile the mask function shows; broadcasts to ``[b, h, g, i, j]``."""
    return evaluate_jax(spec.mask_mod, _places(spec, tile), None, call.aux, spec.lse_dtype)  # type: ignore[arg-type]


def scored(spec: AttentionSpec, call: XlaOperands, tile: ScoreTile, scores: Any) -> tuple[Any, Any]:
    """Returns the score function's values and its slopes at scores ``[b, h, g, i, j]``."""
    import jax.numpy as jnp

    places, tree = _places(spec, tile), spec.score_mod
    assert tree is not None
    values, slopes = (evaluate_jax(each, places, scores, call.aux) for each in (tree, slope(tree)))
    return jnp.broadcast_to(values, scores.shape), slopes


def _places(spec: AttentionSpec, tile: ScoreTile) -> tuple[Any, ...]:
    """Returns b, h, q and k of a tile: int32, each with five axes, of which it uses its own."""
    import jax.numpy as jnp

    def count(size: Any, *shape: int, start: Any = 0) -> Any:
        return (start + jnp.arange(size, dtype=jnp.int32)).reshape(shape)

    return (
        count(spec.batch, -1, 1, 1, 1, 1),
        count(spec.num_heads, 1, spec.num_kv_heads, spec.group_size, 1, 1),
        count(tile.queries, 1, 1, 1, -1, 1, start=tile.query),
        count(tile.keys, 1, 1, 1, 1, -1, start=tile.key),
    )
