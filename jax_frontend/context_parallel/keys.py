"""Yields a head group's blocks of keys and values, step by step: this device's own block, then received blocks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import jax

from attn_core.context_parallel.call import ContextCall
from attn_core.context_parallel.plan import Step
from jax_frontend.context_parallel import exchange, tiles
from jax_frontend.context_parallel.exchange import Axes, Pair

Array = jax.Array
Keys = tuple[Array, Array]
"""k and v of a block."""


class GroupInputs(NamedTuple):
    """The operands of a group of heads.

    Attributes:
        saved: whole rows' results and their gradients, in a backward.
        gathered: in a backward the keys and values of all parts, if the forward kept them; else ().
    """

    q: Array
    keys: Keys
    saved: tiles.WholeRows | None = None
    gathered: tuple[Array, ...] = ()


class Residuals(NamedTuple):
    """What a group's backward needs besides inputs and output: the log-sum-exp, and gathered keys if they are kept."""

    lse: Array
    gathered: tuple[Array, ...]


def blocks(
    call: ContextCall, axes: Axes, inputs: GroupInputs
) -> Iterator[tuple[Step, list[tiles.PartTiles], tuple[Array, ...]]]:
    """Yields each step, the tiles of every part, and the block of keys and values (one array if they travelled as one).

    If the gathered keys are already here, their step comes first, so that its gradients for other parts leave early.
    """
    steps = call.plan.steps
    if inputs.gathered:
        steps = tuple(sorted(steps, key=lambda step: step.own))
    for step, block in zip(steps, _blocks(call, axes, steps, inputs), strict=True):
        # The part's number is left out unless tiles depend on it, because each distinct kind compiles a branch.
        kinds = [
            tiles.PartTiles(mine, step.gathered, part if step.gathered and mine else None)
            for part, mine in enumerate(step.tiles)
        ]
        yield step, kinds, block


def _blocks(call: ContextCall, axes: Axes, steps: tuple[Step, ...], inputs: GroupInputs) -> Iterator[tuple[Array, ...]]:
    """Yields the block of each step; sends the next block before it yields one."""
    keys = inputs.keys
    if all(step.own or step.gathered for step in steps):
        everybody: tuple[Array, ...] = inputs.gathered or keys
        if call.plan.gathers and not inputs.gathered:
            everybody = exchange.gather(axes, *keys)
        yield from (everybody if step.gathered else keys for step in steps)
        return
    travelling = Pair.of(*keys).hop(axes, steps[0].shift)
    for at, step in enumerate(steps):
        block = keys if step.own else travelling.arrays
        if at + 1 < len(steps):
            travelling = travelling.hop(axes, steps[at + 1].shift - step.shift)
        yield block
