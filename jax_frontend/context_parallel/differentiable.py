"""A context-parallel call as JAX differentiates it, on this device's shards; for use inside ``jax.shard_map``."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from attn_core.context_parallel.request import Request
from jax_frontend.context_parallel.backward import backward
from jax_frontend.context_parallel.exchange import varying_over
from jax_frontend.context_parallel.forward import Engine, forward
from jax_frontend.context_parallel.prepare import axes_of, call_of, on_device
from jax_frontend.dispatch import lone_sinks
from jax_frontend.dispatch.differentiable import LSE_NAME, OUT_NAME

Array = jax.Array


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(request: Request, q: Array, k: Array, v: Array, sinks: Array | None) -> Any:
    with_lse = request.options.return_lse
    out, lse, _ = forward(_engine(request, False), q, k, v, sinks, with_lse=with_lse)
    return (out, lse) if with_lse else out


def _forward(request: Request, q: Array, k: Array, v: Array, sinks: Array | None) -> tuple[Any, Any]:
    """The results, and what the backward needs; ``jax.checkpoint`` policies find it by the names of ``attention``."""
    with_lse = request.options.return_lse
    out, lse, kept = forward(_engine(request, True), q, k, v, sinks, with_lse=with_lse)
    out = checkpoint_name(out, OUT_NAME)
    kept = tuple(each._replace(lse=checkpoint_name(each.lse, LSE_NAME)) for each in kept)
    return ((out, lse) if with_lse else out), ((q, k, v, sinks), out, kept)


def _backward(request: Request, saved: Any, given: Any) -> tuple[Array, Array, Array, Array | None]:
    given = given if request.options.return_lse else (given, None)
    inputs, out, kept = saved
    return backward(_engine(request, True), inputs, out, kept, given)


_attention.defvjp(_forward, _backward)


def _engine(request: Request, needs_backward: bool) -> Engine:
    return Engine(call_of(request, needs_backward=needs_backward), axes_of(request), request.device)


def _count_of_queries(request: Request) -> Array:
    """How many places of this device's shard of q hold a position: the first."""
    layout = call_of(request, needs_backward=False).plan.q_layout
    return jnp.asarray([layout.held(rank) for rank in range(layout.world)], jnp.int32)[axes_of(request).rank]


@partial(jax.jit, static_argnums=0, inline=True)
def on_shards(request: Request, q: Array, k: Array, v: Array, sinks: Array | None) -> Any:
    """The shard of the output, or ``(out, lse)`` of it.

    Args:
        q, k, v: ``[batch, shard, heads, dim]``; of packed documents ``[shard, heads, dim]`` or ``[1, shard, ...]``.
        sinks: ``[heads]``, the same on every device, or None.
    """
    request = on_device(request, q, k, v, sinks)
    without_rows = q.ndim == 3
    if without_rows:  # [shard, heads, dim] -> [1, shard, heads, dim]
        q, k, v = (array[None] for array in (q, k, v))
    if sinks is not None:  # before they vary: their gradient is then summed over devices in this dtype
        sinks = sinks.astype(jnp.promote_types(sinks.dtype, jnp.float32))
    found = _attention(request, *varying_over(axes_of(request), q, k, v, sinks))
    out, lse = found if request.options.return_lse else (found, None)
    out = out[0] if without_rows else out
    if lse is None:
        return out
    if sinks is not None:
        lse = lone_sinks.in_lse(lse, sinks, _count_of_queries(request))
    return out, lse[0] if request.packed else lse
