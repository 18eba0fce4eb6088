"""What ranks send each other in context parallelism: torch's functional collectives, started early and waited for late.

Everything works on any backend of torch.distributed that has all-to-all, all-gather and reduce-scatter (NCCL, gloo).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist

Tensor = torch.Tensor
_c10d = torch.ops._c10d_functional


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


def heads_to_positions(axis: Axis, tensors: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
    """All positions of this rank's heads for this rank's positions of all heads.

    Args:
        tensors: ``[batch, shard, ranks, heads of one, dim]``, of one dtype.

    Returns:
        What waits for them: ``[batch, ranks * shard, heads of one, dim]``, the ranks' shards end to end.
    """
    sent = _all_to_all(axis, [tensor.permute(2, 0, 1, 3, 4) for tensor in tensors])

    def received() -> list[Tensor]:
        # [ranks, batch, shard, heads, dim] -> [batch, ranks * shard, heads, dim]
        return [part.permute(1, 0, 2, 3, 4).flatten(1, 2) for part in sent()]

    return received


def positions_to_heads(axis: Axis, tensors: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
    """The way back.

    Args:
        tensors: ``[batch, ranks * shard, heads of one, dim]``, of one dtype.

    Returns:
        What waits for them: ``[batch, shard, ranks, heads of one, dim]``.
    """
    sent = _all_to_all(axis, [tensor.unflatten(1, (axis.size, -1)).transpose(0, 1) for tensor in tensors])
    return lambda: [part.permute(1, 2, 0, 3, 4) for part in sent()]


def _all_to_all(axis: Axis, tensors: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
    """Sends ``tensor[r]`` of every tensor to rank r, all in one message; what waits for what the ranks sent here."""
    shapes = [tensor.shape[1:] for tensor in tensors]
    packed = torch.cat([tensor.reshape(axis.size, -1) for tensor in tensors], 1)
    even = [packed.shape[1]] * axis.size
    sent = _c10d.all_to_all_single(packed.flatten(), even, even, axis.name)

    def received() -> list[Tensor]:
        parts = _c10d.wait_tensor(sent).view(axis.size, -1).split([prod(shape) for shape in shapes], 1)
        return [part.unflatten(1, shape) for part, shape in zip(parts, shapes, strict=True)]

    return received


def gather(axis: Axis, tensors: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
    """Every rank's tensors, which are of one dtype; what waits for them: ``[ranks, ...]`` each."""
    sent = _c10d.all_gather_into_tensor(flat(tensors), axis.size, axis.name)
    shapes = [tensor.shape for tensor in tensors]

    def received() -> list[Tensor]:
        parts = _c10d.wait_tensor(sent).view(axis.size, -1).split([prod(shape) for shape in shapes], 1)
        return [part.unflatten(1, shape) for part, shape in zip(parts, shapes, strict=True)]

    return received


def scatter_sums(axis: Axis, tensors: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
    """The sum over ranks of ``tensor[this rank]``, of each ``[ranks, ...]``; what waits for it."""
    packed = torch.cat([tensor.flatten(1) for tensor in tensors], 1)
    sent = _c10d.reduce_scatter_tensor(packed.flatten(), "sum", axis.size, axis.name)
    shapes = [tensor.shape[1:] for tensor in tensors]
    return lambda: parts_of(_c10d.wait_tensor(sent), shapes)


def hop(axis: Axis, buffer: Tensor, distance: int) -> Callable[[], Tensor]:
    """Sends a flat buffer ``distance`` ranks on; what waits for the one that comes from as far behind."""
    distance %= axis.size
    if not distance:
        return lambda: buffer
    to, of = (axis.rank + distance) % axis.size, (axis.rank - distance) % axis.size
    size = buffer.numel()
    sizes = ([size * (rank == other) for rank in range(axis.size)] for other in (of, to))
    sent = _c10d.all_to_all_single(buffer, *sizes, axis.name)
    return lambda: _c10d.wait_tensor(sent)  # type: ignore[no-any-return]


def flat(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors of one dtype in one buffer."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def parts_of(buffer: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """The views of ``flat``'s tensors in its buffer."""
    parts = buffer.split([prod(shape) for shape in shapes])
    return [part.view(tuple(shape)) for part, shape in zip(parts, shapes, strict=True)]
