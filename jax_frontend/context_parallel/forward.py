"""The forward of one device's part of a context-parallel call, exchanges included.

The loop over steps is unrolled. Collectives stand outside the branches that ranks take, because all ranks must reach
them. The next step's keys are sent before this step computes. Arrays are shards ``[batch, shard, heads, dim]``;
between the exchanges they are a part's block, ``[batch, places, heads, dim]``, with the log-sum-exp as
``[batch, heads, places]``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from attn_core.context_parallel.call import ContextCall
from attn_core.context_parallel.plan import Step
from jax_frontend.context_parallel import exchange, tiles
from jax_frontend.context_parallel import step as context_step
from jax_frontend.context_parallel.exchange import Axes
from jax_frontend.context_parallel.keys import GroupInputs, Residuals, blocks
from jax_frontend.context_parallel.places import Order, order

Array = jax.Array


class Engine(NamedTuple):
    """One call on this device."""

    call: ContextCall
    axes: Axes
    device: str

    def context(self, step: Step | None, *, backward: bool = False) -> tiles.TileContext:
        """The context of a step's tiles.

        No exchange overlaps the last forward step, or a step on gathered keys. Any other step may overlap an exchange,
        and so may all steps of several groups of heads.
        """
        steps = self.call.plan.steps
        sends = len(steps) > 1 and step is not None and not step.gathered
        beside = self.call.head_groups > 1 or (sends and (backward or step is not steps[-1]))
        return tiles.TileContext(self.call, self.device, beside)

    @property
    def queries(self) -> Order:
        """The order of a part's queries in its ranks' shards."""
        return order(self.call.plan.q_layout, self.call.plan.q_blocks)

    @property
    def keys(self) -> Order:
        """The order of a part's keys in its ranks' shards."""
        return order(self.call.plan.k_layout, self.call.plan.k_blocks)

    def first_head(self, group: int) -> Array:
        """The first query head of a group that this device computes."""
        heads, _ = self.call.heads
        return jnp.asarray((group * self.axes.members + self.axes.member) * heads, jnp.int32)

    def own_sinks(self, sinks: Array, group: int) -> Array:
        """The sinks of a group's heads that this device computes, in the dtype of the log-sum-exp."""
        own = lax.dynamic_slice_in_dim(sinks, self.first_head(group), self.call.heads[0])
        return own.astype(self.call.spec.lse_dtype)

    def block_of_queries(self, array: Array) -> Array:
        """``[batch, shard, all heads, ...]`` as this part's block with this member's heads, in order."""
        return self.queries.sorted(exchange.heads_to_positions(self.axes, array), self.axes.part)

    def shard_of_queries(self, block: Array) -> Array:
        """The inverse of ``block_of_queries``."""
        return exchange.positions_to_heads(self.axes, self.queries.unsorted(block, self.axes.part))

    def block_of_keys(self, array: Array) -> Array:
        """``[batch, shard, all kv heads, ...]`` as this part's block, in order, kv heads copied as needed."""
        copied = array if self.call.repeats == 1 else jnp.repeat(array, self.call.repeats, axis=2)
        return self.keys.sorted(exchange.heads_to_positions(self.axes, copied), self.axes.part)

    def shard_of_keys(self, block: Array, dtype: Any) -> Array:
        """The gradient of the shard, from the gradient of this part's block."""
        block = self.keys.unsorted(block, self.axes.part)
        repeats = self.call.repeats
        shard = exchange.positions_to_heads(self.axes, block.astype(dtype) if repeats == 1 else block)
        if repeats == 1:
            return shard
        # [batch, shard, heads * copies, dim] -> [batch, shard, heads, dim]
        copies = shard.reshape(*shard.shape[:2], -1, repeats, shard.shape[-1])
        return copies.astype(self.call.spec.lse_dtype).sum(3).astype(dtype)


def forward(
    engine: Engine, q: Array, k: Array, v: Array, sinks: Array | None, *, with_lse: bool
) -> tuple[Array, Array | None, tuple[Residuals, ...]]:
    """(out, the shard's lse if ``with_lse``, the residuals of each group of heads)."""
    call, parts = engine.call, [by_group(engine, array) for array in (q, k, v)]

    def bring(group: int) -> GroupInputs:
        mine, keys, values = (array[group] for array in parts)
        return GroupInputs(engine.block_of_queries(mine), (engine.block_of_keys(keys), engine.block_of_keys(values)))

    outs, lses, saved = [], [], []
    for group, inputs in one_ahead(call.head_groups, bring):
        (out, lse), gathered = _attend(engine, inputs)
        if sinks is not None:
            out, lse = tiles.with_sinks(out, lse, engine.own_sinks(sinks, group))
        outs.append(engine.shard_of_queries(out.astype(q.dtype)))
        saved.append(Residuals(lse, gathered if call.keeps_gathered else ()))
        if with_lse:  # [batch, heads, places] as [batch, places, heads, 1], the shape of what is exchanged
            lses.append(engine.shard_of_queries(lse.swapaxes(1, 2)[..., None]))
    whole_lse = of_all_heads(lses)[..., 0].swapaxes(1, 2) if with_lse else None
    return of_all_heads(outs), whole_lse, tuple(saved)


NOTHING = tiles.PartTiles(())


def _attend(engine: Engine, inputs: GroupInputs) -> tuple[tuple[Array, Array], tuple[Array, ...]]:
    """(out, lse) of a group of heads over all steps, and its gathered keys."""
    so_far: tuple[Array, Array] | None = None
    gathered: tuple[Array, ...] = ()
    for step, kinds, keys in blocks(engine.call, engine.axes, inputs):
        gathered = keys if step.gathered else gathered
        so_far = context_step.attend(engine.context(step), engine.axes, step, kinds, inputs.q, keys, so_far)
    return so_far or tiles.attend(engine.context(None), NOTHING, inputs.q, inputs.keys, None), gathered


def one_ahead(groups: int, bring: Any) -> Iterator[tuple[int, GroupInputs]]:
    """Yields each group's operands; starts the next group's exchanges before this group computes."""
    coming = bring(0)
    for group in range(groups):
        inputs = coming
        if group + 1 < groups:
            coming = bring(group + 1)
        yield group, inputs


def by_group(engine: Engine, array: Array) -> list[Array]:
    """``[batch, shard, heads, dim]`` cut into groups of heads that stand side by side."""
    return jnp.split(array, engine.call.head_groups, axis=2)


def of_all_heads(groups: list[Array]) -> Array:
    """Joins the heads of all groups."""
    return groups[0] if len(groups) == 1 else jnp.concatenate(groups, axis=2)
