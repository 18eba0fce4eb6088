"""CUDA streams that are played on a CPU: operations of the driver on several ranks, in one process."""

from __future__ import annotations

import ctypes
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from torch_frontend.context_parallel.exchange import gpu_memory
from torch_frontend.context_parallel.exchange.gpu_memory import WAIT


class Step(NamedTuple):
    """An operation in a stream, and the record of an event (event, number) that it makes or waits for.

    ``run`` returns whether the stream may go on.
    """

    run: Callable[[], bool]
    records: tuple[int, int] | None = None
    waits: tuple[int, int] | None = None


class Streams:
    """The part of CUDA's driver that ``GpuMemory`` calls. Operations wait in their streams until ``run``.

    Attributes:
        current: the stream that torch would name as the current one.
        gpu: the current GPU. Its default stream is stream 0; only GPU 0 has streams here.
        graph: the number of the CUDA graph that is captured; 0 if none is.
    """

    def __init__(self) -> None:
        self.current, self.gpu, self.graph = 1, 0, 0
        self._queues: dict[int, deque[Step]] = defaultdict(deque)
        self._graph_of: dict[int, int] = {}
        """By an event, the graph in which it was recorded last."""
        self._recorded: dict[int, int] = defaultdict(int)
        self._passed: dict[int, int] = defaultdict(int)

    def cuStreamBatchMemOp_v2(self, stream: int, count: int, operations: Any, flags: int) -> int:
        assert count == len(operations) > 0 and flags == 0
        for each in operations:
            self._add(stream, self._operation(each.operation, each.address, each.value, each.flags))
        return 0

    def cuMemcpyDtoDAsync_v2(self, into: int, source: int, size: int, stream: int) -> int:
        return self._add(stream, lambda: ctypes.memmove(into, source, size) is not None)

    def cuEventRecord(self, event: int, stream: int) -> int:
        self._recorded[event] += 1
        number = self._recorded[event]

        def passed() -> bool:
            self._passed[event] = number
            return True

        self._graph_of[event] = self.graph
        return self._add(stream, passed, records=(event, number))

    def cuStreamWaitEvent(self, stream: int, event: int, flags: int) -> int:
        assert self._graph_of[event] == self.graph, "an event outside of a graph cannot be waited for in it"
        number = self._recorded[event]
        return self._add(stream, lambda: self._passed[event] >= number, waits=(event, number))

    def cuStreamGetCaptureInfo_v2(self, stream: int, status: Any, number: Any, *_: None) -> int:
        status._obj.value, number._obj.value = int(self.graph > 0), self.graph
        return 0

    def do(self, action: Callable[[], Any]) -> None:
        """Queues a function in the current stream, as a kernel."""

        def kernel() -> bool:
            action()
            return True

        self._add(self.current, kernel)

    def block(self, until: Callable[[], bool]) -> None:
        """Makes the current stream wait for a condition."""
        self._add(self.current, until)

    def replay(self) -> Callable[[], None]:
        """Returns a function that queues all operations again that wait in streams now, as a CUDA graph does."""
        captured = {stream: list(queue) for stream, queue in self._queues.items()}

        def queue_again() -> None:
            for stream, operations in captured.items():
                self._queues[stream].extend(operations)

        return queue_again

    def serialize(self, *branches: int) -> None:
        """Moves what waits in some streams into the first of them, one stream as far as it comes before the next.

        CUDA may do so with the branches of a graph. It knows of the events between them, but not of marks.
        """
        order, recorded = list[Step](), set[Any]([None])
        while any(self._queues[stream] for stream in branches):
            for stream in branches:
                queue = self._queues[stream]
                while queue and queue[0].waits in recorded:
                    order.append(queue.popleft())
                    recorded.add(order[-1].records)
        self._queues[branches[0]].extend(order)

    def run(self) -> int:
        """Runs all streams as far as they come; returns how many operations are left, because they wait for good."""
        progress = True
        while progress:
            progress = False
            for queue in self._queues.values():
                while queue and queue[0].run():
                    queue.popleft()
                    progress = True
        return sum(map(len, self._queues.values()))

    def _add(self, stream: int, run: Callable[[], bool], **event: Any) -> int:
        assert stream or self.gpu == 0, "the driver would take the default stream of another GPU"
        self._queues[stream].append(Step(run, **event))
        return 0

    def _operation(self, kind: int, address: int, value: int, flags: int) -> Callable[[], bool]:
        mark = ctypes.c_uint32.from_address(address)
        if kind == WAIT:
            assert flags == 1  # equal
            return lambda: mark.value == value

        def write() -> bool:
            mark.value = value
            return True

        return write


class _Event:
    def __init__(self) -> None:
        self.cuda_event = id(self)

    def record(self, _: Any) -> None:
        pass


class _Shared:
    """What ``rendezvous`` returns: the memory of every rank, in the order in which they made it."""

    def __init__(self, all_ranks: list[torch.Tensor]) -> None:
        self._all = all_ranks

    def get_buffer(self, rank: int, shape: Any, dtype: torch.dtype) -> torch.Tensor:
        return self._all[rank]


def play(patch: Any) -> Streams:
    """Makes ``GpuMemory`` run on a CPU, on played streams. Make the memory of every rank before one is shared."""
    streams, memories, copies = Streams(), list[torch.Tensor](), iter(range(100, 200))

    class Copies:
        def __init__(self, _: Any) -> None:
            self.cuda_stream = next(copies)

    class Current:
        def synchronize(self) -> None:
            assert streams.run() == 0

    @contextmanager
    def on_gpu(device: torch.device) -> Iterator[None]:
        before, streams.gpu = streams.gpu, device.index
        try:
            yield
        finally:
            streams.gpu = before

    def allocated(size: int, _: Any) -> torch.Tensor:
        memories.append(torch.zeros(size, dtype=torch.uint8))
        return memories[-1]

    patch.setattr(gpu_memory, "_driver", lambda: streams)
    patch.setattr(gpu_memory, "_allocated", allocated)
    patch.setattr(gpu_memory, "rendezvous", lambda *_: _Shared(memories))
    patch.setattr(torch.cuda, "Stream", Copies)
    patch.setattr(torch.cuda, "Event", _Event)
    patch.setattr(torch.cuda, "current_stream", lambda device: Current())
    patch.setattr(torch.cuda, "current_device", lambda: streams.gpu)
    patch.setattr(torch.cuda, "device", on_gpu)
    patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: streams.graph > 0)
    patch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: streams.current, raising=False)
    return streams
