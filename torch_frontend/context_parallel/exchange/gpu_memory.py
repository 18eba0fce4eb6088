"""GpuMemory: memory of every GPU of a group, which the others read, and marks for which their streams wait."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch._C._distributed_c10d import _SymmetricMemory
from torch.distributed._symmetric_memory import rendezvous

from attn_core.context_parallel.on_torch.current_gpu import with_current
from torch_frontend.context_parallel.exchange.outbox import SLOTS, Piece
from torch_frontend.context_parallel.mesh import RankAxis

Tensor = torch.Tensor
MARK = 4
"""The bytes of a mark."""
COPIED, ANNOUNCED = 0, 1
"""The marks of a slot: for each other rank, whether it has copied this rank's message there, and whether its own
message there is announced to this rank."""
WAIT, WRITE = 1, 2
"""CU_STREAM_MEM_OP_WAIT_VALUE_32 and CU_STREAM_MEM_OP_WRITE_VALUE_32."""
EQUAL = 1
"""CU_STREAM_WAIT_VALUE_EQ."""


class _Operation(ctypes.Structure):
    """CUstreamBatchMemOpParams of a wait or a write of 32 bits."""

    _fields_ = (
        *(("operation", ctypes.c_uint32), ("address", ctypes.c_uint64), ("value", ctypes.c_uint64)),
        *(("flags", ctypes.c_uint32), ("alias", ctypes.c_uint64), ("padding", ctypes.c_uint64)),
    )


class GpuMemory:
    """``outbox.PeerMemory`` on the GPUs of one host: torch's symmetric memory, and stream memory operations of CUDA.

    These operations run on a GPU's front end, and copies between GPUs on its copy engines, so that a rank that waits or
    copies occupies no multiprocessor. They are called without torch, which needs several times as long on the host.
    ``share`` makes it the memory of all ranks.

    Args:
        slot_size: the bytes of a slot.

    Raises:
        AttributeError, OSError, RuntimeError: if this rank has no such memory, or CUDA's driver no such operations.
    """

    def __init__(self, axis: RankAxis, device: torch.device, slot_size: int) -> None:
        self.slot_size, self._rank, self._device = slot_size, axis.rank, device
        self._ranks, self._name, self._size = axis.size, axis.name, SLOTS * slot_size
        # Without the pool of torch's ``empty``, which keeps the memory for good.
        memory = _allocated(self._size + 2 * SLOTS * axis.size * MARK, device)
        marks = memory[self._size :].view(torch.int32).view(2, SLOTS, axis.size)
        marks[COPIED], marks[ANNOUNCED] = 1, 0
        self._memory, self._buffers = memory, [memory] * axis.size
        self._copies = torch.cuda.Stream(device)
        self._copies_raw = self._copies.cuda_stream
        self._sent, self._ordered = _event(device), _event(device)
        self._arrived = [_event(device) for _ in range(SLOTS)]
        self._last: dict[int, int] = {}
        """The stream of the last message outside of CUDA graphs (under 0), and in the graph that was captured last."""
        self._graph_of = [0] * SLOTS
        """The graph that captured the last copies out of each slot; 0 if none did."""
        self._driver = _driver()
        self._set_addresses()
        # A mark of its own, to see whether the driver can.
        self._operate(self._current(), _operations([(WRITE, self._mark(axis.rank, ANNOUNCED, 0, axis.rank), 1)]))
        self._operate(self._current(), self._arrival(0, axis.rank))
        torch.cuda.current_stream(device).synchronize()  # before another rank can set a mark

    def share(self) -> None:
        """Lets the ranks read each other's memory. Every rank calls it, and waits for the others on the host."""
        self._shared = rendezvous(self._memory, self._name)  # type: ignore[arg-type, unused-ignore]
        shape = self._memory.shape
        self._buffers = [self._shared.get_buffer(rank, shape, torch.uint8) for rank in range(self._ranks)]
        self._set_addresses()

    def bytes_of(self, rank: int, slot: int) -> Tensor:
        """Returns a slot of a rank: uint8 ``[slot_size]``."""
        return self._buffers[rank][slot * self.slot_size : (slot + 1) * self.slot_size]

    def reuse(self, slot: int) -> None:
        """Makes the current stream wait until every reader of this rank's message in a slot has copied it."""
        with with_current(self._device):
            current, graph = self._in_order()
            # A graph may run in one stream what was captured in two, in any order that it knows no reason against.
            # The copies out of a slot must then come before a wait for the others' copies out of it.
            if graph and self._graph_of[slot] == graph:
                self._wait_for(current, self._arrived[slot])
            self._operate(current, self._all_copied[slot])

    def announce(self, slot: int, readers: tuple[int, ...]) -> None:
        """Tells ranks that their message lies in a slot, after everything that the current stream has queued."""
        operations = self._announcements.get((slot, readers))
        if operations is None:
            mine = [(WRITE, self._mark(self._rank, COPIED, slot, reader), 0) for reader in readers]
            theirs = [(WRITE, self._mark(reader, ANNOUNCED, slot, self._rank), 1) for reader in readers]
            operations = self._announcements[slot, readers] = _operations([*mine, *theirs])
        with with_current(self._device):
            self._operate(self._in_order()[0], operations)

    def copy(self, slot: int, result: Tensor, pieces: Sequence[Piece]) -> Callable[[], None]:
        """Starts to copy pieces of other ranks' messages on a stream for copies, once they are announced."""
        copies, driver, into = self._copies_raw, self._driver, result.data_ptr()
        arrived = self._arrived[slot]
        with with_current(self._device):
            current = self._current()
            self._graph_of[slot] = self._graph(current)
            self._queue(self._sent, current, copies)
            for rank, start, size, place in pieces:
                self._operate(copies, self._arrivals[rank, slot])
                source = self._addresses[rank] + slot * self.slot_size + start
                if size:
                    _check("cuMemcpyDtoDAsync_v2", driver.cuMemcpyDtoDAsync_v2(into + place, source, size, copies))
                self._operate(copies, self._departures[rank, slot])
            _check("cuEventRecord", driver.cuEventRecord(arrived.cuda_event, copies))
        return partial(self._wait, arrived)

    def keep(self, tensor: Tensor) -> None:
        """Keeps the memory of a tensor that is dropped until all copies into it are done."""
        tensor.record_stream(self._copies)

    def finish(self) -> None:
        """Waits on the host until the device has done what the current stream has queued."""
        torch.cuda.current_stream(self._device).synchronize()

    def _set_addresses(self) -> None:
        self._addresses = [each.data_ptr() for each in self._buffers]
        others = [rank for rank in range(self._ranks) if rank != self._rank]
        self._all_copied = [
            _operations([(WAIT, self._mark(self._rank, COPIED, slot, reader), 1) for reader in others])
            for slot in range(SLOTS)
        ]
        places = [(rank, slot) for rank in others for slot in range(SLOTS)]
        self._arrivals = {(rank, slot): self._arrival(slot, rank) for rank, slot in places}
        self._departures = {
            (rank, slot): _operations([(WRITE, self._mark(rank, COPIED, slot, self._rank), 1)]) for rank, slot in places
        }
        self._announcements: dict[tuple[int, tuple[int, ...]], Any] = {}

    def _arrival(self, slot: int, rank: int) -> Any:
        """Waits until a rank's message in a slot is announced to this rank, and takes the mark back."""
        mark = self._mark(self._rank, ANNOUNCED, slot, rank)
        return _operations([(WAIT, mark, 1), (WRITE, mark, 0)])

    def _mark(self, owner: int, kind: int, slot: int, other: int) -> int:
        """Returns the address of a mark that ``other`` sets in the memory of ``owner``."""
        return self._addresses[owner] + self._size + MARK * ((kind * SLOTS + slot) * self._ranks + other)

    def _current(self) -> int:
        return _current_stream(self._device)

    def _graph(self, stream: int) -> int:
        """Returns the number of the CUDA graph that captures the current stream; 0 if none does."""
        return _number_of_graph(self._driver, stream) if torch.cuda.is_current_stream_capturing() else 0

    def _in_order(self) -> tuple[int, int]:
        """Returns the current stream, which continues after the stream of the last message, and the graph it is in."""
        current = self._current()
        graph = self._graph(current)
        last = self._last.get(graph)  # nothing outside of a graph can be waited for in it
        if current != last:
            if last is not None:
                self._queue(self._ordered, last, current)
            self._last = {0: self._last[0], graph: current} if 0 in self._last else {graph: current}
        return current, graph

    def _queue(self, event: torch.cuda.Event, first: int, then: int) -> None:
        """Makes the stream ``then`` wait for what the stream ``first`` has queued."""
        _check("cuEventRecord", self._driver.cuEventRecord(event.cuda_event, first))
        self._wait_for(then, event)

    def _wait_for(self, stream: int, event: torch.cuda.Event) -> None:
        _check("cuStreamWaitEvent", self._driver.cuStreamWaitEvent(stream, event.cuda_event, 0))

    def _wait(self, event: torch.cuda.Event) -> None:
        with with_current(self._device):
            self._wait_for(self._current(), event)

    def _operate(self, stream: int, operations: Any) -> None:
        _operate(self._driver, stream, operations)


def can_capture(device: torch.device) -> bool:
    """Returns whether a CUDA graph can hold the operations of messages."""
    try:
        mark, graph, driver = torch.zeros(1, dtype=torch.int32, device=device), torch.cuda.CUDAGraph(), _driver()
        operations = _operations([(WRITE, mark.data_ptr(), 1), (WAIT, mark.data_ptr(), 1)])
        torch.cuda.synchronize(device)
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            stream = _current_stream(device)
            number = _number_of_graph(driver, stream)
            _operate(driver, stream, operations)
        graph.replay()
        return bool(mark.item() == 1) and number > 0
    except (AttributeError, RuntimeError):
        return False


def _current_stream(device: torch.device) -> int:
    """Returns the current stream of a GPU. 0 is the default one; the driver takes that of the current GPU."""
    return int(torch._C._cuda_getCurrentRawStream(device.index))


def _number_of_graph(driver: Any, stream: int) -> int:
    """Returns the number of the CUDA graph that captures a stream."""
    status, number = ctypes.c_int(), ctypes.c_uint64()
    returned = ctypes.byref(status), ctypes.byref(number), None, None, None
    _check("cuStreamGetCaptureInfo_v2", driver.cuStreamGetCaptureInfo_v2(stream, *returned))
    return number.value


def _operations(each: Iterable[tuple[int, int, int]]) -> Any:
    """Returns operations (kind, address, value), which run in their order."""
    listed = [_Operation(kind, address, value, EQUAL if kind == WAIT else 0, 0, 0) for kind, address, value in each]
    return (_Operation * len(listed))(*listed)


def _operate(driver: Any, stream: int, operations: Any) -> None:
    _check("cuStreamBatchMemOp_v2", driver.cuStreamBatchMemOp_v2(stream, len(operations), operations, 0))


def _check(name: str, error: int) -> None:
    if error:
        raise RuntimeError(f"{name} returned CUDA driver error {error}")


def _event(device: torch.device) -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))  # CUDA creates it now
    return event


def _allocated(size: int, device: torch.device) -> Tensor:
    try:
        return _SymmetricMemory.empty_strided_p2p((size,), (1,), torch.uint8, device)
    except RuntimeError:  # it does not take what torch holds for later tensors
        torch.cuda.empty_cache()
        return _SymmetricMemory.empty_strided_p2p((size,), (1,), torch.uint8, device)


@cache
def _driver() -> Any:
    """Returns CUDA's driver, whose library every process with a GPU has loaded."""
    driver = ctypes.CDLL("libcuda.so.1")
    pointer, number = ctypes.c_void_p, ctypes.c_uint64
    driver.cuStreamBatchMemOp_v2.argtypes = (pointer, ctypes.c_uint, pointer, ctypes.c_uint)
    driver.cuMemcpyDtoDAsync_v2.argtypes = (number, number, ctypes.c_size_t, pointer)
    driver.cuEventRecord.argtypes = (pointer, pointer)
    driver.cuStreamWaitEvent.argtypes = (pointer, pointer, ctypes.c_uint)
    if hasattr(driver, "cuStreamGetCaptureInfo_v2"):  # only graphs need it, and newer headers have another version
        driver.cuStreamGetCaptureInfo_v2.argtypes = (pointer,) * 6
    return driver
