"""The log-sum-exp of rows that see no key, in calls with sinks: there the sink is alone in the sum.

Backends give -inf for such a row, sinks or not: it is how their backwards know it, and keep its dout out. The callers
get the sink, by JAX operations behind the call, so that its gradient is JAX's own.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

Array = jax.Array


def in_lse(lse: Array, sinks: Array, end: Any = None) -> Array:
    """A log-sum-exp ``[..., heads, rows]`` with the sinks ``[heads]`` where it is -inf.

    Args:
        end: where rows that belong to nobody begin, a number or an array of one; None where there are none. They keep
            -inf.
    """
    sinks = jnp.zeros_like(lse) + jnp.expand_dims(_by_heads_of(lse, sinks), (*range(lse.ndim - 2), lse.ndim - 1))
    alone = (lse == -jnp.inf) & (sinks != -jnp.inf)
    if end is not None:
        alone &= jnp.expand_dims(jnp.arange(lse.shape[-1], dtype=jnp.int32) < end, tuple(range(lse.ndim - 1)))
    return jnp.where(alone, sinks, lse)


def _by_heads_of(lse: Array, sinks: Array) -> Array:
    """The sinks in the dtype of lse; on a mesh with Explicit axes split as its heads are."""
    sinks, mine, wanted = sinks.astype(lse.dtype), jax.typeof(sinks).sharding, jax.typeof(lse).sharding  # type: ignore[attr-defined]
    if any(mine.spec) and AxisType.Explicit in mine.mesh.axis_types:
        return jax.sharding.reshard(sinks, NamedSharding(wanted.mesh, PartitionSpec(wanted.spec[-2])))  # type: ignore[no-any-return]
    return sinks
