"""The log-sum-exp of rows that see no key: the caller gets the sink, the only term of such a row's sum.

Backends return -inf for such a row with or without sinks, because their backwards recognise it by that and ignore its
dout. JAX operations after the kernel put the sink there, so that JAX computes its gradient.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

Array = jax.Array


def fill_with_sinks(lse: Array, sinks: Array, end: Any = None) -> Array:
    """Returns the log-sum-exp ``[..., heads, rows]`` with the sinks ``[heads]`` in place of -inf.

    Args:
        end: the first row that belongs to no document, a number or an array of one; None if all rows belong to one.
            Rows from ``end`` on stay -inf.
    """
    # Adding to zeros gives the sinks lse's sharding and varying mesh axes, which ``where`` requires.
    sinks = jnp.zeros_like(lse) + jnp.expand_dims(_split_as_heads(sinks, lse), (*range(lse.ndim - 2), lse.ndim - 1))
    alone = (lse == -jnp.inf) & (sinks != -jnp.inf)
    if end is not None:
        alone &= jnp.expand_dims(jnp.arange(lse.shape[-1], dtype=jnp.int32) < end, tuple(range(lse.ndim - 1)))
    return jnp.where(alone, sinks, lse)


def _split_as_heads(sinks: Array, lse: Array) -> Array:
    """Returns the sinks in lse's dtype; on a mesh with Explicit axes also split as lse's heads are."""
    sinks, source, target = sinks.astype(lse.dtype), jax.typeof(sinks).sharding, jax.typeof(lse).sharding  # type: ignore[attr-defined]
    if any(source.spec) and AxisType.Explicit in source.mesh.axis_types:
        return jax.sharding.reshard(sinks, NamedSharding(target.mesh, PartitionSpec(target.spec[-2])))  # type: ignore[no-any-return]
    return sinks
