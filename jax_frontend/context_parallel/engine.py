"""Attention of a row that is spread over devices: the forward and the explicit backward of one device.

Both exchange what the plan says and compute their tiles. The loop over steps is unrolled, collectives stand outside the
branches that ranks take, and what the next step needs is sent before this step computes. Arrays are this device's
shards, ``[batch, shard, heads, dim]``; between the exchanges they are those of a part's block,
``[batch, places, heads, dim]`` with the log-sum-exp as ``[batch, heads, places]``.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from attn_core.context_parallel.call import ContextCall
from attn_core.context_parallel.plan import Step
from jax_frontend.context_parallel import exchange, tiles
from jax_frontend.context_parallel import step as context_step
from jax_frontend.context_parallel.exchange import Axes, Pair
from jax_frontend.context_parallel.keys import Brought, Kept, Keys, steps_of
from jax_frontend.context_parallel.places import Order, order
from jax_frontend.context_parallel.sinks import sinks_gradient, with_sinks
from jax_frontend.dispatch.local_call import varying_as

Array = jax.Array


class Engine(NamedTuple):
    """One call on this device."""

    call: ContextCall
    axes: Axes
    device: str

    def runner(self, step: Step | None, *, backward: bool = False) -> tiles.Runner:
        """What a step's tiles need to know, among it whether an exchange is under way while their kernels run.

        None is beside a forward's last step, nor beside one whose keys were gathered; one may be beside all others, and
        beside all of several groups of heads.
        """
        steps = self.call.plan.steps
        sends = len(steps) > 1 and step is not None and not step.gathered
        beside = self.call.head_groups > 1 or (sends and (backward or step is not steps[-1]))
        return tiles.Runner(self.call, self.device, beside)

    @property
    def queries(self) -> Order:
        """How the places of a part's queries lie."""
        return order(self.call.plan.q_layout, self.call.plan.q_blocks)

    @property
    def keys(self) -> Order:
        """How the places of a part's keys lie."""
        return order(self.call.plan.k_layout, self.call.plan.k_blocks)

    def first_head(self, group: int) -> Array:
        """The first of the query heads that this device computes of a group."""
        heads, _ = self.call.heads
        return jnp.asarray((group * self.axes.members + self.axes.member) * heads, jnp.int32)

    def own_sinks(self, sinks: Array, group: int) -> Array:
        """The sinks of the heads that this device computes of a group, in the dtype of the log-sum-exp."""
        own = lax.dynamic_slice_in_dim(sinks, self.first_head(group), self.call.heads[0])
        return own.astype(self.call.spec.lse_dtype)

    def block_of_queries(self, array: Array) -> Array:
        """``[batch, shard, all heads, ...]`` as this part's block with this member's heads, in order."""
        return self.queries.sorted(exchange.heads_for_positions(self.axes, array), self.axes.part)

    def shard_of_queries(self, block: Array) -> Array:
        """The way back."""
        return exchange.positions_for_heads(self.axes, self.queries.unsorted(block, self.axes.part))

    def block_of_keys(self, array: Array) -> Array:
        """``[batch, shard, all kv heads, ...]`` as this part's block, in order, kv heads copied as needed."""
        copied = array if self.call.repeats == 1 else jnp.repeat(array, self.call.repeats, axis=2)
        return self.keys.sorted(exchange.heads_for_positions(self.axes, copied), self.axes.part)

    def shard_of_keys(self, block: Array, dtype: Any) -> Array:
        """The gradient of this part's block as that of the shard."""
        block = self.keys.unsorted(block, self.axes.part)
        repeats = self.call.repeats
        shard = exchange.positions_for_heads(self.axes, block.astype(dtype) if repeats == 1 else block)
        if repeats == 1:
            return shard
        # [batch, shard, heads * copies, dim] -> [batch, shard, heads, dim]
        copies = shard.reshape(*shard.shape[:2], -1, repeats, shard.shape[-1])
        return copies.astype(self.call.spec.lse_dtype).sum(3).astype(dtype)


def forward(
    engine: Engine, q: Array, k: Array, v: Array, sinks: Array | None, *, with_lse: bool
) -> tuple[Array, Array | None, tuple[Kept, ...]]:
    """(out, lse of the shard where it is asked for, what the backward wants of each group)."""
    call, parts = engine.call, [_by_group(engine, array) for array in (q, k, v)]

    def bring(group: int) -> Brought:
        mine, keys, values = (array[group] for array in parts)
        return Brought(engine.block_of_queries(mine), (engine.block_of_keys(keys), engine.block_of_keys(values)))

    outs, lses, saved = [], [], []
    for group, brought in _one_ahead(call.head_groups, bring):
        (out, lse), gathered = _attend(engine, brought)
        if sinks is not None:
            out, lse = with_sinks(out, lse, engine.own_sinks(sinks, group))
        outs.append(engine.shard_of_queries(out.astype(q.dtype)))
        saved.append(Kept(lse, gathered if call.keeps_gathered else ()))
        if with_lse:  # [batch, heads, places] as [batch, places, heads, 1], the shape of what is exchanged
            lses.append(engine.shard_of_queries(lse.swapaxes(1, 2)[..., None]))
    whole_lse = _one(lses)[..., 0].swapaxes(1, 2) if with_lse else None
    return _one(outs), whole_lse, tuple(saved)


def backward(
    engine: Engine, inputs: tuple[Array, Array, Array, Array | None], out: Array, kept: tuple[Kept, ...], given: Any
) -> tuple[Array, Array, Array, Array | None]:
    """(dq, dk, dv, dsinks) from the output and the log-sum-exp of whole rows.

    Args:
        inputs: q, k, v and the sinks; kept: of each group, as the forward left it.
        given: the gradients of the output and of the log-sum-exp, the latter None where nothing depends on it.
    """
    q, k, v, sinks = inputs
    dout, dlse = given
    parts = [_by_group(engine, array) for array in (q, k, v, out, dout)]
    lse_parts = None if dlse is None else _by_group(engine, dlse.swapaxes(1, 2)[..., None])

    def bring(group: int) -> Brought:
        mine, keys, values, *rest = (array[group] for array in parts)
        blocks = engine.block_of_keys(keys), engine.block_of_keys(values)
        out, dout = (engine.block_of_queries(array) for array in rest)
        if engine.axes.parts > 1 and not kept[group].gathered:
            # Else XLA would take what the forward was sent, and a rank hold the whole row until its backward.
            blocks, dout = lax.optimization_barrier((blocks, dout))
        dlse = None if lse_parts is None else engine.block_of_queries(lse_parts[group])[..., 0].swapaxes(1, 2)
        lse, gathered = kept[group]
        return Brought(engine.block_of_queries(mine), blocks, tiles.Saved(out, lse, dout, dlse), gathered)

    found: list[tuple[Array, Array, Array]] = []
    dsinks = None if sinks is None else varying_as((sinks,), jnp.zeros(sinks.shape, engine.call.spec.lse_dtype))
    for group, brought in _one_ahead(engine.call.head_groups, bring):
        dq, (dk, dv) = _gradients(engine, brought)
        dq = engine.shard_of_queries(dq.astype(q.dtype))
        found.append((dq, engine.shard_of_keys(dk, k.dtype), engine.shard_of_keys(dv, v.dtype)))
        if sinks is not None and dsinks is not None and brought.saved is not None:
            own = sinks_gradient(engine.own_sinks(sinks, group), brought.saved)
            dsinks = lax.dynamic_update_slice_in_dim(dsinks, own, engine.first_head(group), axis=0)
    dq, dk, dv = (_one(list(gradients)) for gradients in zip(*found, strict=True))
    return dq, dk, dv, None if sinks is None or dsinks is None else dsinks.astype(sinks.dtype)


NOTHING = tiles.Mine(())


def _attend(engine: Engine, brought: Brought) -> tuple[tuple[Array, Array], tuple[Array, ...]]:
    """(out, lse) of a group of heads, over all steps, and the keys that were gathered for it."""
    so_far: tuple[Array, Array] | None = None
    gathered: tuple[Array, ...] = ()
    for step, kinds, keys in steps_of(engine.call, engine.axes, brought):
        gathered = keys if step.gathered else gathered
        so_far = context_step.attend(engine.runner(step), engine.axes, step, kinds, brought.q, keys, so_far)
    return so_far or tiles.attend(engine.runner(None), NOTHING, brought.q, brought.keys, None), gathered


def _gradients(engine: Engine, brought: Brought) -> tuple[Array, Keys]:
    """dq of a group of heads, and dk and dv of this part's block.

    In a ring the gradients of a block follow it, so that each part adds its own, and take the rest of the way home.
    Where keys are gathered each part sends those of all others at once.
    """
    axes, dtype = engine.axes, engine.call.spec.lse_dtype
    dq: Array | None = None
    found: list[Keys] = []  # this part's of its own block, and all others'
    sent: Pair | None = None
    shift = 0
    for step, kinds, keys in steps_of(engine.call, engine.axes, brought):
        arrived = None if sent is None else sent.hop(axes, step.shift - shift)
        run = partial(tiles.gradients, engine.runner(step, backward=True), "own" if step.own else "sent")
        more, dk, dv = exchange.each_its_own(axes.part, kinds, run, brought.q, keys, brought.saved)
        dq = more if dq is None else dq + more
        if step.own:
            found.append((dk, dv))
        elif step.gathered:
            found.append(exchange.summed_for_each_part(axes, dk, dv, dtype))
        else:
            pair, shift = Pair.of(dk, dv), step.shift
            sent = pair if arrived is None else arrived.plus(pair)
    if dq is None:
        assert brought.saved is not None
        dq, dk, dv = tiles.gradients(engine.runner(None), "own", NOTHING, brought.q, brought.keys, brought.saved)
        found.append((dk, dv))
    if sent is not None:
        found.append(sent.hop(axes, -shift).both)
    dk, dv = found[0] if len(found) == 1 else (mine + its for mine, its in zip(*found, strict=True))
    return dq, (dk, dv)


def _one_ahead(groups: int, bring: Any) -> Iterator[tuple[int, Brought]]:
    """Each group's arrays; those of the next one are on their way before this one computes."""
    coming = bring(0)
    for group in range(groups):
        brought = coming
        if group + 1 < groups:
            coming = bring(group + 1)
        yield group, brought


def _by_group(engine: Engine, array: Array) -> list[Array]:
    """``[batch, shard, heads, dim]`` cut into groups of heads that stand side by side."""
    return jnp.split(array, engine.call.head_groups, axis=2)


def _one(groups: list[Array]) -> Array:
    return groups[0] if len(groups) == 1 else jnp.concatenate(groups, axis=2)
