"""Outbox: memory of a rank out of which the other ranks copy messages, instead of a collective.

A collective of NCCL is a kernel: it occupies multiprocessors that the attention beside it then lacks. The copy engines
of a GPU copy between the GPUs of a host without them. An outbox has a few slots, and every message goes this way:

1. The sender takes a slot, once every reader of the message that lay there has copied it.
2. It writes the message, and then announces it to each reader.
3. A reader waits for that, copies its part into memory of its own, and tells the sender that it has done so.

Every rank sends the same messages in the same order, of the same sizes. So all ranks take the same slots, and each
knows where a message lies in the outbox of another one. On a GPU nothing waits on the host: streams wait for marks in
memory. A mark is 0 or 1 and no count, so a CUDA graph that has captured a message can send it again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

import torch

Tensor = torch.Tensor
SLOTS = 3
"""How many messages an outbox holds: one that is written while another one is sent, anywhere."""
ALIGNMENT = 512
"""The bytes of which the size of a slot is a multiple."""
SMALLEST = 2**22
"""The fewest bytes of a slot, so that an outbox seldom grows."""
MAX_VIEWS = 256
"""How many views of slots an outbox remembers."""


class Part(NamedTuple):
    """The numbers ``[start, stop)`` of the message of a rank."""

    rank: int
    start: int
    stop: int


class Piece(NamedTuple):
    """Bytes of the message of another rank, and where they begin in the result."""

    rank: int
    start: int
    size: int
    place: int


class PeerMemory(Protocol):
    """Memory of every rank of a group, in slots, which the others read, and marks that ranks set for each other.

    Attributes:
        slot_size: the bytes of a slot.
    """

    slot_size: int

    def bytes_of(self, rank: int, slot: int) -> Tensor:
        """Returns a slot of a rank: uint8 ``[slot_size]``."""

    def reuse(self, slot: int) -> None:
        """Makes the current stream wait until every reader of this rank's message in a slot has copied it."""

    def announce(self, slot: int, readers: tuple[int, ...]) -> None:
        """Tells ranks that their message lies in a slot, after everything that the current stream has queued."""

    def copy(self, slot: int, result: Tensor, pieces: Sequence[Piece]) -> Callable[[], None]:
        """Starts to copy pieces of other ranks' messages, beside the current stream, once they are announced.

        Returns:
            a function that makes its caller's stream wait for the copies.
        """

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
        numbers = self._numbers
        assert numbers is not None, "wait was called before"
        self._wait()
        self._numbers = None
        return numbers

    def __del__(self) -> None:
        # Without this, memory that is still copied into would be free for other tensors.
        if self._numbers is not None:
            self._keep(self._numbers)


class Message:
    """A slot of an outbox, to be written and sent.

    Attributes:
        numbers: the message, flat.
        sent: whether it was sent.
        replaced: whether a later message lies in its slot.
    """

    def __init__(self, memory: PeerMemory, rank: int, slot: int, numbers: Tensor) -> None:
        # No area: it holds its messages, and memory in a cycle would be freed late, perhaps while a graph is captured.
        self._memory, self._rank, self._slot = memory, rank, slot
        self.numbers, self.sent, self.replaced = numbers, False, False

    def send(self, readers: Iterable[int], parts: Sequence[Part]) -> Arriving:
        """Sends the message, and starts to copy this rank's parts of the others' messages in the same slot.

        Args:
            readers: the other ranks that copy a part of this message.
            parts: what this rank copies, also of its own message.

        Returns:
            the parts end to end.
        """
        memory, numbers = self._memory, self.numbers
        assert not self.replaced, "a later message lies in the slot of this one"
        result = numbers.new_empty(sum(stop - start for _, start, stop in parts))
        self.sent = True
        memory.announce(self._slot, tuple(readers))
        pieces, place, width = [], 0, numbers.dtype.itemsize
        for rank, start, stop in parts:
            count = stop - start
            if rank == self._rank:  # on this stream, because the next message in this slot is written on it
                result[place : place + count].copy_(numbers[start:stop])
            else:
                pieces.append(Piece(rank, start * width, count * width, place * width))
            place += count
        # Ranks begin with the rank after them, so that not all read the memory of one rank at a time.
        pieces.sort(key=lambda piece: (piece.rank < self._rank, piece.rank))
        try:
            return Arriving(result, memory.copy(self._slot, result, pieces), memory.keep)
        except BaseException:
            memory.keep(result)  # some copies may have started
            raise


class _Area:
    """The slots of an outbox, taken in turn."""

    def __init__(self, memory: PeerMemory, rank: int) -> None:
        self.memory, self.rank, self.sent = memory, rank, 0
        self.messages: dict[int, Message | None] = dict.fromkeys(range(SLOTS))
        """The last message in each slot; the slot that was taken last comes last."""
        self._views: dict[tuple[int, int, torch.dtype], Tensor] = {}

    def reserve(self, count: int, dtype: torch.dtype) -> Message:
        """Returns a message in the slot that was taken first, which the current stream may write.

        A message that is not sent yet keeps its slot, unless no message is sent: then an error came before the oldest.
        """
        free = (slot for slot, message in self.messages.items() if message is None or message.sent)
        slot = next(free, next(iter(self.messages)))
        self.memory.reuse(slot)
        message = Message(self.memory, self.rank, slot, self._view(slot, count, dtype))
        before = self.messages.pop(slot)
        if before is not None:
            before.replaced = True
        self.messages[slot] = message
        self.sent += 1
        return message

    def finish(self) -> None:
        """Waits on the host until every message that was sent has been copied."""
        for slot in self.messages:
            self.memory.reuse(slot)
        self.memory.finish()

    def _view(self, slot: int, count: int, dtype: torch.dtype) -> Tensor:
        """Returns the first ``count`` numbers of a slot of this rank."""
        key = slot, count, dtype
        view = self._views.get(key)
        if view is None:
            if len(self._views) >= MAX_VIEWS:
                self._views.clear()
            with torch.inference_mode(False):  # or later calls could not write into it
                view = self.memory.bytes_of(self.rank, slot)[: count * dtype.itemsize].view(dtype)
            self._views[key] = view
        return view


class Outbox:
    """The outbox of this rank in a group. It grows with the largest message, in a call that all ranks make together.

    Args:
        allocate: returns memory with slots of so many bytes on each rank of the group, once all ranks have called it.
        rank: this rank's number in the group.
    """

    def __init__(self, allocate: Callable[[int], PeerMemory], rank: int) -> None:
        self._allocate, self._rank = allocate, rank
        self._area: _Area | None = None

    def holds(self, count: int, dtype: torch.dtype) -> bool:
        """Returns whether a slot has room for ``count`` numbers."""
        return self._area is not None and count * dtype.itemsize <= self._area.memory.slot_size

    def memory(self) -> PeerMemory:
        """Returns the memory in which messages lie now."""
        assert self._area is not None
        return self._area.memory

    def reserve(self, count: int, dtype: torch.dtype) -> Message:
        """Returns a message of ``count`` numbers, to be written."""
        if self._area is None or not self.holds(count, dtype):
            if self._area is not None:
                self._area.finish()
            # Not both at once. A message that is not sent yet keeps its own memory.
            self._area = None
            size = -(-count * dtype.itemsize // ALIGNMENT) * ALIGNMENT
            with torch.inference_mode(False):
                self._area = _Area(self._allocate(max(SMALLEST, size)), self._rank)
        return self._area.reserve(count, dtype)
