"""The operands of splash attention from those of a call, and the gradients of the call from those of its operands.

splash has no batch: the heads of all rows are heads of one row, ``[batch * heads, length, channels]``, which keeps
query head h with kv head ``h // group``. Without batch the heads are those of the packed row.
"""

from __future__ import annotations

from typing import Any

from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Inputs


def of_call(spec: AttentionSpec, how: dict[str, Any], inputs: Inputs) -> tuple[Any, Any, Any]:
    """Returns the scaled q, and k and v, as ``[batch * heads, padded length, padded channels]``."""
    import jax.numpy as jnp
    from jax import lax

    q, k, v = inputs[:3]
    wide = q.astype(jnp.float32) * how["scale"]
    if how["rest"]:
        # Not by two casts, which XLA may leave out.
        high = lax.reduce_precision(wide, exponent_bits=8, mantissa_bits=7)
        wide, k = jnp.concatenate([high, wide - high], -1), jnp.concatenate([k, k], -1)
    (rows, keys), (width, value_width) = how["lengths"], how["widths"]
    q = heads_first(wide.astype(q.dtype), rows, width)
    return q, heads_first(k, keys, width), heads_first(v, keys, value_width)


def heads_first(array: Any, length: int, width: int) -> Any:
    """``[batch, tokens, heads, channels]`` or without batch -> ``[batch * heads, length, width]``, padded by zeros."""
    import jax.numpy as jnp

    array = jnp.swapaxes(array, -3, -2)
    array = array.reshape(-1, *array.shape[-2:])
    return jnp.pad(array, ((0, 0), (0, length - array.shape[-2]), (0, width - array.shape[-1])))


def tokens_first(array: Any, shape: tuple[int, ...]) -> Any:
    """``[batch * heads, length, width]`` -> ``shape``, ``[batch, tokens, heads, channels]`` or without batch."""
    import jax.numpy as jnp

    *batch, tokens, heads, channels = shape
    return jnp.swapaxes(array[:, :tokens, :channels].reshape(*batch, heads, tokens, channels), -3, -2)


def gradients(spec: AttentionSpec, how: dict[str, Any], inputs: Inputs, *padded: Any) -> list[Any]:
    """Returns dq, dk and dv of the call from the gradients of ``of_call``."""
    import jax.numpy as jnp

    dq, dk, dv = (part.astype(jnp.float32) for part in padded)
    if how["rest"]:  # dk sums over both parts of q; the first channels of dq are those of q alone
        dk = dk[..., : spec.head_dim] + dk[..., spec.head_dim : 2 * spec.head_dim]
    results = zip((dq * how["scale"], dk, dv), inputs[:3], strict=True)
    return [tokens_first(part, array.shape).astype(array.dtype) for part, array in results]


def sink_gradient(sinks: Any, out: Any, lse: Any, dout: Any) -> Any:
    """Returns the gradient of the sinks: minus the sum of exp(sink - lse) * (dout . out) over rows that see a key."""
    import jax.numpy as jnp

    delta = jnp.swapaxes((dout.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1), -2, -1)  # [..., heads, q_len]
    weight = jnp.where(lse == -jnp.inf, 0.0, jnp.exp(sinks.astype(jnp.float32)[:, None] - lse))
    total = (weight * delta).sum(-1)
    return -total.reshape(-1, total.shape[-1]).sum(0).astype(sinks.dtype)
