"""Which document each of a row's places belongs to, on JAX arrays.

By counting, not by ``jnp.searchsorted``: that of jax 0.10 and 0.11 cannot be traced inside a ``jax.shard_map`` over
some axes of a mesh ("AssertionError: ManualAxisType").
"""

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
