"""Keys: yields a head group's blocks of keys and values, first this rank's own, then those of other ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from attn_core.context_parallel.on_torch.tiles import TileRun
from attn_core.context_parallel.plan import Step
from torch_frontend.context_parallel import exchange
from torch_frontend.context_parallel.exchange import KVPair
from torch_frontend.context_parallel.prepare import RankPlan

Tensor = torch.Tensor


class Keys:
    """The keys and values of a head group. Starts to gather them if the plan gathers.

    Args:
        own: k and v of this rank's block.
        gathered: k and v of all ranks, if the forward kept them.
        keep: whether to keep the gathered keys for the backward.

    Attributes:
        gathered: k and v of all ranks if they are kept and have arrived; else empty.
    """

    def __init__(
        self, plan: RankPlan, own: Sequence[Tensor], gathered: Sequence[Tensor] = (), *, keep: bool = False
    ) -> None:
        self._plan, self._own, self._keep = plan, own, keep
        self.gathered = gathered
        self._pending: exchange.PendingExchange[list[Tensor]] | None = None
        if plan.call.plan.gathers and not gathered:
            self._pending = exchange.gather(plan.outer, self._padded())

    def blocks(self) -> Iterator[tuple[Step, tuple[TileRun, ...], Sequence[Tensor]]]:
        """Yields each step, this rank's tiles and its block of keys and values; the next block travels meanwhile.

        If the gathered keys are here already, their step comes first, so that its gradients for other ranks leave
        early.
        """
        steps = self._plan.steps
        if any(step.shift for step, _ in steps):
            yield from self._ring()
            return
        for step, tiles in sorted(steps, key=lambda each: each[0].own) if self.gathered else steps:
            yield step, tiles, self._receive() if step.gathered else self._own

    def _receive(self) -> Sequence[Tensor]:
        if self._pending is None:
            return self.gathered
        arrived, self._pending = self._pending.wait(), None
        if self._keep:
            self.gathered = arrived
        return arrived

    def _ring(self) -> Iterator[tuple[Step, tuple[TileRun, ...], Sequence[Tensor]]]:
        plan, hops = self._plan, self._plan.call.plan.hops
        pending = KVPair.pack(self._padded()).hop(plan.outer, hops[0])
        for at, (step, tiles) in enumerate(plan.steps):
            pair = pending.wait()
            if at + 1 < len(plan.steps):
                pending = pair.hop(plan.outer, hops[at + 1])
            yield step, tiles, tuple(pair)

    def _padded(self) -> list[Tensor]:
        """Returns k and v with as many places as the largest block has."""
        lacking = self._plan.k_size - self._own[0].shape[1]
        if not lacking:
            return list(self._own)
        return [torch.nn.functional.pad(tensor, (0, 0, 0, 0, 0, lacking)) for tensor in self._own]
