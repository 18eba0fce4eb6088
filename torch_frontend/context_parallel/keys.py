"""Yields a head group's blocks of keys and values, step by step: this rank's own block, then received blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from attn_core.context_parallel.plan import Step
from torch_frontend.context_parallel import exchange
from torch_frontend.context_parallel.program import TileCall, Work

Tensor = torch.Tensor


class Keys(NamedTuple):
    """Where a group's keys and values come from, block by block.

    Attributes:
        own: k and v of this rank's block.
        wait: waits for the gathered (k, v); in a ring, returns the buffer that travels, which holds the own block at
            first; None if every rank needs only its own block.
        shapes: in a ring, the shapes of k and v in that buffer.
        here: whether the gathered keys are here already.
    """

    own: Sequence[Tensor]
    wait: exchange.Waiting | None = None
    shapes: tuple[torch.Size, torch.Size] | None = None
    here: bool = False

    def arrived(self) -> Sequence[Tensor]:
        """Waits. To be called once."""
        assert self.wait is not None
        return self.wait()

    def kept(self) -> tuple[Keys, list[Tensor]]:
        """The same keys, and a list that will hold the gathered keys once they have arrived."""
        wait = self.wait
        assert wait is not None
        kept: list[Tensor] = []

        def keep() -> list[Tensor]:
            kept.extend(wait())
            return kept

        return self._replace(wait=keep), kept


def keys_of(work: Work, tensors: Sequence[Tensor]) -> Keys:
    """Starts the all-gather of keys and values; in a ring, prepares the buffer that ``blocks`` sends step by step."""
    program = work.program
    if all(step.own for step, _ in program.steps):
        return Keys(tensors)
    padded = [_padded(tensor, program.k_size) for tensor in tensors]
    if program.call.plan.gathers:
        return Keys(tensors, exchange.gather(work.outer, padded))
    k, v = (tensor.shape for tensor in padded)
    return Keys(tensors, lambda: [exchange.flat(padded)], (k, v))


def _padded(tensor: Tensor, size: int) -> Tensor:
    lacking = size - tensor.shape[1]
    return torch.nn.functional.pad(tensor, (0, 0, 0, 0, 0, lacking)) if lacking else tensor


def blocks(work: Work, keys: Keys) -> Iterator[tuple[Step, tuple[TileCall, ...], Sequence[Tensor]]]:
    """Yields each step, this rank's tiles and the block of keys and values; the next step's block travels meanwhile.

    If the gathered keys are already here, their step comes first, so that its gradients for other ranks leave early.
    """
    steps = work.program.steps
    if keys.shapes is None:
        for step, runs in sorted(steps, key=lambda each: each[0].own) if keys.here else steps:
            yield step, runs, keys.arrived() if step.gathered else keys.own
        return
    (buffer,) = keys.arrived()
    waiting = exchange.hop(work.outer, buffer, steps[0][0].shift)
    for at, (step, runs) in enumerate(steps):
        buffer = waiting()
        if at + 1 < len(steps):
            waiting = exchange.hop(work.outer, buffer, steps[at + 1][0].shift - step.shift)
        yield step, runs, exchange.parts_of(buffer, keys.shapes)
