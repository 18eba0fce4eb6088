"""Keys: yields a head group's blocks of keys and values, first this rank's own, then those of other ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from attn_core.context_parallel import borders
from attn_core.context_parallel.on_torch.positions import border_pieces
from attn_core.context_parallel.on_torch.tiles import TileRun
from attn_core.context_parallel.plan import Step
from torch_frontend.context_parallel import exchange
from torch_frontend.context_parallel.exchange import KVPair, PendingExchange
from torch_frontend.context_parallel.prepare import RankPlan

Tensor = torch.Tensor


class Keys:
    """The keys and values of a head group. Starts to gather them if the plan gathers.

    Args:
        own: k and v of this rank's block.
        gathered: k and v of all ranks, or of all borders end to end, if the forward kept them.
        keep: whether to keep these keys for the backward.

    Attributes:
        gathered: these keys if they are kept and have arrived; else empty.
    """

    def __init__(
        self, plan: RankPlan, own: Sequence[Tensor], gathered: Sequence[Tensor] = (), *, keep: bool = False
    ) -> None:
        self._plan, self._own, self._keep = plan, own, keep
        self.gathered = gathered
        self._moving: KVPair | None = None
        """The block that moves on in a ring, and how far it has moved."""
        self._shift = 0
        self._pending: exchange.PendingExchange[list[Tensor]] | None = None
        if plan.gathers and not gathered:
            self._pending = exchange.gather_keys(plan.outer, self._padded())

    def blocks(self) -> Iterator[tuple[Step, tuple[TileRun, ...], Sequence[Tensor]]]:
        """Yields each step, this rank's tiles and its block of keys and values; the next block travels meanwhile.

        If the keys of other ranks are here already, their steps come first, so that their gradients leave early.
        """
        steps, at = self._plan.steps, 0
        if any(step.shift for step, _ in steps) and not self.gathered:
            yield from self._ring()
            return
        for step, tiles in sorted(steps, key=lambda each: each[0].own) if self.gathered else steps:
            if step.border is None:
                yield step, tiles, self._receive() if step.gathered else self._own
                continue
            stop = at + borders.size(step.border)
            yield step, tiles, [tensor[:, at:stop] for tensor in self.gathered]
            at = stop

    def _receive(self) -> Sequence[Tensor]:
        if self._pending is None:
            return self.gathered
        arrived, self._pending = self._pending.wait(), None
        if self._keep:
            self.gathered = arrived
        return arrived

    def _ring(self) -> Iterator[tuple[Step, tuple[TileRun, ...], Sequence[Tensor]]]:
        """Yields the steps of a ring and their keys. The next block travels while the caller computes with this one."""
        steps = self._plan.steps
        moves = [at for at, (step, _) in enumerate(steps) if step.moves]
        pending = self._send(steps[0][0])
        kept: list[Sequence[Tensor]] = []
        for at, (step, tiles) in enumerate(steps):
            block = pending.wait()
            if self._keep and step.border is not None:
                kept.append(tuple(block))
            if step.moves:
                self._moving = block
            if at + 1 < len(steps):
                pending = self._send(steps[at + 1][0])
            if at + 1 >= max(moves, default=0):  # sent for the last time
                self._moving = None
            yield step, tiles, tuple(block)
        if kept:
            self.gathered = kept[0] if len(kept) == 1 else [torch.cat(each, 1) for each in zip(*kept, strict=True)]

    def _send(self, step: Step) -> PendingExchange[Any]:
        """Starts to send the block of a step of the ring; returns k and v under way."""
        axis = self._plan.outer
        if step.own:
            return PendingExchange.ready(self._own)
        if step.border is not None:
            border = [border_pieces(tensor, step.border) for tensor in self._padded()]
            return KVPair.pack(border).hop(axis, step.shift)
        moving = self._moving or KVPair.pack([[tensor] for tensor in self._padded()])
        distance, self._shift = step.shift - self._shift, step.shift
        return moving.hop(axis, distance)

    def _padded(self) -> list[Tensor]:
        """Returns k and v with as many places as the largest block has."""
        lacking = self._plan.k_size - self._own[0].shape[1]
        if not lacking:
            return list(self._own)
        return [torch.nn.functional.pad(tensor, (0, 0, 0, 0, 0, lacking)) for tensor in self._own]
