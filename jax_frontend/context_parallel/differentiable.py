"""A context-parallel call with its derivative, on this device's shards; for use inside ``jax.shard_map``."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from attn_core.context_parallel.request import Request, plan_request
from jax_frontend.context_parallel.backward import backward
from jax_frontend.context_parallel.exchange import Axes, varying_over
from jax_frontend.context_parallel.forward import Engine, forward
from jax_frontend.context_parallel.prepare import on_device, target_of
from jax_frontend.dispatch import lone_sinks
from jax_frontend.dispatch.differentiable import LSE_NAME, OUT_NAME

Array = jax.Array


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(request: Request, q: Array, k: Array, v: Array, sinks: Array | None) -> Any:
    with_lse = request.options.return_lse
    out, lse, _ = forward(_engine(request, False), q, k, v, sinks, with_lse=with_lse)
    return (out, lse) if with_lse else out


def _forward(request: Request, q: Array, k: Array, v: Array, sinks: Array | None) -> tuple[Any, Any]:
    """(results, residuals). ``jax.checkpoint`` policies find the residuals by the names that ``attention`` uses."""
    with_lse = request.options.return_lse
    out, lse, residuals = forward(_engine(request, True), q, k, v, sinks, with_lse=with_lse)
    out = checkpoint_name(out, OUT_NAME)
    residuals = tuple(each._replace(lse=checkpoint_name(each.lse, LSE_NAME)) for each in residuals)
    return ((out, lse) if with_lse else out), ((q, k, v, sinks), out, residuals)


def _backward(request: Request, saved: Any, cotangents: Any) -> tuple[Array, Array, Array, Array | None]:
    cotangents = cotangents if request.options.return_lse else (cotangents, None)
    inputs, out, residuals = saved
    return backward(_engine(request, True), inputs, out, residuals, cotangents)


_attention.defvjp(_forward, _backward)


def _engine(request: Request, needs_backward: bool) -> Engine:
    call = plan_request(request._replace(needs_backward=needs_backward), target_of(request))
    return Engine(call, _axes(request), request.device)


def _axes(request: Request) -> Axes:
    return Axes.of(request.axes, request.sizes, request.strategy)


def _count_of_queries(engine: Engine) -> Array:
    """The number of places of this device's shard of q that hold a position; they come first."""
    layout = engine.call.plan.q_layout
    return jnp.asarray([layout.position_count(rank) for rank in range(layout.world)], jnp.int32)[engine.axes.rank]


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
    if sinks is not None:  # cast before they vary, so that JAX sums their gradient over devices in this dtype
        sinks = sinks.astype(jnp.promote_types(sinks.dtype, jnp.float32))
    results = _attention(request, *varying_over(_axes(request), q, k, v, sinks))
    out, lse = results if request.options.return_lse else (results, None)
    out = out[0] if without_rows else out
    if lse is None:
        return out
    if sinks is not None:
        lse = lone_sinks.in_lse(lse, sinks, _count_of_queries(_engine(request, False)))
    return out, lse[0] if request.packed else lse
