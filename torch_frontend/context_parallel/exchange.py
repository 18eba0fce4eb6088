"""The collectives of context parallelism: torch's functional collectives, started early and waited for late.

They work on any backend of torch.distributed that has all-to-all and all-gather (NCCL, gloo).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist

from attn_core.context_parallel.on_torch.head_start import head_start
from attn_core.context_parallel.on_torch.places import Places

Tensor = torch.Tensor
_c10d = torch.ops._c10d_functional


Waiting = Callable[[], list[Tensor]]
"""A function that waits for an exchange and returns the tensors that arrived."""


class Axis(NamedTuple):
    """One axis of ranks: the name of its process group, its size, and this process's rank in it."""

    name: str
    size: int
    rank: int


def axis(name: str) -> Axis:
    """The axis of a process group by its name; one rank for the empty name."""
    if not name:
        return Axis("", 1, 0)
    group = dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type, unused-ignore]
    return Axis(name, group.size(), group.rank())


def heads_to_positions(axis: Axis, tensors: Sequence[Tensor], held: Sequence[Places]) -> Waiting:
    """Exchanges this rank's positions of all heads for all positions of this rank's heads.

    Args:
        tensors: ``[batch, shard, ranks, heads of one, dim]``, of one dtype.
        held: for each tensor, where its positions are in the ranks' shards end to end.

    Returns:
        A function that waits for ``[batch, positions, heads of one, dim]``.
    """
    if len(tensors) > 1 and len({tensor.shape[-1] for tensor in tensors}) == 1 and len(set(map(id, held))) == 1:
        heads = [tensor.shape[3] for tensor in tensors]  # one message: the tensors lie side by side along the heads
        packed = _side_by_side([tensor.permute(2, 0, 1, 3, 4) for tensor in tensors], 3)
        sent = _to_all(axis, packed)
        return lambda: list(held[0].take(sent().transpose(0, 1).flatten(1, 2)).split(heads, 2))
    waits = [_to_all(axis, tensor.permute(2, 0, 1, 3, 4).contiguous()) for tensor in tensors]
    return lambda: [places.take(wait().transpose(0, 1).flatten(1, 2)) for wait, places in zip(waits, held, strict=True)]


def positions_to_heads(axis: Axis, tensors: Sequence[Tensor], held: Sequence[Places], shards: Sequence[int]) -> Waiting:
    """The inverse of ``heads_to_positions``.

    Args:
        tensors: ``[batch, positions, heads of one, dim]``; held: as above; shards: places of each tensor's
            shard.

    Returns:
        A function that waits for ``[batch, shard, ranks, heads of one, dim]``, zeros at places without a position.
    """
    waits = []
    for tensor, places, shard in zip(tensors, held, shards, strict=True):
        whole = places.scatter(tensor, axis.size * shard)
        waits.append(_to_all(axis, whole.unflatten(1, (axis.size, shard)).transpose(0, 1).contiguous()))
    return lambda: [wait().permute(1, 2, 0, 3, 4) for wait in waits]


def _to_all(axis: Axis, tensor: Tensor) -> Callable[[], Tensor]:
    """Sends ``tensor[r]`` to rank r; the result waits for the tensors that arrive, in the same shape."""
    even = [tensor.numel() // axis.size] * axis.size
    arrived, shape = _under_way(_c10d.all_to_all_single(tensor.view(-1), even, even, axis.name)), tensor.shape
    head_start(tensor.device)
    return lambda: arrived().view(shape)


def _under_way(sent: Tensor) -> Callable[[], Tensor]:
    """A function that waits for a collective's result.

    Collectives on the CPU are waited for at once, because gloo corrupts memory if several are in flight (seen with
    torch 2.13 alone, on two all-gathers and four all-to-alls of a few hundred numbers).
    """
    if sent.device.type == "cpu":
        here = _c10d.wait_tensor(sent)
        return lambda: here
    return lambda: _c10d.wait_tensor(sent)  # type: ignore[no-any-return]


def gather(axis: Axis, tensors: Sequence[Tensor]) -> Waiting:
    """Gathers ``[batch, places, heads, dim]`` of every rank; waits for ``[batch, ranks * places, heads, dim]`` of each.

    All tensors travel in one message: on a GPU, a second message would wait for the kernel that overlaps the first.
    """
    dense = [tensor.contiguous().view(-1) for tensor in tensors]
    sent = _c10d.all_gather_into_tensor_coalesced(dense, axis.size, axis.name)
    waits = [(_under_way(each), tensor.shape) for each, tensor in zip(sent, tensors, strict=True)]
    head_start(tensors[0].device)
    del dense, sent

    def received() -> list[Tensor]:
        tensors = []
        while waits:  # pop, so that each received buffer is freed once it has been copied into order
            arrived, shape = waits.pop(0)
            tensors.append(arrived().view(axis.size, *shape).transpose(0, 1).flatten(1, 2))
        return tensors

    return received


class GradientSend:
    """Sends the gradients of other ranks' keys, ``[batch, others * places, heads, dim]`` each, in one message.

    Attributes:
        homes: with one other rank, views of the message that the sums are computed in; with more ranks None, and
            ``send`` copies.
    """

    def __init__(self, axis: Axis, places: int, blocks: Sequence[Tensor], dtype: torch.dtype) -> None:
        self._axis, self._others = axis, axis.size - 1
        self._shapes = [(self._others, block.shape[0], places, *block.shape[2:]) for block in blocks]
        self._like = blocks[0].new_empty(0, dtype=dtype)
        self._buffer: Tensor | None = None
        self.homes: list[Tensor | None] = [None] * len(blocks)
        if self._others == 1:
            self._buffer = self._message()
            self.homes = [column[0] for column in _columns(self._buffer, self._shapes)]

    def send(self, sums: list[Tensor]) -> Waiting:
        """Sends every other rank the sums for its keys.

        Args:
            sums: the homes, or tensors in the order of ranks. The list is emptied, so that tensors are freed once they
                have been copied.

        Returns:
            A function that waits for ``[others, batch, places, heads, dim]`` of each: the other ranks' sums for this
            rank.
        """
        axis, buffer = self._axis, self._buffer
        if buffer is None:
            buffer = self._message()
            for place in _columns(buffer, self._shapes):
                place.copy_(sums.pop(0).unflatten(1, (self._others, -1)).transpose(0, 1))
        sums.clear()
        self._buffer, self.homes = None, []
        sizes = [0 if rank == axis.rank else buffer.shape[1] for rank in range(axis.size)]
        arrived = _under_way(_c10d.all_to_all_single(buffer.view(-1), sizes, sizes, axis.name))
        shape, shapes = buffer.shape, self._shapes
        head_start(buffer.device)
        return lambda: _columns(arrived().view(shape), shapes)

    def _message(self) -> Tensor:
        return self._like.new_empty(self._others, sum(prod(shape[1:]) for shape in self._shapes))


def _columns(buffer: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Views ``[ranks, ...]`` of the tensors that lie side by side in ``[ranks, numbers]``."""
    columns = buffer.split([prod(shape[1:]) for shape in shapes], 1)
    return [column.view(tuple(shape)) for column, shape in zip(columns, shapes, strict=True)]


def _side_by_side(tensors: Sequence[Tensor], axis: int) -> Tensor:
    """Joins the tensors along an axis into a dense tensor; ``torch.cat`` may keep the order of permuted axes."""
    shape = list(tensors[0].shape)
    shape[axis] = sum(tensor.shape[axis] for tensor in tensors)
    joined, at = tensors[0].new_empty(shape), 0
    for tensor in tensors:
        joined.narrow(axis, at, tensor.shape[axis]).copy_(tensor)
        at += tensor.shape[axis]
    return joined


def hop(axis: Axis, buffer: Tensor, distance: int) -> Callable[[], Tensor]:
    """Sends a flat buffer ``distance`` ranks on; the result waits for the buffer from as far behind."""
    distance %= axis.size
    if not distance:
        return lambda: buffer
    to, of = (axis.rank + distance) % axis.size, (axis.rank - distance) % axis.size
    size = buffer.numel()
    sizes = ([size * (rank == other) for rank in range(axis.size)] for other in (of, to))
    waiting = _under_way(_c10d.all_to_all_single(buffer, *sizes, axis.name))
    head_start(buffer.device)
    return waiting


def flat(tensors: Sequence[Tensor]) -> Tensor:
    """Copies tensors of one dtype into one buffer."""
    buffer = tensors[0].new_empty(sum(tensor.numel() for tensor in tensors))
    for part, tensor in zip(parts_of(buffer, [tensor.shape for tensor in tensors]), tensors, strict=True):
        part.copy_(tensor)
    return buffer


def parts_of(buffer: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """The views of the tensors in a buffer of ``flat``."""
    parts = buffer.split([prod(shape) for shape in shapes])
    return [part.view(tuple(shape)) for part, shape in zip(parts, shapes, strict=True)]
