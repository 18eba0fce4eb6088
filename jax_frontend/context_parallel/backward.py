"""One device's part of a context-parallel call as a differentiable function.

Its backward is explicit, from whole rows' output and log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from attn_core.context_parallel import borders
from attn_core.context_parallel.borders import Border
from attn_core.context_parallel.plan import ROUNDED_ONCE
from attn_core.context_parallel.prefetch import prefetch
from jax_frontend.context_parallel import exchange, tiles
from jax_frontend.context_parallel import step as context_step
from jax_frontend.context_parallel.exchange import KVPair
from jax_frontend.context_parallel.forward import Residuals, forward, join_groups, split_groups
from jax_frontend.context_parallel.keys import Keys
from jax_frontend.context_parallel.places import add
from jax_frontend.context_parallel.prepare import RankPlan
from jax_frontend.dispatch.differentiable import LSE_NAME, OUT_NAME
from jax_frontend.dispatch.local_call import varying_as

Array = jax.Array
PlanOf = Callable[..., RankPlan]
"""``(call, *, needs_backward) -> RankPlan``: what a device runs."""


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def attend(plan_of: PlanOf, call: Any, with_lse: bool, q: Array, k: Array, v: Array, sinks: Array | None) -> Any:
    """Returns the shard of the output, or ``(out, lse)`` of it."""
    # Without a gradient, kernels that have no backward may run too.
    out, lse, _ = forward(plan_of(call, needs_backward=False), q, k, v, sinks, with_lse=with_lse)
    return (out, lse) if with_lse else out


def _forward(
    plan_of: PlanOf, call: Any, with_lse: bool, q: Array, k: Array, v: Array, sinks: Array | None
) -> tuple[Any, Any]:
    """Returns (results, residuals). The names, for ``jax.checkpoint`` policies, are those that ``attention`` uses."""
    out, lse, residuals = forward(plan_of(call, needs_backward=True), q, k, v, sinks, with_lse=with_lse)
    out = checkpoint_name(out, OUT_NAME)
    residuals = tuple(each._replace(lse=checkpoint_name(each.lse, LSE_NAME)) for each in residuals)
    return ((out, lse) if with_lse else out), ((q, k, v, sinks), out, residuals)


def _backward(
    plan_of: PlanOf, call: Any, with_lse: bool, residuals: Any, cotangents: Any
) -> tuple[Array, Array, Array, Array | None]:
    # None instead of zeros, so that the backward neither sends nor computes with dlse.
    cotangents = cotangents if with_lse else (cotangents, None)
    inputs, out, of_groups = residuals
    return backward(plan_of(call, needs_backward=True), inputs, out, of_groups, cotangents)


attend.defvjp(_forward, _backward)


def backward(
    plan: RankPlan,
    inputs: tuple[Array, Array, Array, Array | None],
    out: Array,
    residuals: tuple[Residuals, ...],
    cotangents: Any,
) -> tuple[Array, Array, Array, Array | None]:
    """Returns (dq, dk, dv, dsinks) of the shards.

    Args:
        inputs: q, k, v and the sinks.
        residuals: of each head group.
        cotangents: of the output and of the log-sum-exp; the latter is None if nothing depends on it.
    """
    q, k, v, sinks = inputs
    dout, dlse = cotangents
    groups = [split_groups(plan, array) for array in (q, k, v, out, dout)]
    dlse_groups = None if dlse is None else split_groups(plan, dlse.swapaxes(1, 2)[..., None])

    def start(group: int) -> tuple[Array, Keys, tiles.WholeRows]:
        """Exchanges a group's heads."""
        q, k, v, out, dout = (array[group] for array in groups)
        lse, gathered = residuals[group]
        own = plan.block_of_keys(k), plan.block_of_keys(v)
        out, dout = plan.block_of_queries(out), plan.block_of_queries(dout)
        if plan.axes.parts > 1 and not gathered:
            # Without the barrier XLA would reuse the keys that the forward received, and hold the whole row until here.
            # The forward's result is in it, because XLA starts an exchange as early as it can: for a ``dout`` that is
            # known before, the exchange would delay the forward's own.
            own, dout, lse = lax.optimization_barrier((own, dout, lse))
        dlse = None if dlse_groups is None else plan.block_of_queries(dlse_groups[group])[..., 0].swapaxes(1, 2)
        return plan.block_of_queries(q), Keys(plan, own, gathered), tiles.WholeRows(out, lse, dout, dlse)

    shards: list[tuple[Array, Array, Array]] = []
    # The zeros must vary over the axes that the gradients vary over, or JAX's types of the update differ.
    dsinks = None if sinks is None else varying_as((sinks,), jnp.zeros(sinks.shape, plan.call.spec.lse_dtype))
    for group, (block, keys, saved) in prefetch(plan.call.head_groups, start):
        dq, dk, dv = _group_gradients(plan, block, keys, saved)
        # Cast before the exchange, so that fewer bytes travel. dq has no copies that are still to be added up.
        dq = plan.shard_of_queries(dq.astype(q.dtype))
        shards.append((dq, plan.shard_of_keys(dk, k.dtype), plan.shard_of_keys(dv, v.dtype)))
        if sinks is not None and dsinks is not None:
            own_gradient = tiles.sink_gradient(plan.own_sinks(sinks, group), saved)
            dsinks = lax.dynamic_update_slice_in_dim(dsinks, own_gradient, plan.first_head(group), axis=0)
    dq, dk, dv = (join_groups(list(gradients)) for gradients in zip(*shards, strict=True))
    return dq, dk, dv, None if sinks is None or dsinks is None else dsinks.astype(sinks.dtype)


def _group_gradients(plan: RankPlan, q: Array, keys: Keys, saved: tiles.WholeRows) -> tuple[Array, Array, Array]:
    """Returns (dq, dk, dv) of a head group's block.

    In a ring, the gradients of a block travel one step behind the block. Each part adds its own, and the last part
    sends the sum home. The gradients of a border go straight home. If keys are gathered, each part sends the gradients
    of all other parts' keys at once.
    """
    axes, call = plan.axes, plan.call
    dq: Array | None = None
    totals: list[tuple[Array, Array]] = []  # dk and dv of the own block: from this part, and from the others
    of_borders: list[tuple[Border, tuple[Array, Array]]] = []
    sent: KVPair | None = None
    shift = 0
    for step, parts, block in keys.blocks():
        arrived = sent.hop(axes, step.shift - shift) if sent is not None and step.moves else None
        context = plan.tile_context(step, backward=True)
        dq, dk, dv = context_step.gradients(context, axes, step, parts, q, block, saved, dq)
        if step.own:
            totals.append((dk, dv))
        elif step.gathered:
            totals.append(exchange.send_gradients(axes, dk, dv, call.spec.lse_dtype))
        elif step.border is not None:
            of_borders.append((step.border, KVPair.pack(dk, dv).hop(axes, -step.shift).unpack()))
        else:
            pair, shift = KVPair.pack(dk, dv), step.shift
            sent = pair if arrived is None else KVPair(tuple(map(jnp.add, arrived.arrays, pair.arrays)))
    if dq is None:  # no key is visible
        # Zeros, in the dtypes and with the mesh axes of other steps' gradients.
        return tiles.gradients(plan.tile_context(None), "own", tiles.NO_TILES, q, keys.own, saved)
    if sent is not None:
        # Home: back by as many parts as the block has moved.
        totals.append(sent.hop(axes, -shift).unpack())
    return dq, *_sum_gradients(plan, keys.own, totals, of_borders)


def _sum_gradients(
    plan: RankPlan,
    own: tuple[Array, Array],
    totals: list[tuple[Array, Array]],
    of_borders: list[tuple[Border, tuple[Array, Array]]],
) -> tuple[Array, Array]:
    """Returns dk and dv of a part's own block: the sum of the gradients of whole blocks and of borders of it."""
    every = [*totals, *(gradients for _, gradients in of_borders)]
    # The widest of the dtypes, and a wide one for several terms, so that a sum is rounded once.
    dtype: Any = reduce(jnp.promote_types, (each.dtype for pair in every for each in pair))
    dtype = plan.call.spec.lse_dtype if len(every) > ROUNDED_ONCE else dtype
    sums = []
    for at, array in enumerate(own):
        parts = [each[at].astype(dtype) for each in totals]
        total = reduce(jnp.add, parts) if parts else varying_as((array,), jnp.zeros(array.shape, dtype))
        for border, gradients in of_borders:
            total = add(total, gradients[at].astype(dtype), borders.places(border), 1)
        sums.append(total)
    dk, dv = sums
    return dk, dv
