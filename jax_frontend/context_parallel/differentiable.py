"""A context-parallel call with its derivative, on this device's shards; for use inside ``jax.shard_map``."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from attn_core.context_parallel.request import Request
from jax_frontend.context_parallel.backward import backward
from jax_frontend.context_parallel.forward import forward
from jax_frontend.context_parallel.mesh import RankAxes
from jax_frontend.context_parallel.prepare import local_request, prepare, rank_axes
from jax_frontend.dispatch import empty_rows
from jax_frontend.dispatch.differentiable import LSE_NAME, OUT_NAME
from jax_frontend.dispatch.local_call import vary_over, varying_axes

Array = jax.Array


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(request: Request, q: Array, k: Array, v: Array, sinks: Array | None) -> Any:
    with_lse = request.options.return_lse
    # Without a gradient, kernels that have no backward may run too.
    out, lse, _ = forward(prepare(request, needs_backward=False), q, k, v, sinks, with_lse=with_lse)
    return (out, lse) if with_lse else out


def _forward(request: Request, q: Array, k: Array, v: Array, sinks: Array | None) -> tuple[Any, Any]:
    """Returns (results, residuals). The names, for ``jax.checkpoint`` policies, are those that ``attention`` uses."""
    with_lse = request.options.return_lse
    out, lse, residuals = forward(prepare(request, needs_backward=True), q, k, v, sinks, with_lse=with_lse)
    out = checkpoint_name(out, OUT_NAME)
    residuals = tuple(each._replace(lse=checkpoint_name(each.lse, LSE_NAME)) for each in residuals)
    return ((out, lse) if with_lse else out), ((q, k, v, sinks), out, residuals)


def _backward(request: Request, residuals: Any, cotangents: Any) -> tuple[Array, Array, Array, Array | None]:
    # None instead of zeros, so that the backward neither sends nor computes with dlse.
    cotangents = cotangents if request.options.return_lse else (cotangents, None)
    inputs, out, of_groups = residuals
    return backward(prepare(request, needs_backward=True), inputs, out, of_groups, cotangents)


_attention.defvjp(_forward, _backward)


def _vary_over_ranks(axes: RankAxes, *arrays: Any) -> tuple[Any, ...]:
    """Types the arrays (or None) as varying over the ranks, and over every other axis that one of them varies over.

    Results differ between ranks. With these types, JAX sums the gradient of an array that is equal on every device over
    the devices, as it does for its own operations.
    """
    ranks = [lax.axis_index(name) for name in axes.names]  # typed as varying, if JAX checks types
    every = varying_axes(*ranks, *(array for array in arrays if array is not None))
    return tuple(None if array is None else vary_over(every, array) for array in arrays)


@partial(jax.jit, static_argnums=0, inline=True)
def attend_shards(request: Request, q: Array, k: Array, v: Array, sinks: Array | None) -> Any:
    """Returns the shard of the output, or ``(out, lse)`` of it.

    Args:
        q, k, v: ``[batch, shard, heads, dim]``; of packed documents ``[shard, heads, dim]`` or ``[1, shard, ...]``.
        sinks: ``[heads]``, the same on every device, or None.
    """
    request = local_request(request, q, k, v, sinks)
    without_rows = q.ndim == 3
    if without_rows:  # [shard, heads, dim] -> [1, shard, heads, dim]
        q, k, v = (array[None] for array in (q, k, v))
    if sinks is not None:  # cast before they vary, so that JAX sums their gradient over devices in this dtype
        sinks = sinks.astype(jnp.promote_types(sinks.dtype, jnp.float32))
    results = _attention(request, *_vary_over_ranks(rank_axes(request), q, k, v, sinks))
    out, lse = results if request.options.return_lse else (results, None)
    out = out[0] if without_rows else out
    if lse is None:
        return out
    if sinks is not None:
        lse = empty_rows.fill_with_sinks(lse, sinks, prepare(request, needs_backward=False).query_count)
    return out, lse[0] if request.packed else lse
