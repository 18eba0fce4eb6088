"""The forward of one device's part of a context-parallel call, exchanges included.

The loop over steps is unrolled. Collectives are outside the branches that parts take, because all ranks must reach
them. The next step's keys are sent before this step computes. Arrays are shards ``[batch, shard, heads, dim]``. Between
the exchanges they are a part's block, ``[batch, places, heads, dim]``, with the log-sum-exp as
``[batch, heads, places]``.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from attn_core.context_parallel.call import keeps_borders, keeps_gathered
from attn_core.context_parallel.prefetch import prefetch
from jax_frontend.context_parallel import step as context_step
from jax_frontend.context_parallel import tiles
from jax_frontend.context_parallel.keys import Keys
from jax_frontend.context_parallel.prepare import RankPlan

Array = jax.Array


class Residuals(NamedTuple):
    """What a head group's backward needs besides inputs and output; ``gathered`` is () unless it is kept."""

    lse: Array
    gathered: tuple[Array, ...]


def forward(
    plan: RankPlan, q: Array, k: Array, v: Array, sinks: Array | None, *, with_lse: bool
) -> tuple[Array, Array | None, tuple[Residuals, ...]]:
    """Returns (out, the shard's lse if ``with_lse``, the residuals of each head group)."""
    groups, of_call = [split_groups(plan, array) for array in (q, k, v)], (plan.call.spec, plan.call.plan)
    keep = keeps_gathered(*of_call) or keeps_borders(*of_call)

    def start(group: int) -> tuple[Array, Keys]:
        """Exchanges a group's heads."""
        q, k, v = (array[group] for array in groups)
        return plan.block_of_queries(q), Keys(plan, (plan.block_of_keys(k), plan.block_of_keys(v)))

    outs, lses, residuals = [], [], []
    for group, (block, keys) in prefetch(plan.call.head_groups, start):
        out, lse = _attend(plan, block, keys)
        if sinks is not None:
            # Once for whole rows, because each tile would count the sink again.
            out, lse = tiles.with_sinks(out, lse, plan.own_sinks(sinks, group))
        # Rounded before the exchange, so that fewer bytes travel.
        outs.append(plan.shard_of_queries(out.astype(q.dtype)))
        residuals.append(Residuals(lse, keys.gathered if keep else ()))
        if with_lse:  # [batch, heads, places] -> [batch, places, heads, 1], the form that is exchanged
            lses.append(plan.shard_of_queries(lse.swapaxes(1, 2)[..., None]))
    shard_lse = join_groups(lses)[..., 0].swapaxes(1, 2) if with_lse else None
    return join_groups(outs), shard_lse, tuple(residuals)


def _attend(plan: RankPlan, q: Array, keys: Keys) -> tuple[Array, Array]:
    """Returns (out, lse) of a head group over all steps."""
    results: tuple[Array, Array] | None = None
    for step, parts, block in keys.blocks():
        results = context_step.attend(plan.tile_context(step), plan.axes, step, parts, q, block, results)
    # Without a step no key is visible.
    return results or tiles.attend(plan.tile_context(None), tiles.NO_TILES, q, keys.own, None)


def split_groups(plan: RankPlan, array: Array) -> list[Array]:
    """Returns ``[batch, shard, heads, dim]`` cut into groups of consecutive heads."""
    return jnp.split(array, plan.call.head_groups, axis=2)


def join_groups(groups: list[Array]) -> Array:
    """Returns the heads of all groups in one array."""
    return groups[0] if len(groups) == 1 else jnp.concatenate(groups, axis=2)
