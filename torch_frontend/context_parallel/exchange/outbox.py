"""Outbox: memory of a rank out of which the other ranks copy messages, instead of a collective.

A collective of NCCL is a kernel: it occupies multiprocessors that the attention beside it then lacks. The copy engines
of a GPU copy between the GPUs of a host without them. Every message goes this way:

1. The sender reserves a region of its outbox, once every reader of the message that lay there has copied it.
2. It writes the message, and then tells each reader the message's number.
3. A reader waits for this number, copies its part into memory of its own, and tells the sender that number.

Every rank sends the same messages in the same order, of the same sizes. So all ranks count alike, and each knows where
a message lies in the outbox of another one. On a GPU nothing waits on the host: streams wait for numbers in memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

import torch

Tensor = torch.Tensor
READY, DONE = 0, 1
"""What a rank tells another one: it has written a message for it, or it has copied the other rank's message."""
ALIGNMENT = 512
"""The bytes of which the start of every message is a multiple."""
ROOM = 3
"""How many of the largest messages fit into an outbox: one that is written while another one is sent, anywhere."""
SMALLEST = 2**23
"""The fewest bytes of an outbox, so that small messages seldom wait for each other."""


class Part(NamedTuple):
    """The numbers ``[start, stop)`` of the message of a rank."""

    rank: int
    start: int
    stop: int


class PeerMemory(Protocol):
    """Memory that every rank of a group can read, and numbers that ranks tell each other.

    Attributes:
        size: the bytes of each rank's memory.
    """

    size: int

    def bytes_of(self, rank: int) -> Tensor:
        """Returns the memory of a rank: uint8 ``[size]``."""

    def tell(self, rank: int, what: int, number: int) -> None:
        """Tells a rank a number, after everything that the current stream has queued."""

    def wait(self, rank: int, what: int, number: int) -> None:
        """Makes the current stream wait until a rank has told this rank the number, or a later one."""

    def order(self) -> None:
        """Makes the current stream continue after that of the message before, because numbers must rise."""

    def copying(self) -> AbstractContextManager[object]:
        """Returns a context on a stream for copies, which waits for what the stream outside has queued."""

    def mark(self) -> Callable[[], None]:
        """Returns a function that makes its caller's stream wait for what the current stream has queued until now."""

    def keep(self, tensor: Tensor) -> None:
        """Keeps the memory of a tensor that is dropped until all copies into it are done."""

    def finish(self) -> None:
        """Waits on the host until the device has done what the current stream has queued."""


class Arriving:
    """A message on its way to this rank."""

    def __init__(self, numbers: Tensor, wait: Callable[[], None], keep: Callable[[Tensor], None]) -> None:
        self._numbers: Tensor | None = numbers
        self._wait, self._keep = wait, keep

    def wait(self) -> Tensor:
        """Makes the current stream wait for the message; returns its numbers, flat. Call it once."""
        numbers, self._numbers = self._numbers, None
        assert numbers is not None, "wait was called before"
        self._wait()
        return numbers

    def __del__(self) -> None:
        # Without this, memory that is still copied into would be free for other tensors.
        if self._numbers is not None:
            self._keep(self._numbers)


class Message:
    """A region of an outbox, to be written and sent.

    Attributes:
        numbers: the message, flat.
        stop: the byte behind the region.
        number: counts the messages that were sent; 0 before.
        readers: the ranks that copy it.
    """

    def __init__(self, area: _Area, start: int, count: int, dtype: torch.dtype) -> None:
        self._area, self._start, self._dtype = area, start, dtype
        self.stop = start + count * dtype.itemsize
        self.numbers = self._of(area.rank)
        self.number = 0
        self.readers: tuple[int, ...] = ()
        self.overwritten = False

    def send(self, readers: Iterable[int], parts: Sequence[Part]) -> Arriving:
        """Sends the message, and starts to copy this rank's parts of the others' messages of the same number.

        Args:
            readers: the other ranks that copy a part of this message.
            parts: what this rank copies, also of its own message.

        Returns:
            the parts end to end.
        """
        assert not self.overwritten, "later messages lie in the region of this one"
        area, memory = self._area, self._area.memory
        memory.order()
        area.sent += 1
        self.number, self.readers = area.sent, tuple(readers)
        for reader in self.readers:
            memory.tell(reader, READY, self.number)
        sizes = [part.stop - part.start for part in parts]
        result = self.numbers.new_empty(sum(sizes))
        pieces = list(zip(result.split(sizes), parts, strict=True))
        for piece, (rank, start, stop) in pieces:
            if rank == area.rank:  # on this stream, because the next message in this region is written on it
                piece.copy_(self.numbers[start:stop])
        with memory.copying():
            for piece, (rank, start, stop) in pieces:
                if rank != area.rank:
                    memory.wait(rank, READY, self.number)
                    piece.copy_(self._of(rank)[start:stop])
                    memory.tell(rank, DONE, self.number)
            arrived = memory.mark()
        return Arriving(result, arrived, memory.keep)

    def overlaps(self, start: int, stop: int) -> bool:
        """Returns whether the region has bytes of ``[start, stop)``."""
        return self._start < stop and start < self.stop

    def _of(self, rank: int) -> Tensor:
        """Returns the same region of a rank's outbox."""
        return self._area.memory.bytes_of(rank)[self._start : self.stop].view(self._dtype)


class _Area:
    """Memory whose regions are reserved in turn, from its start to its end and again."""

    def __init__(self, memory: PeerMemory, rank: int) -> None:
        self.memory, self.rank, self.sent = memory, rank, 0
        self._next = 0
        self._taken: deque[Message] = deque()
        """The messages whose regions were not reserved again, the oldest first."""

    def reserve(self, count: int, dtype: torch.dtype) -> Message:
        """Returns a region, which the current stream may write once its last readers are done."""
        self.memory.order()
        size = count * dtype.itemsize
        before, start = self._next, self._next
        if start + size > self.memory.size:  # what lies behind is older than what lies at the start
            start = 0
        message = Message(self, start, count, dtype)
        last: dict[int, int] = {}
        while self._taken and (
            (start < before and self._taken[0].overlaps(before, self.memory.size))
            or self._taken[0].overlaps(start, message.stop)
        ):
            oldest = self._taken.popleft()
            oldest.overwritten = not oldest.number  # an error came before it was sent
            for reader in oldest.readers:
                last[reader] = max(last.get(reader, 0), oldest.number)
        self._wait(last)
        if size:  # a message of nothing covers no byte, and would stay the oldest for good
            self._taken.append(message)
        self._next = -(-message.stop // ALIGNMENT) * ALIGNMENT
        return message

    def finish(self) -> None:
        """Waits on the host until every message that was sent has been copied."""
        sent = sorted(self._taken, key=lambda message: message.number)
        self._wait({reader: message.number for message in sent for reader in message.readers})
        self.memory.finish()

    def _wait(self, last: dict[int, int]) -> None:
        for reader, number in last.items():
            self.memory.wait(reader, DONE, number)


class Outbox:
    """The outbox of this rank in a group. It grows with the largest message, in a call that all ranks make together.

    Args:
        allocate: returns memory of so many bytes for each rank of the group, once all ranks have called it.
        rank: this rank's number in the group.
    """

    def __init__(self, allocate: Callable[[int], PeerMemory], rank: int) -> None:
        self._allocate, self._rank = allocate, rank
        self._area: _Area | None = None

    def reserve(self, count: int, dtype: torch.dtype) -> Message:
        """Returns a region for a message of ``count`` numbers."""
        message = -(-count * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        needed = max(SMALLEST, ROOM * message)
        if self._area is None or self._area.memory.size < needed:
            if self._area is not None:
                self._area.finish()
            # Not both at once. A message that is not sent yet keeps its own memory.
            self._area = None
            self._area = _Area(self._allocate(needed), self._rank)
        return self._area.reserve(count, dtype)
