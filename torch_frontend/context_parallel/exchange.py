"""The exchanges of context parallelism, started early and waited for late.

They are collectives, on any backend of torch.distributed that has all-to-all and all-gather (NCCL, gloo). torch
registers their derivatives in Python, which costs time without a gradient, too: on one CPU core, about 25 of the 60
microseconds of a collective. So they are called below autograd: context parallelism has a derivative of its own.

``Keys`` yields a head group's blocks of keys and values, first this rank's own, then those of other ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any, Generic, TypeVar

import torch

from attn_core.context_parallel import borders
from attn_core.context_parallel.on_torch.positions import Places, border_pieces
from attn_core.context_parallel.on_torch.tiles import TileRun, head_start
from attn_core.context_parallel.plan import Step
from torch_frontend.context_parallel.mesh import RankAxis
from torch_frontend.context_parallel.prepare import RankPlan

Tensor = torch.Tensor
T = TypeVar("T")
_ops = torch.ops._c10d_functional
FEW = 2**22
"""Up to so many numbers, copying results into one message takes less time than sending several messages."""


def receive(sent: Tensor) -> Tensor:
    """Waits for a message on the current stream; returns its numbers, flat."""
    return sent if sent.device.type == "cpu" else wait_tensor(sent)


def hop(axis: RankAxis, message: Tensor, distance: int) -> Tensor:
    """Sends a flat message ``distance`` ranks on, in a ring; receives the one from as far behind."""
    count = message.numel()
    to, source = (axis.rank + distance) % axis.size, (axis.rank - distance) % axis.size
    # A send to one rank, as an all-to-all: the package needs all-to-all and all-gather alone.
    received, sent = ([count * (rank == other) for rank in range(axis.size)] for other in (source, to))
    return _started(all_to_all_single(message, received, sent, axis.name))[0]


def deal(axis: RankAxis, message: Tensor) -> Tensor:
    """Sends every rank its row of ``[ranks, numbers]``, flat; receives a row of each, in their order."""
    sizes = [message.numel() // axis.size] * axis.size
    return _started(all_to_all_single(message, sizes, sizes, axis.name))[0]


def deal_to_others(axis: RankAxis, message: Tensor) -> Tensor:
    """Sends every other rank its row of ``[other ranks, numbers]``, flat; receives a row of each other one."""
    row = message.numel() // (axis.size - 1)
    sizes = [row * (rank != axis.rank) for rank in range(axis.size)]
    return _started(all_to_all_single(message, sizes, sizes, axis.name))[0]


def gather_flat(axis: RankAxis, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Gathers tensors of every rank; receives ``[ranks, numbers]`` of each, flat.

    One collective takes them all: a second one would wait for the kernel that overlaps the first.
    """
    dense = [tensor.contiguous().view(-1) for tensor in tensors]
    return _started(*all_gather_into_tensor_coalesced(dense, axis.size, axis.name))


def _started(*sent: Tensor) -> list[Tensor]:
    """Returns the results of a collective that was just started, and gives it a head start over the next kernel.

    On a CPU it waits at once, because gloo corrupts memory if several collectives are in flight (seen with torch 2.13
    alone, on two all-gathers and four all-to-alls of a few hundred numbers).
    """
    head_start(sent[0].device)
    return [wait_tensor(each) if each.device.type == "cpu" else each for each in sent]


class PendingExchange(Generic[T]):
    """An exchange under way.

    Args:
        sent: messages under way.
        unpack: turns the tensors that arrived into the result. It may empty the list to free them early.
    """

    def __init__(self, sent: Sequence[Tensor], unpack: Callable[[list[Tensor]], T]) -> None:
        self._sent, self._unpack = list(sent), unpack

    @classmethod
    def ready(cls, result: T) -> PendingExchange[T]:
        """Returns an exchange that sends nothing: its result is here already."""
        return cls([], lambda _: result)

    def wait(self) -> T:
        """Waits for the tensors to arrive and returns the result. Call it once, unless the exchange is ``ready``."""
        # The list is emptied, so that this object keeps no buffer alive while unpack frees them one by one.
        sent, self._sent = self._sent, []
        arrived = [receive(each) for each in sent]
        sent.clear()
        return self._unpack(arrived)


def heads_to_positions(
    axis: RankAxis, tensors: Sequence[Tensor], places: Sequence[Places]
) -> PendingExchange[list[Tensor]]:
    """Exchanges this rank's positions of all heads for all positions of this rank's heads.

    Args:
        tensors: ``[batch, shard, ranks, heads of one, dim]``.
        places: for each tensor, the places of its positions in the ranks' shards, end to end.

    Returns:
        ``[batch, positions, heads of one, dim]`` of each.
    """
    by_rank = [tensor.permute(2, 0, 1, 3, 4) for tensor in tensors]
    # The cases that fit side by side: one width, one dtype, and one order of positions.
    if len(tensors) > 1 and len({(tensor.shape[-1], tensor.dtype, id(at)) for tensor, at in zip(tensors, places)}) == 1:
        # One message: the tensors lie side by side along the heads.
        heads = [tensor.shape[3] for tensor in tensors]
        joined = (*by_rank[0].shape[:3], sum(heads), by_rank[0].shape[4])
        message = tensors[0].new_empty(joined)
        torch.cat(by_rank, 3, out=message)
        return PendingExchange(
            [deal(axis, message.view(-1))],
            lambda arrived: list(_join_shards(arrived[0], joined, places[0]).split(heads, 2)),
        )
    shapes = [tensor.shape for tensor in by_rank]
    sent = [deal(axis, tensor.contiguous().view(-1)) for tensor in by_rank]
    return PendingExchange(sent, lambda arrived: list(map(_join_shards, arrived, shapes, places)))


def _join_shards(arrived: Tensor, shape: Sequence[int], places: Places) -> Tensor:
    """Returns ``[ranks, batch, shard, heads, dim]`` as ``[batch, positions, heads, dim]``."""
    return places.take(arrived.view(shape).transpose(0, 1).flatten(1, 2))


def positions_to_heads(
    axis: RankAxis, tensors: Sequence[Tensor], places: Sequence[Places], shards: Sequence[int]
) -> PendingExchange[list[Tensor]]:
    """The inverse of ``heads_to_positions``.

    Args:
        tensors: ``[batch, positions, heads of one, dim]``.
        places: as in ``heads_to_positions``.
        shards: the places of each tensor's shard.

    Returns:
        ``[batch, shard, ranks, heads of one, dim]`` of each, with zeros at places without a position.
    """
    by_rank = [
        of_tensor.scatter(tensor, axis.size * shard).unflatten(1, (axis.size, shard)).transpose(0, 1)
        for tensor, of_tensor, shard in zip(tensors, places, shards, strict=True)
    ]
    shapes = [tensor.shape for tensor in by_rank]
    size = axis.size, sum(prod(shape[1:]) for shape in shapes)
    if len({tensor.dtype for tensor in tensors}) == 1 < len(tensors) and prod(size) <= FEW:
        message = tensors[0].new_empty(size)
        for column, tensor in zip(_columns(message, shapes), by_rank, strict=True):
            column.copy_(tensor)
        sent = [deal(axis, message.view(-1))]
    else:
        sent = [deal(axis, tensor.contiguous().view(-1)) for tensor in by_rank]

    def unpack(arrived: list[Tensor]) -> list[Tensor]:
        if len(arrived) < len(shapes):
            arrived = _columns(arrived[0].view(size), shapes)
        return [each.view(shape).permute(1, 2, 0, 3, 4) for each, shape in zip(arrived, shapes, strict=True)]

    return PendingExchange(sent, unpack)


def _columns(message: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Returns views ``[ranks, ...]`` of the tensors that lie side by side in ``[ranks, numbers]``."""
    columns = message.split([prod(shape[1:]) for shape in shapes], 1)
    return [column.view(shape) for column, shape in zip(columns, shapes, strict=True)]


def gather(axis: RankAxis, tensors: Sequence[Tensor]) -> PendingExchange[list[Tensor]]:
    """Gathers ``[batch, places, heads, dim]`` of every rank; returns ``[batch, ranks * places, heads, dim]``."""
    shapes = [tensor.shape for tensor in tensors]

    def unpack(arrived: list[Tensor]) -> list[Tensor]:
        joined: list[Tensor] = []
        while arrived:  # pop, so that each buffer is freed when it has been copied
            joined.append(arrived.pop(0).view(axis.size, *shapes[len(joined)]).transpose(0, 1).flatten(1, 2))
        return joined

    return PendingExchange(gather_flat(axis, tensors), unpack)


def gather_keys(axis: RankAxis, keys: Sequence[Tensor]) -> PendingExchange[list[Tensor]]:
    """Gathers k and v, as ``gather`` does. Two ranks swap theirs in one message, and each gets the other one's only."""
    if axis.size > 2:
        return gather(axis, keys)
    swapped = KVPair.pack([[tensor] for tensor in keys]).hop(axis, 1)
    return PendingExchange([], lambda _: list(swapped.wait()))


class GradientSend:
    """Sends the gradients of other ranks' keys, ``[batch, others * places, heads, dim]`` each, in one message.

    Args:
        places: the places of one rank's block.
        blocks: this rank's k and v.
        dtype: of the gradients that are sent.

    Attributes:
        buffers: with one other rank, views of the message, so that the sums are computed in place; with more ranks
            None, and ``send`` copies.
    """

    def __init__(self, axis: RankAxis, places: int, blocks: Sequence[Tensor], dtype: torch.dtype) -> None:
        self._axis, self._others = axis, axis.size - 1
        self._shapes = [(self._others, block.shape[0], places, *block.shape[2:]) for block in blocks]
        self._like = blocks[0].new_empty(0, dtype=dtype)
        self._message: Tensor | None = None
        self.buffers: list[Tensor | None] = [None] * len(blocks)
        if self._others == 1:
            self._message = self._new_message()
            self.buffers = [column[0] for column in self._columns(self._message)]

    def send(self, sums: list[Tensor], dtype: torch.dtype) -> PendingExchange[list[Tensor]]:
        """Sends every other rank the sums for its keys.

        Args:
            sums: the buffers, or tensors in the order of ranks. The list is emptied, so that tensors are freed once
                they have been copied.
            dtype: in which the results that arrive are added up.

        Returns:
            ``[batch, places, heads, dim]`` of each: the other ranks' results for this rank's keys, added up in the
            order of ranks, so that every run gives the same bits.
        """
        message = self._message
        if message is None:
            message = self._new_message()
            for column in self._columns(message):
                column.copy_(sums.pop(0).unflatten(1, (self._others, -1)).transpose(0, 1))
        sums.clear()
        # The buffers are views of the message, and would keep it alive after it was sent.
        self._message, self.buffers = None, []

        def unpack(arrived: list[Tensor]) -> list[Tensor]:
            columns = self._columns(arrived.pop())
            return [column[0] if len(column) == 1 else column.sum(0, dtype=dtype) for column in columns]

        # A rank sends itself nothing: the gradients of its own keys never leave it.
        return PendingExchange([deal_to_others(self._axis, message)], unpack)

    def _new_message(self) -> Tensor:
        return self._like.new_empty(sum(map(prod, self._shapes)))

    def _columns(self, message: Tensor) -> list[Tensor]:
        return _columns(message.view(self._others, -1), self._shapes)


class KVPair:
    """Keys and values, or their gradients, in one flat buffer, so that they travel as one message.

    Iterating yields the two tensors, as views of the buffer.
    """

    def __init__(self, buffer: Tensor, shapes: Sequence[Sequence[int]]) -> None:
        self._buffer, self._shapes = buffer, shapes

    @classmethod
    def pack(cls, tensors: Sequence[Sequence[Tensor]]) -> KVPair:
        """Copies two tensors of one dtype into a message, each from pieces ``[batch, places, heads, dim]`` in order."""
        every = [piece for pieces in tensors for piece in pieces]
        places = [sum(piece.shape[1] for piece in pieces) for pieces in tensors]
        shapes = [
            (pieces[0].shape[0], count, *pieces[0].shape[2:]) for pieces, count in zip(tensors, places, strict=True)
        ]
        pair = cls.empty(shapes, every[0], every[0].dtype)
        if all(piece.is_contiguous() for piece in every):  # one kernel
            torch.cat([piece.view(-1) for piece in every], out=pair._buffer)
        else:
            for part, pieces in zip(pair, tensors, strict=True):
                torch.cat(list(pieces), 1, out=part)
        return pair

    @classmethod
    def empty(cls, shapes: Sequence[Sequence[int]], like: Tensor, dtype: torch.dtype) -> KVPair:
        """Returns a message with undefined values on the device of ``like``."""
        return cls(like.new_empty(sum(map(prod, shapes)), dtype=dtype), shapes)

    def __iter__(self) -> Iterator[Tensor]:
        parts = torch.split_with_sizes(self._buffer, [prod(shape) for shape in self._shapes])
        return (part.view(shape) for part, shape in zip(parts, self._shapes, strict=True))

    def hop(self, axis: RankAxis, distance: int) -> PendingExchange[KVPair]:
        """Sends the pair ``distance`` ranks on, in a ring; returns the pair that arrives from as far behind."""
        distance, shapes = distance % axis.size, self._shapes
        if not distance:
            return PendingExchange.ready(self)
        return PendingExchange([hop(axis, self._buffer, distance)], lambda arrived: KVPair(arrived[0], shapes))


def all_to_all_single(sent: Tensor, received_sizes: list[int], sent_sizes: list[int], group: str) -> Tensor:
    """Starts to send ``sent_sizes[r]`` numbers of a flat tensor to rank r; returns what will arrive, flat."""
    return _below_autograd(_ops.all_to_all_single.default, sent, received_sizes, sent_sizes, group)  # type: ignore[no-any-return]


def all_gather_into_tensor_coalesced(tensors: list[Tensor], size: int, group: str) -> list[Tensor]:
    """Starts to gather tensors of ``size`` ranks in one message; returns what will arrive, rank by rank."""
    return _below_autograd(_ops.all_gather_into_tensor_coalesced.default, tensors, size, group)  # type: ignore[no-any-return]


def wait_tensor(tensor: Tensor) -> Tensor:
    """Waits for the result of a collective, on a GPU on the current stream, and returns it."""
    return _below_autograd(_ops.wait_tensor.default, tensor)  # type: ignore[no-any-return]


def _below_autograd(operator: Callable[..., Any], *arguments: Any) -> Any:
    if torch.compiler.is_compiling():  # a trace keeps the operators themselves
        return operator(*arguments)
    with torch._C._AutoDispatchBelowAutograd():
        return operator(*arguments)


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
        self._pending: PendingExchange[list[Tensor]] | None = None
        if plan.gathers and not gathered:
            self._pending = gather_keys(plan.outer, self._padded())

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
