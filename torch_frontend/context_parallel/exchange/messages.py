"""Outgoing: a message to other ranks, sent by a collective or through an outbox."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from attn_core.context_parallel.on_torch.head_start import head_start
from torch_frontend.context_parallel.exchange import collectives
from torch_frontend.context_parallel.exchange.copy_engines import find_outbox
from torch_frontend.context_parallel.exchange.outbox import Arriving, Message, Part
from torch_frontend.context_parallel.mesh import RankAxis

Tensor = torch.Tensor
Sent = Tensor | Arriving
"""What ``receive`` waits for."""


def receive(sent: Sent) -> Tensor:
    """Waits for a message on the current stream; returns its numbers, flat."""
    if isinstance(sent, Arriving):
        return sent.wait()
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
        self._axis, self._message = axis, _reserve(axis, count, like, dtype)
        self.numbers = like.new_empty(count, dtype=dtype) if self._message is None else self._message.numbers

    @classmethod
    def of(cls, axis: RankAxis, tensor: Tensor) -> Outgoing:
        """Returns a tensor as a message. It is copied if it goes through an outbox, or is not dense."""
        outgoing = cls.__new__(cls)
        outgoing._axis, outgoing._message = axis, _reserve(axis, tensor.numel(), tensor, tensor.dtype)
        if outgoing._message is None:
            outgoing.numbers = tensor.contiguous().view(-1)
        else:
            outgoing.numbers = outgoing._message.numbers
            outgoing.numbers.view(tensor.shape).copy_(tensor)
        return outgoing

    def hop(self, distance: int) -> Sent:
        """Sends the message ``distance`` ranks on, in a ring; receives the one from as far behind."""
        axis, count = self._axis, self.numbers.numel()
        to, source = (axis.rank + distance) % axis.size, (axis.rank - distance) % axis.size
        if self._message is not None:
            return self._message.send((to,), [Part(source, 0, count)])
        # A send to one rank, as an all-to-all: the package needs all-to-all and all-gather alone.
        received, sent = ([count * (rank == other) for rank in range(axis.size)] for other in (source, to))
        return _started(collectives.all_to_all_single(self.numbers, received, sent, axis.name))[0]

    def send_to_all(self) -> Sent:
        """Sends every rank the message, through the outbox; receives ``[ranks, numbers]``."""
        assert self._message is not None
        whole = [Part(rank, 0, self.numbers.numel()) for rank in range(self._axis.size)]
        return self._message.send(_others(self._axis), whole)

    def deal(self) -> Sent:
        """Sends every rank its row of the message ``[ranks, numbers]``; receives a row of each, in their order."""
        axis, row = self._axis, self.numbers.numel() // self._axis.size
        if self._message is not None:
            rows = [Part(rank, axis.rank * row, (axis.rank + 1) * row) for rank in range(axis.size)]
            return self._message.send(_others(axis), rows)
        return _started(collectives.all_to_all_single(self.numbers, [row] * axis.size, [row] * axis.size, axis.name))[0]

    def deal_to_others(self) -> Sent:
        """Sends every other rank its row of ``[other ranks, numbers]``; receives a row of each other one."""
        axis, others = self._axis, _others(self._axis)
        row = self.numbers.numel() // len(others)
        if self._message is not None:
            # A rank leaves itself out, so the row of a later rank is one place earlier.
            mine = {rank: axis.rank - (axis.rank > rank) for rank in others}
            return self._message.send(others, [Part(rank, at * row, (at + 1) * row) for rank, at in mine.items()])
        sizes = [row * (rank != axis.rank) for rank in range(axis.size)]
        return _started(collectives.all_to_all_single(self.numbers, sizes, sizes, axis.name))[0]


def gather(axis: RankAxis, tensors: Sequence[Tensor]) -> list[Sent]:
    """Gathers tensors of every rank; receives ``[ranks, numbers]`` of each, flat.

    A collective takes them in one message: a second one would wait for the kernel that overlaps the first.
    """
    largest = max(tensors, key=lambda tensor: tensor.numel() * tensor.dtype.itemsize)
    if find_outbox(axis, largest.device, largest.numel(), largest.dtype) is not None:
        return [Outgoing.of(axis, tensor).send_to_all() for tensor in tensors]
    dense = [tensor.contiguous().view(-1) for tensor in tensors]
    return _started(*collectives.all_gather_into_tensor_coalesced(dense, axis.size, axis.name))


def _reserve(axis: RankAxis, count: int, like: Tensor, dtype: torch.dtype) -> Message | None:
    """Returns a message in this rank's outbox; None if the ranks exchange by collectives."""
    outbox = find_outbox(axis, like.device, count, dtype)
    return None if outbox is None else outbox.reserve(count, dtype)


def _others(axis: RankAxis) -> list[int]:
    """Returns the other ranks."""
    return [rank for rank in range(axis.size) if rank != axis.rank]


def _started(*sent: Tensor) -> list[Sent]:
    """Returns the results of a collective that was just started, and gives it a head start over the next kernel.

    On a CPU it waits at once, because gloo corrupts memory if several collectives are in flight (seen with torch 2.13
    alone, on two all-gathers and four all-to-alls of a few hundred numbers).
    """
    head_start(sent[0].device)
    return [collectives.wait_tensor(each) if each.device.type == "cpu" else each for each in sent]
