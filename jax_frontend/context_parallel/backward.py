"""The backward of one device's part of a context-parallel call: explicit, from whole rows' output and log-sum-exp."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_frontend.context_parallel import exchange, tiles
from jax_frontend.context_parallel.exchange import Pair
from jax_frontend.context_parallel.forward import NOTHING, Engine, by_group, of_all_heads, one_ahead
from jax_frontend.context_parallel.keys import GroupInputs, Keys, Residuals, blocks
from jax_frontend.dispatch.local_call import varying_as

Array = jax.Array


def backward(
    engine: Engine,
    inputs: tuple[Array, Array, Array, Array | None],
    out: Array,
    residuals: tuple[Residuals, ...],
    cotangents: Any,
) -> tuple[Array, Array, Array, Array | None]:
    """(dq, dk, dv, dsinks) of the shards.

    Args:
        inputs: q, k, v and the sinks.
        residuals: of each group of heads.
        cotangents: of the output and of the log-sum-exp; the latter is None if nothing depends on it.
    """
    q, k, v, sinks = inputs
    dout, dlse = cotangents
    parts = [by_group(engine, array) for array in (q, k, v, out, dout)]
    lse_parts = None if dlse is None else by_group(engine, dlse.swapaxes(1, 2)[..., None])

    def bring(group: int) -> GroupInputs:
        mine, keys, values, *rest = (array[group] for array in parts)
        pair = engine.block_of_keys(keys), engine.block_of_keys(values)
        out, dout = (engine.block_of_queries(array) for array in rest)
        if engine.axes.parts > 1 and not residuals[group].gathered:
            # Without the barrier XLA would reuse the keys that the forward received, and hold the whole row until here.
            pair, dout = lax.optimization_barrier((pair, dout))
        dlse = None if lse_parts is None else engine.block_of_queries(lse_parts[group])[..., 0].swapaxes(1, 2)
        lse, gathered = residuals[group]
        return GroupInputs(engine.block_of_queries(mine), pair, tiles.WholeRows(out, lse, dout, dlse), gathered)

    groups: list[tuple[Array, Array, Array]] = []
    dsinks = None if sinks is None else varying_as((sinks,), jnp.zeros(sinks.shape, engine.call.spec.lse_dtype))
    for group, operands in one_ahead(engine.call.head_groups, bring):
        dq, (dk, dv) = _gradients(engine, operands)
        dq = engine.shard_of_queries(dq.astype(q.dtype))
        groups.append((dq, engine.shard_of_keys(dk, k.dtype), engine.shard_of_keys(dv, v.dtype)))
        if sinks is not None and dsinks is not None and operands.saved is not None:
            own = tiles.sink_gradient(engine.own_sinks(sinks, group), operands.saved)
            dsinks = lax.dynamic_update_slice_in_dim(dsinks, own, engine.first_head(group), axis=0)
    dq, dk, dv = (of_all_heads(list(gradients)) for gradients in zip(*groups, strict=True))
    return dq, dk, dv, None if sinks is None or dsinks is None else dsinks.astype(sinks.dtype)


def _gradients(engine: Engine, operands: GroupInputs) -> tuple[Array, Keys]:
    """dq of a group of heads, and dk and dv of this part's block.

    In a ring, the gradients of a block travel behind it. Each part adds its own, and the last part sends the sum home.
    If keys are gathered, each part sends the gradients of all other parts' keys at once.
    """
    axes, dtype = engine.axes, engine.call.spec.lse_dtype
    dq: Array | None = None
    sums: list[Keys] = []  # gradients of the own block: from this part, and from the others
    sent: Pair | None = None
    shift = 0
    for step, kinds, keys in blocks(engine.call, engine.axes, operands):
        arrived = None if sent is None else sent.hop(axes, step.shift - shift)
        run = partial(tiles.gradients, engine.context(step, backward=True), "own" if step.own else "sent")
        more, dk, dv = exchange.each_its_own(axes.part, kinds, run, operands.q, keys, operands.saved)
        dq = more if dq is None else dq + more
        if step.own:
            sums.append((dk, dv))
        elif step.gathered:
            sums.append(exchange.send_gradients(axes, dk, dv, dtype))
        else:
            pair, shift = Pair.of(dk, dv), step.shift
            sent = pair if arrived is None else arrived.plus(pair)
    if dq is None:
        assert operands.saved is not None
        dq, dk, dv = tiles.gradients(engine.context(None), "own", NOTHING, operands.q, operands.keys, operands.saved)
        sums.append((dk, dv))
    if sent is not None:
        sums.append(sent.hop(axes, -shift).both)
    dk, dv = sums[0] if len(sums) == 1 else (mine + its for mine, its in zip(*sums, strict=True))
    return dq, (dk, dv)
