"""Tests the operations that ``GpuMemory`` queues, on streams that are played on a CPU."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("torch was built without torch.distributed", allow_module_level=True)

from streams import Streams, play

from torch_frontend.context_parallel.exchange.gpu_memory import GpuMemory, can_capture
from torch_frontend.context_parallel.exchange.outbox import SLOTS, Outbox, Part
from torch_frontend.context_parallel.mesh import RankAxis

RANKS = 3
SLOT = 1024


class Ranks(NamedTuple):
    streams: Streams
    memories: list[Any]
    outboxes: list[Outbox]


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    """Three ranks, whose current streams are 1, 2 and 3."""
    streams = play(monkeypatch)
    memories = []
    for rank in range(RANKS):
        streams.current = rank + 1
        memories.append(GpuMemory(RankAxis("played", size=RANKS, rank=rank), torch.device("cpu", 0), SLOT))
    outboxes = []
    for rank, memory in enumerate(memories):
        memory.share()
        outboxes.append(Outbox(lambda _, memory=memory: memory, rank))
    yield Ranks(streams, memories, outboxes)


def rank_by_rank(ranks: Ranks, call: Callable[[int, Outbox], None], order: list[int] | None = None) -> None:
    for rank in order or range(RANKS):
        ranks.streams.current = rank + 1
        call(rank, ranks.outboxes[rank])


def test_every_message_arrives_whatever_rank_is_ahead(ranks: Ranks) -> None:
    generator, arrived = random.Random(0), list[tuple[Any, Any]]()

    def exchange(number: int, distance: int, hop: bool) -> Callable[[int, Outbox], None]:
        def call(rank: int, outbox: Outbox) -> None:
            message = outbox.reserve(SLOT // 4, torch.int32)
            ranks.streams.do(lambda: message.numbers.fill_(100 * number + rank))
            if hop:
                source = (rank - distance) % RANKS
                parts, readers = [Part(source, 3, 40)], [(rank + distance) % RANKS]
            else:
                parts, readers = (
                    [Part(other, other, 7) for other in range(RANKS) if other != rank],
                    [other for other in range(RANKS) if other != rank],
                )
            sent = message.send(readers, parts)
            numbers = sent.wait()
            right = torch.cat([torch.full((stop - start,), 100 * number + other) for other, start, stop in parts])
            ranks.streams.do(lambda: arrived.append((numbers.clone(), right)))

        return call

    calls = [exchange(number, generator.choice((1, 2)), generator.random() < 0.5) for number in range(30)]
    # One rank is up to all messages ahead of another one, as hosts may be.
    for rank in (2, 0, 1):
        for call in calls:
            rank_by_rank(ranks, call, [rank])
            if generator.random() < 0.3:
                ranks.streams.run()
    assert ranks.streams.run() == 0
    assert len(arrived) == RANKS * len(calls)
    for numbers, right in arrived:
        assert torch.equal(numbers, right.int())


def test_a_slot_is_written_once_its_readers_have_copied_it(ranks: Ranks) -> None:
    """Rank 0 sends one message more than there are slots, and nobody copies: its last one waits."""
    written, kept = [], []  # played streams copy into results later, so results must live

    def send(_: int, outbox: Outbox) -> None:
        for number in range(SLOTS + 1):
            message = outbox.reserve(4, torch.int32)
            ranks.streams.do(lambda number=number: written.append(number))  # type: ignore[misc]
            message.send((1,), []).wait()

    rank_by_rank(ranks, send, [0])
    assert ranks.streams.run() > 0
    assert written == list(range(SLOTS))

    def receive(_: int, outbox: Outbox) -> None:
        kept.append(outbox.reserve(4, torch.int32).send((2,), [Part(0, 0, 4)]).wait())

    rank_by_rank(ranks, receive, [1])
    assert ranks.streams.run() == 0
    assert written == list(range(SLOTS + 1))


def test_messages_of_two_streams_keep_their_order(ranks: Ranks) -> None:
    """The second stream has nothing to wait for of its own, and yet its message is second."""
    happened: list[str] = []
    may_go = False
    outbox = ranks.outboxes[0]
    ranks.streams.block(lambda: may_go)
    outbox.reserve(4, torch.int32).send((1,), []).wait()
    ranks.streams.do(lambda: happened.append("first"))
    ranks.streams.current = 50
    outbox.reserve(4, torch.int32)
    ranks.streams.do(lambda: happened.append("second"))
    ranks.streams.run()
    assert happened == []
    may_go = True
    assert ranks.streams.run() == 0
    assert happened == ["first", "second"]


def test_a_thread_with_another_current_gpu_uses_the_streams_of_the_memory(ranks: Ranks) -> None:
    """A thread begins with GPU 0 as the current one, whatever GPU its tensors are on."""
    ranks.streams.gpu = 1
    kept = []
    for rank, outbox in enumerate(ranks.outboxes):
        ranks.streams.current = 0 if rank == 0 else rank + 1
        message = outbox.reserve(4, torch.int32)
        kept.append(message.send(((rank + 1) % RANKS,), [Part((rank - 1) % RANKS, 0, 4)]).wait())
    assert ranks.streams.run() == 0
    assert ranks.streams.gpu == 1


def test_operations_that_are_queued_again_send_the_message_again(ranks: Ranks) -> None:
    arrived = []

    def call(rank: int, outbox: Outbox) -> None:
        message = outbox.reserve(4, torch.int32)
        arrived.append(message.send(((rank + 1) % RANKS,), [Part((rank - 1) % RANKS, 0, 4)]).wait())

    rank_by_rank(ranks, call)
    replay = ranks.streams.replay()
    assert ranks.streams.run() == 0
    for value in (5, 6):
        for rank, memory in enumerate(ranks.memories):
            memory.bytes_of(rank, 0).fill_(10 * value + rank)
        replay()
        assert ranks.streams.run() == 0
        assert [each.view(torch.uint8)[0].item() for each in arrived] == [
            10 * value + (r - 1) % RANKS for r in range(3)
        ]


def test_a_graph_may_run_its_branches_one_after_another(ranks: Ranks) -> None:
    """More messages than slots are under way, and CUDA puts a rank's two streams into one."""
    kept = []
    for graph in (1, 2):
        ranks.streams.graph = graph
        for rank, outbox in enumerate(ranks.outboxes):
            ranks.streams.current = rank + 1
            others = [other for other in range(RANKS) if other != rank]
            sent = [
                outbox.reserve(4, torch.int32).send(others, [Part(other, 0, 4) for other in others])
                for _ in range(2 * SLOTS + 1)
            ]
            kept += [each.wait() for each in sent]
        for rank in range(RANKS):
            ranks.streams.serialize(rank + 1, ranks.memories[rank]._copies_raw)
        assert ranks.streams.run() == 0


def test_messages_of_two_streams_keep_their_order_in_a_graph(ranks: Ranks) -> None:
    happened: list[str] = []
    may_go = False
    outbox = ranks.outboxes[0]
    outbox.reserve(4, torch.int32)
    for graph in (1, 2):  # neither waits for the other, nor for the message before
        ranks.streams.graph, ranks.streams.current = graph, 10 * graph
        ranks.streams.block(lambda: may_go)
        outbox.reserve(4, torch.int32)
        ranks.streams.current = 10 * graph + 1
        outbox.reserve(4, torch.int32)
        ranks.streams.do(lambda: happened.append("second"))
    ranks.streams.run()
    assert happened == []
    may_go = True
    assert ranks.streams.run() == 0
    assert happened == ["second"] * 2


def test_errors_of_the_driver_are_raised(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks.streams, "cuStreamBatchMemOp_v2", lambda *_: 801)
    with pytest.raises(RuntimeError, match="cuStreamBatchMemOp_v2 returned CUDA driver error 801"):
        ranks.outboxes[0].reserve(4, torch.int32)


def test_a_rank_that_cannot_try_a_graph_says_so_to_the_others(ranks: Ranks) -> None:
    """An error would leave them waiting for its answer."""
    assert not can_capture(torch.device("cpu", 0))  # torch.cuda.CUDAGraph raises without CUDA
