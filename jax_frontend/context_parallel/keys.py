"""What a group of heads computes with on one device, step by step: its keys and values, own and others'."""

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


class Brought(NamedTuple):
    """What a group of heads computes with, and what a backward has of whole rows beside it.

    Attributes:
        gathered: the keys and values of all parts, as they came, where a backward finds them kept; else ().
    """

    q: Array
    keys: Keys
    saved: tiles.Saved | None = None
    gathered: tuple[Array, ...] = ()


class Kept(NamedTuple):
    """What a backward needs besides inputs and output: of each group of heads the log-sum-exp as it was computed, and
    the keys and values that came where they are kept."""

    lse: Array
    gathered: tuple[Array, ...]


def steps_of(
    call: ContextCall, axes: Axes, brought: Brought
) -> Iterator[tuple[Step, list[tiles.Mine], tuple[Array, ...]]]:
    """Each step with what every part does in it, and its block of keys and values; one array where they travelled so.

    Where everybody's are here already, the step with them comes first: what it gives for others is then sent in time.
    """
    steps = call.plan.steps
    if brought.gathered:
        steps = tuple(sorted(steps, key=lambda step: step.own))
    for step, block in zip(steps, _blocks(call, axes, steps, brought), strict=True):
        # Which part it is goes in only where it matters: every kind is a branch to compile.
        kinds = [
            tiles.Mine(mine, step.gathered, part if step.gathered and mine else None)
            for part, mine in enumerate(step.tiles)
        ]
        yield step, kinds, block


def _blocks(call: ContextCall, axes: Axes, steps: tuple[Step, ...], brought: Brought) -> Iterator[tuple[Array, ...]]:
    """The block of each step, or what was gathered; the next one's sent before."""
    keys = brought.keys
    if all(step.own or step.gathered for step in steps):
        everybody: tuple[Array, ...] = brought.gathered or keys
        if call.plan.gathers and not brought.gathered:
            everybody = exchange.from_all_parts(axes, *keys)
        yield from (everybody if step.gathered else keys for step in steps)
        return
    travelling = Pair.of(*keys).hop(axes, steps[0].shift)
    for at, step in enumerate(steps):
        block = keys if step.own else travelling.arrays
        if at + 1 < len(steps):
            travelling = travelling.hop(axes, steps[at + 1].shift - step.shift)
        yield block
