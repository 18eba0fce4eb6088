"""Offsets of packed documents in JAX: made safe, and turned into the number of each token's document."""

from __future__ import annotations

from typing import Any


def ended(ends: Any, count: int) -> Any:
    """int32 ``[count]``: for each place, how many documents end at it or before it; so the number of its own.

    Args:
        ends: ``[documents]`` integers in any order, the place behind the last of each; those outside count as the edge.
    """
    import jax.numpy as jnp
    from jax import lax

    at = jnp.clip(ends.astype(jnp.int32), 0, count)
    return lax.cumsum(jnp.zeros(count + 1, jnp.int32).at[at].add(1))[:count]


def safe_offsets(cu_seqlens: Any, tokens: int, *, whole: bool = True) -> Any:
    """Offsets that start at 0, never decrease and end at ``tokens``, whatever the array holds; valid ones unchanged.

    whole: False lets them end before ``tokens``, too.
    """
    import jax.numpy as jnp
    from jax import lax

    bounded = jnp.clip(cu_seqlens.astype(jnp.int32), 0, tokens).at[0].set(0)
    return lax.cummax(bounded.at[-1].set(tokens) if whole else bounded)
