"""Sinks by JAX's operations, as ``shared.sinks`` has them by torch's: one logit per head joins a finished softmax.

The formulas and their source are in ``shared.rewrites``. Traceable, under JAX's usual promotion.
"""

from __future__ import annotations

from typing import Any


def with_sinks(out: Any, lse: Any, sinks: Any) -> tuple[Any, Any]:
    """Adds one logit per head, ``[heads]``, to the softmax of (out, lse). Rows that see no key keep 0 and -inf."""
    import jax
    import jax.numpy as jnp

    logits = sinks.astype(lse.dtype)[:, None]  # [heads, 1] against [..., heads, rows]
    empty = lse == -jnp.inf
    gate = jnp.where(empty, 0, jax.nn.sigmoid(lse - logits))  # of two -inf the sigmoid is NaN
    by_row = gate.swapaxes(-1, -2)[..., None]  # [..., heads, rows] -> [..., rows, heads, 1]
    return (out.astype(lse.dtype) * by_row).astype(out.dtype), jnp.where(empty, lse, jnp.logaddexp(lse, logits))


def sink_gradient(sinks: Any, out: Any, lse: Any, dout: Any, dlse: Any = None) -> Any:
    """Returns the gradient of the sinks, ``[heads]``, from out and lse with sinks; dlse is None if nothing needs lse.

    A row that sees no key adds nothing, whatever its dout is.
    """
    import jax.numpy as jnp

    share = jnp.exp(sinks.astype(lse.dtype)[:, None] - lse)  # [heads, 1] against [..., heads, rows]
    delta = (dout.astype(lse.dtype) * out.astype(lse.dtype)).sum(-1).swapaxes(-1, -2)  # [..., heads, rows]
    total = jnp.where(lse == -jnp.inf, 0, share * (delta if dlse is None else delta - dlse.astype(lse.dtype)))
    rows = tuple(axis for axis in range(total.ndim) if axis != total.ndim - 2)
    return -total.sum(rows).astype(sinks.dtype)
