"""Sinks of a row that is spread over devices: they join each whole row's softmax once, after all of its keys.

Axes: out ``[batch, places, heads, dim]``, log-sum-exp ``[batch, heads, places]``, sinks ``[heads]``.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_frontend.context_parallel.tiles import Saved

Array = jax.Array


def with_sinks(out: Array, lse: Array, sinks: Array) -> tuple[Array, Array]:
    """(out, lse) of rows with their sinks; a row that sees no key keeps its 0 and -inf."""
    empty = lse == -jnp.inf
    before = jnp.where(empty, 0, lse)
    after = jnp.logaddexp(before, sinks[:, None])
    share = jnp.where(empty, 0, jnp.exp(before - after))
    return out * share.swapaxes(1, 2)[..., None], jnp.where(empty, -jnp.inf, after)


def sinks_gradient(sinks: Array, saved: Saved) -> Array:
    """``[heads]``: each row's sink weight times how its logits move together, over the rows that see a key.

    That is ``exp(sink - lse) * (dlse - sum(dout * out))``.
    """
    shift = -(saved.dout.astype(sinks.dtype) * saved.out.astype(sinks.dtype)).sum(-1).swapaxes(1, 2)
    if saved.dlse is not None:
        shift = shift + saved.dlse.astype(sinks.dtype)
    empty = saved.lse == -jnp.inf
    weights = jnp.exp(sinks[:, None] - jnp.where(empty, 0, saved.lse))
    return jnp.where(empty, 0, weights * shift).sum((0, 2))
