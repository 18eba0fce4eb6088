"""Tests the outbox of one rank, on memory that logs the calls to it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("torch was built without torch.distributed", allow_module_level=True)

from torch_frontend.context_parallel.exchange import copy_engines
from torch_frontend.context_parallel.exchange.outbox import MAX_VIEWS, SLOTS, SMALLEST, Outbox, Part
from torch_frontend.context_parallel.mesh import RankAxis


class LoggedMemory:
    """``PeerMemory`` of two ranks that both have this memory; ``log`` has the calls of the outbox."""

    def __init__(self, slot_size: int, log: list[Any]) -> None:
        self.slot_size, self.log = slot_size, log
        self.data = torch.zeros(SLOTS, slot_size, dtype=torch.uint8)
        log.append(("size", slot_size))

    def bytes_of(self, rank: int, slot: int) -> Any:
        return self.data[slot]

    def reuse(self, slot: int) -> None:
        self.log.append(("reuse", slot))

    def announce(self, slot: int, readers: tuple[int, ...]) -> None:
        self.log.append(("announce", slot, readers))

    def copy(self, slot: int, result: Any, pieces: Any) -> Any:
        self.log.append(("copy", slot, *map(tuple, pieces)))
        return lambda: self.log.append("arrived")

    def keep(self, tensor: Any) -> None:
        self.log.append("kept")

    def finish(self) -> None:
        self.log.append("finish")


@contextmanager
def without_collector() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def outbox_with_log(rank: int = 0) -> tuple[Outbox, list[Any]]:
    log: list[Any] = []
    return Outbox(lambda size: LoggedMemory(size, log), rank), log


def test_a_message_is_written_once_the_readers_of_the_one_before_have_copied_it() -> None:
    outbox, log = outbox_with_log()
    for slot in (0, 1, 2, 0, 1):
        log.clear()
        outbox.reserve(10, torch.int32).send((1,), [Part(1, 2, 5)]).wait()
        assert log[-4:] == [("reuse", slot), ("announce", slot, (1,)), ("copy", slot, (1, 8, 12, 0)), "arrived"]


def test_an_outbox_grows_once_every_message_was_copied() -> None:
    outbox, log = outbox_with_log()
    outbox.reserve(10, torch.float32).send((1,), [])
    kept = outbox.reserve(5, torch.float32)
    log.clear()
    grown = outbox.reserve(SMALLEST, torch.float32)
    assert sorted(log[:3]) == [("reuse", slot) for slot in range(SLOTS)]
    assert log[3:] == ["finish", ("size", 4 * SMALLEST), ("reuse", 0)]
    kept.numbers.fill_(3.0)
    grown.send((1,), [])
    log.clear()
    kept.send((1,), [])  # of the smaller memory, where it is the second message
    assert log == [("announce", 1, (1,)), ("copy", 1), "kept"]


def test_memory_that_is_outgrown_is_freed_at_once() -> None:
    """Not by Python's garbage collector, which may run while a CUDA graph is captured."""
    memories: list[Any] = []

    def allocate(size: int) -> LoggedMemory:
        assert [each() for each in memories] == [None] * len(memories)
        memory = LoggedMemory(size, [])
        memories.append(weakref.ref(memory))
        return memory

    outbox = Outbox(allocate, 0)
    with without_collector():
        for numbers in (10, SMALLEST, 2 * SMALLEST):
            outbox.reserve(numbers, torch.float32).send((1,), [Part(1, 0, 3)]).wait()
            outbox.reserve(numbers, torch.float32)  # and is never sent
    assert len(memories) == 3


def test_a_message_is_not_announced_if_there_is_no_memory_for_its_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its readers would mark it as copied, but this rank would never do so with theirs."""
    outbox, log = outbox_with_log()
    message = outbox.reserve(10, torch.int32)
    log.clear()

    def refuse(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        patch.setattr(torch.Tensor, "new_empty", refuse)
        message.send((1,), [Part(1, 0, 10)])
    assert log == [] and not message.sent
    message.send((1,), [Part(1, 0, 10)]).wait()
    assert log[0] == ("announce", 0, (1,))


def test_a_message_that_is_not_sent_yet_keeps_its_slot() -> None:
    outbox, log = outbox_with_log()
    early = outbox.reserve(10, torch.int32)
    early.numbers.fill_(7)
    for number in range(5):
        log.clear()
        outbox.reserve(10, torch.int32).send((1,), [])
        assert log[0] == ("reuse", 1 + number % 2)
    assert early.send((1,), [Part(0, 0, 10)]).wait().tolist() == [7] * 10


def test_messages_that_were_never_sent_leave_their_slots_to_later_ones() -> None:
    outbox, log = outbox_with_log()
    lost = [outbox.reserve(10, torch.int32) for _ in range(SLOTS)]
    for _ in range(2):
        outbox.reserve(10, torch.int32).send((1,), [])
        assert ("reuse", 0) in log[-4:]  # the oldest lost one's
    with pytest.raises(AssertionError, match="a later message lies in the slot"):
        lost[0].send((1,), [])


def test_ranks_copy_in_another_order_so_that_none_is_read_by_all() -> None:
    outbox, log = outbox_with_log(rank=1)
    outbox.reserve(8, torch.int32).send((0, 2, 3), [Part(rank, 0, 2) for rank in range(4)]).wait()
    assert log[-2] == ("copy", 0, (2, 0, 8, 16), (3, 0, 8, 24), (0, 0, 8, 0))


def test_memory_of_a_message_that_is_dropped_is_kept() -> None:
    outbox, log = outbox_with_log()
    arriving = outbox.reserve(4, torch.int32).send((1,), [Part(1, 0, 4)])
    assert log[-1][0] == "copy"
    del arriving
    assert log[-1] == "kept"


@pytest.mark.parametrize("broken", ["copy", "wait"])
def test_memory_of_a_message_is_kept_if_the_driver_fails(monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    """Copies that were started before the error still write into it."""

    def fail(*_: Any) -> None:
        raise RuntimeError("driver error")

    outbox, log = outbox_with_log()
    message = outbox.reserve(4, torch.int32)
    monkeypatch.setattr(outbox.memory(), "copy", fail if broken == "copy" else lambda *_: fail)
    with pytest.raises(RuntimeError, match="driver error"):
        message.send((1,), [Part(1, 0, 4)]).wait()
    assert log[-1] == "kept"


@pytest.mark.parametrize("numbers", [3_000_001, 8_000_003])
def test_slots_are_aligned(numbers: int) -> None:
    outbox, log = outbox_with_log()
    outbox.reserve(numbers, torch.bool)
    assert log[0][1] % 512 == 0


def test_views_of_slots_are_bounded_and_written_outside_inference() -> None:
    outbox, _ = outbox_with_log()
    with torch.inference_mode():
        outbox.reserve(5, torch.float32).send((1,), [])
    for count in range(2 * MAX_VIEWS):
        outbox.reserve(count, torch.float32).send((1,), [])
    for _ in range(SLOTS):
        outbox.reserve(5, torch.float32).numbers.fill_(1.0)
    assert outbox._area is not None
    assert 0 < len(outbox._area._views) <= MAX_VIEWS


def test_an_outbox_holds_what_fits_its_slots() -> None:
    outbox, _ = outbox_with_log()
    assert not outbox.holds(1, torch.float32)
    outbox.reserve(1, torch.float32)
    assert outbox.holds(SMALLEST // 4, torch.float32) and not outbox.holds(SMALLEST // 4 + 1, torch.float32)


def test_memory_in_a_graph_is_kept_if_the_outbox_grows_or_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    class Store: ...

    store, axis, device = Store(), RankAxis("played", size=2, rank=0), torch.device("cuda", 0)
    capturing, kept = True, list[Any]()
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(copy_engines, "_outboxes", {})
    monkeypatch.setattr(copy_engines, "_captured", kept)
    memories: list[Any] = []

    def enable(size: int) -> Outbox:
        def allocate(size: int) -> LoggedMemory:
            memory = LoggedMemory(size, [])
            memories.append(weakref.ref(memory))
            return memory

        outbox = Outbox(allocate, 0)
        outbox.reserve(size, torch.uint8)
        copy_engines.set_outbox(axis, device, outbox, captures=True)
        return outbox

    outbox = enable(SMALLEST)
    for _ in range(2):  # two messages
        assert copy_engines.find_outbox(axis, device, 1, torch.float32) is outbox
    assert copy_engines.find_outbox(axis, device, SMALLEST, torch.float32) is None  # it cannot grow here
    outbox.reserve(2 * SMALLEST, torch.uint8)
    assert copy_engines.find_outbox(axis, device, 1, torch.float32) is outbox
    capturing = False
    outbox = enable(SMALLEST)
    assert copy_engines.find_outbox(axis, device, 1, torch.float32) is outbox
    assert [memory() for memory in memories[:2]] == kept
    store = Store()  # the groups are made anew
    assert copy_engines.find_outbox(axis, device, 1, torch.float32) is None
    del outbox
    assert [memory() for memory in memories] == [*kept, None]
