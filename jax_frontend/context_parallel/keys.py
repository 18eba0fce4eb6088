"""Keys: yields a head group's blocks of keys and values, first this device's own, then those of other parts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import jax

from attn_core.context_parallel import borders
from attn_core.context_parallel.plan import Step
from jax_frontend.context_parallel import exchange
from jax_frontend.context_parallel.exchange import KVPair
from jax_frontend.context_parallel.places import take
from jax_frontend.context_parallel.prepare import RankPlan
from jax_frontend.context_parallel.tiles import PartTiles

Array = jax.Array


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
