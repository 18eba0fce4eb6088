"""Outgoing: a message to other ranks, sent by a collective."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from attn_core.context_parallel.on_torch.head_start import head_start
from torch_frontend.context_parallel.exchange import collectives
from torch_frontend.context_parallel.mesh import RankAxis

Tensor = torch.Tensor


def receive(sent: Tensor) -> Tensor:
    """Waits for a message on the current stream; returns its numbers, flat."""
    return sent if sent.device.type == "cpu" else collectives.wait_tensor(sent)


class Outgoing:
    """A flat message. Write its numbers, and then send it once.

    Args:
        count: its numbers.
        like: a tensor on its device.

    Attributes:
        numbers: the message.
    """

    def __init__(self, axis: RankAxis, count: int, like: Tensor, dtype: torch.dtype) -> None:
        self._axis, self.numbers = axis, like.new_empty(count, dtype=dtype)

    @classmethod
    def of(cls, axis: RankAxis, tensor: Tensor) -> Outgoing:
        """Returns a tensor as a message. It is copied if it is not dense."""
        outgoing = cls.__new__(cls)
        outgoing._axis, outgoing.numbers = axis, tensor.contiguous().view(-1)
        return outgoing

    def hop(self, distance: int) -> Tensor:
        """Sends the message ``distance`` ranks on, in a ring; receives the one from as far behind."""
        axis, count = self._axis, self.numbers.numel()
        to, source = (axis.rank + distance) % axis.size, (axis.rank - distance) % axis.size
        # A send to one rank, as an all-to-all: the package needs all-to-all and all-gather alone.
        received, sent = ([count * (rank == other) for rank in range(axis.size)] for other in (source, to))
        return _started(collectives.all_to_all_single(self.numbers, received, sent, axis.name))[0]

    def deal(self) -> Tensor:
        """Sends every rank its row of the message ``[ranks, numbers]``; receives a row of each, in their order."""
        axis, row = self._axis, self.numbers.numel() // self._axis.size
        return _started(collectives.all_to_all_single(self.numbers, [row] * axis.size, [row] * axis.size, axis.name))[0]

    def deal_to_others(self) -> Tensor:
        """Sends every other rank its row of ``[other ranks, numbers]``; receives a row of each other one."""
        axis, row = self._axis, self.numbers.numel() // (self._axis.size - 1)
        sizes = [row * (rank != axis.rank) for rank in range(axis.size)]
        return _started(collectives.all_to_all_single(self.numbers, sizes, sizes, axis.name))[0]


def gather(axis: RankAxis, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Gathers tensors of every rank; receives ``[ranks, numbers]`` of each, flat.

    One collective takes them all: a second one would wait for the kernel that overlaps the first.
    """
    dense = [tensor.contiguous().view(-1) for tensor in tensors]
    return _started(*collectives.all_gather_into_tensor_coalesced(dense, axis.size, axis.name))


def _started(*sent: Tensor) -> list[Tensor]:
    """Returns the results of a collective that was just started, and gives it a head start over the next kernel.

    On a CPU it waits at once, because gloo corrupts memory if several collectives are in flight (seen with torch 2.13
    alone, on two all-gathers and four all-to-alls of a few hundred numbers).
    """
    head_start(sent[0].device)
    return [collectives.wait_tensor(each) if each.device.type == "cpu" else each for each in sent]
