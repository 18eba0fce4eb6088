"""What ranks send each other in context parallelism: torch's functional collectives, started early and waited for late.

Everything works on any backend of torch.distributed that has all-to-all and all-gather (NCCL, gloo).
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
"""What waits for tensors that are on their way."""


class Axis(NamedTuple):
    """One axis of the ranks: the name of its process group, how many ranks it has, and which of them this is."""

    name: str
    size: int
    rank: int


def axis(name: str) -> Axis:
    """A process group by its name; one rank alone where there is none."""
    if not name:
        return Axis("", 1, 0)
    group = dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type, unused-ignore]
    return Axis(name, group.size(), group.rank())


def heads_to_positions(axis: Axis, tensors: Sequence[Tensor], held: Sequence[Places]) -> Waiting:
    """All positions of this rank's heads for this rank's positions of all heads.

    Args:
        tensors: ``[batch, shard, ranks, heads of one, dim]``, of one dtype.
        held: for each where its positions lie in the ranks' shards end to end.

    Returns:
        What waits for them: ``[batch, positions, heads of one, dim]``.
    """
    if len(tensors) > 1 and len({tensor.shape[-1] for tensor in tensors}) == 1 and len(set(map(id, held))) == 1:
        heads = [tensor.shape[3] for tensor in tensors]  # one message, in which each has heads of its own
        packed = _side_by_side([tensor.permute(2, 0, 1, 3, 4) for tensor in tensors], 3)
        sent = _to_all(axis, packed)
        return lambda: list(held[0].of(sent().transpose(0, 1).flatten(1, 2)).split(heads, 2))
    waits = [_to_all(axis, tensor.permute(2, 0, 1, 3, 4).contiguous()) for tensor in tensors]
    return lambda: [places.of(wait().transpose(0, 1).flatten(1, 2)) for wait, places in zip(waits, held, strict=True)]


def positions_to_heads(axis: Axis, tensors: Sequence[Tensor], held: Sequence[Places], shards: Sequence[int]) -> Waiting:
    """The way back.

    Args:
        tensors: ``[batch, positions, heads of one, dim]``; held: as above; shards: places of each one's shard.

    Returns:
        What waits for them: ``[batch, shard, ranks, heads of one, dim]``, zeros where a place holds nothing.
    """
    waits = []
    for tensor, places, shard in zip(tensors, held, shards, strict=True):
        whole = places.spread(tensor, axis.size * shard)
        waits.append(_to_all(axis, whole.unflatten(1, (axis.size, shard)).transpose(0, 1).contiguous()))
    return lambda: [wait().permute(1, 2, 0, 3, 4) for wait in waits]


def _to_all(axis: Axis, tensor: Tensor) -> Callable[[], Tensor]:
    """Sends ``tensor[r]`` to rank r; what waits for what the ranks sent here, in the same shape."""
    even = [tensor.numel() // axis.size] * axis.size
    arrived, shape = _under_way(_c10d.all_to_all_single(tensor.view(-1), even, even, axis.name)), tensor.shape
    head_start(tensor.device)
    return lambda: arrived().view(shape)


def _under_way(sent: Tensor) -> Callable[[], Tensor]:
    """What waits for a collective's result.

    Those on the CPU are waited for at once: gloo's corrupt memory where several are under way (seen with torch 2.13, by
    a program of torch alone, two all-gathers and four all-to-alls of a few hundred numbers).
    """
    if sent.device.type == "cpu":
        here = _c10d.wait_tensor(sent)
        return lambda: here
    return lambda: _c10d.wait_tensor(sent)  # type: ignore[no-any-return]


def gather(axis: Axis, tensors: Sequence[Tensor]) -> Waiting:
    """Every rank's ``[batch, places, heads, dim]``; what waits for ``[batch, ranks * places, heads, dim]`` of each.

    They travel at once: on a GPU a second message would not begin before the kernel ends that runs beside the first.
    """
    dense = [tensor.contiguous().view(-1) for tensor in tensors]
    sent = _c10d.all_gather_into_tensor_coalesced(dense, axis.size, axis.name)
    waits = [(_under_way(each), tensor.shape) for each, tensor in zip(sent, tensors, strict=True)]
    head_start(tensors[0].device)
    del dense, sent

    def received() -> list[Tensor]:
        found = []
        while waits:  # what has come is not held here, where it was put in order
            arrived, shape = waits.pop(0)
            found.append(arrived().view(axis.size, *shape).transpose(0, 1).flatten(1, 2))
        return found

    return received


class GradientSend:
    """Sums that a rank has for every other, ``[batch, others * places, heads, dim]`` each, which go in one message.

    Attributes:
        homes: where sums lie in the message from the beginning; None where they are copied, for more ranks than one.
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
        """Sends every other rank what is here for it, and nothing to this one.

        Args:
            sums: the homes; else in the order of ranks. The list is emptied: what has been copied is not held while it
                is sent.

        Returns:
            What waits for ``[others, batch, places, heads, dim]`` of each: what the other ranks had for this one.
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
    """Of ``[ranks, numbers]`` the views ``[ranks, ...]`` of tensors that lie side by side in it."""
    columns = buffer.split([prod(shape[1:]) for shape in shapes], 1)
    return [column.view(tuple(shape)) for column, shape in zip(columns, shapes, strict=True)]


def _side_by_side(tensors: Sequence[Tensor], axis: int) -> Tensor:
    """The tensors joined at an axis, dense; ``torch.cat`` may keep the order of permuted axes."""
    shape = list(tensors[0].shape)
    shape[axis] = sum(tensor.shape[axis] for tensor in tensors)
    made, at = tensors[0].new_empty(shape), 0
    for tensor in tensors:
        made.narrow(axis, at, tensor.shape[axis]).copy_(tensor)
        at += tensor.shape[axis]
    return made


def hop(axis: Axis, buffer: Tensor, distance: int) -> Callable[[], Tensor]:
    """Sends a flat buffer ``distance`` ranks on; what waits for the one that comes from as far behind."""
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
    """Tensors of one dtype in one buffer."""
    made = tensors[0].new_empty(sum(tensor.numel() for tensor in tensors))
    for part, tensor in zip(parts_of(made, [tensor.shape for tensor in tensors]), tensors, strict=True):
        part.copy_(tensor)
    return made


def parts_of(buffer: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """The views of ``flat``'s tensors in its buffer."""
    parts = buffer.split([prod(shape) for shape in shapes])
    return [part.view(tuple(shape)) for part, shape in zip(parts, shapes, strict=True)]
