"""One device's part of a context-parallel call as a differentiable function, exchanges included.

The loop over steps is unrolled. Collectives are outside the branches that parts take, because all ranks must reach
them. The next step's keys are sent before this step computes. Arrays are shards ``[batch, shard, heads, dim]``. Between
the exchanges they are a part's block, ``[batch, places, heads, dim]``, with the log-sum-exp as
``[batch, heads, places]``. The backward is explicit, from whole rows' output and log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from attn_core.backends.shared.in_jax import sink_gradient
from attn_core.context_parallel import borders
from attn_core.context_parallel.borders import Border
from attn_core.context_parallel.call import keeps_borders, keeps_gathered
from attn_core.context_parallel.plan import ROUNDED_ONCE, Step, prefetch
from jax_frontend.context_parallel import exchange, tiles
from jax_frontend.context_parallel import step as context_step
from jax_frontend.context_parallel.exchange import KVPair
from jax_frontend.context_parallel.positions import add, take
from jax_frontend.context_parallel.prepare import RankPlan
from jax_frontend.context_parallel.tiles import PartTiles, switch_by_part
from jax_frontend.dispatch.differentiable import LSE_NAME, OUT_NAME
from jax_frontend.dispatch.local_call import varying_as

Array = jax.Array
PlanOf = Callable[..., RankPlan]
"""``(call, *, needs_backward) -> RankPlan``: what a device runs."""


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def attend(plan_of: PlanOf, call: object, with_lse: bool, q: Array, k: Array, v: Array, sinks: Array | None) -> Any:
    """Returns the shard of the output, or ``(out, lse)`` of it."""
    # Without a gradient, kernels that have no backward may run too.
    out, lse, _ = forward(plan_of(call, needs_backward=False), q, k, v, sinks, with_lse=with_lse)
    return (out, lse) if with_lse else out


def _forward(
    plan_of: PlanOf, call: object, with_lse: bool, q: Array, k: Array, v: Array, sinks: Array | None
) -> tuple[Any, Any]:
    """Returns (results, residuals). The names, for ``jax.checkpoint`` policies, are those that ``attention`` uses."""
    out, lse, residuals = forward(plan_of(call, needs_backward=True), q, k, v, sinks, with_lse=with_lse)
    out = checkpoint_name(out, OUT_NAME)
    residuals = tuple(each._replace(lse=checkpoint_name(each.lse, LSE_NAME)) for each in residuals)
    return ((out, lse) if with_lse else out), ((q, k, v, sinks), out, residuals)


def _backward(
    plan_of: PlanOf, call: object, with_lse: bool, residuals: Any, cotangents: Any
) -> tuple[Array, Array, Array, Array | None]:
    # None instead of zeros, so that the backward neither sends nor computes with dlse.
    cotangents = cotangents if with_lse else (cotangents, None)
    inputs, out, of_groups = residuals
    return backward(plan_of(call, needs_backward=True), inputs, out, of_groups, cotangents)


attend.defvjp(_forward, _backward)


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
            own_gradient = sink_gradient(plan.own_sinks(sinks, group), saved.out, saved.lse, saved.dout, saved.dlse)
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
        run = partial(tiles.gradients, plan.tile_context(step, backward=True), "own" if step.own else "sent")
        dq, dk, dv = switch_by_part(axes.part, parts, run, q, block, saved, dq)
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


class Keys:
    """The keys and values of a head group.

    Args:
        own: k and v of this part's block.
        gathered: the result of ``exchange.gather``, or the arrays of all borders, if the forward kept them; else ().

    Attributes:
        own, gathered: as above; ``blocks`` sets ``gathered`` when it gathers or receives borders.
    """

    def __init__(self, plan: RankPlan, own: tuple[Array, Array], gathered: tuple[Array, ...] = ()) -> None:
        self._plan, self.own, self.gathered = plan, own, gathered
        self._moving: KVPair | None = None
        """The block that moves on in a ring, and how far it has moved."""
        self._shift = 0

    def blocks(self) -> Iterator[tuple[Step, list[PartTiles], tuple[Array, ...]]]:
        """Yields each step, the tiles of every part, and the block of keys and values, as one array or as two.

        If the keys of other parts are here already, their steps come first, so that their gradients leave early.
        """
        steps: Sequence[Step] = self._plan.call.plan.steps
        blocks: Iterable[tuple[Array, ...]]
        if any(step.shift for step in steps) and self.gathered:
            steps = sorted(steps, key=lambda step: step.own)
            size = len(self.gathered) // (len(steps) - 1)  # arrays of a border
            blocks = [*(self.gathered[at : at + size] for at in range(0, len(self.gathered), size)), self.own]
        elif any(step.shift for step in steps):
            blocks = self._ring()
        else:
            if self.gathered:
                steps = sorted(steps, key=lambda step: step.own)
            elif self._plan.call.plan.gathers:
                # Before the first step, which computes on the own keys while the others travel.
                self.gathered = exchange.gather(self._plan.axes, *self.own)
            blocks = [self.gathered if step.gathered else self.own for step in steps]
        for step, block in zip(steps, blocks, strict=True):
            # The part's number is left out unless tiles depend on it, because each distinct kind compiles a branch.
            parts = [
                PartTiles(of_part, step.gathered, part if step.gathered and of_part else None)
                for part, of_part in enumerate(step.tiles)
            ]
            yield step, parts, block

    def _ring(self) -> Iterator[tuple[Array, ...]]:
        """Yields the block of each step; sends the next block before it yields one."""
        steps = self._plan.call.plan.steps
        block = self._send(steps[0])
        for step in (*steps[1:], None):
            here, block = block, self.own if step is None else self._send(step)
            if step is not None and step.border is not None:
                self.gathered += block
            yield here

    def _send(self, step: Step) -> tuple[Array, ...]:
        """Returns the block that arrives for a step of the ring."""
        if step.own:
            return self.own
        axes = self._plan.axes
        if step.border is not None:
            index = borders.places(step.border)
            return KVPair.pack(*(take(array, index, 1) for array in self.own)).hop(axes, step.shift).arrays
        moving = KVPair.pack(*self.own) if self._moving is None else self._moving
        self._moving, self._shift = moving.hop(axes, step.shift - self._shift), step.shift
        return self._moving.arrays
