"""Where the keys and values of a group of heads come from, block by block, in one rank's part of a call."""

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
        wait: for (k, v) of everybody's, where they are gathered; in a ring for the buffer that travels, at first with
            the own block; None where nobody needs more than the own one.
        shapes: in a ring, of k and v in that buffer.
        here: whether everybody's are here already.
    """

    own: Sequence[Tensor]
    wait: exchange.Waiting | None = None
    shapes: tuple[torch.Size, torch.Size] | None = None
    here: bool = False

    def arrived(self) -> Sequence[Tensor]:
        """What ``wait`` gives, once."""
        assert self.wait is not None
        return self.wait()

    def kept(self) -> tuple[Keys, list[Tensor]]:
        """The same, and a list that will have everybody's once they have come."""
        wait = self.wait
        assert wait is not None
        kept: list[Tensor] = []

        def keep() -> list[Tensor]:
            kept.extend(wait())
            return kept

        return self._replace(wait=keep), kept


def keys_of(work: Work, tensors: Sequence[Tensor]) -> Keys:
    """Keys and values on their way to the ranks that attend to them: gathered from now on, in a ring step by step."""
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
    """Every step, what this rank does in it, and its block; the next step's block is under way meanwhile.

    Where everybody's keys are here, the step with them comes first: what it gives for others is then sent in time.
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
