"""GpuMemory: memory of every GPU of a group, which the others read, and numbers for which their streams wait."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch._C._distributed_c10d import _SymmetricMemory
from torch.distributed._symmetric_memory import rendezvous

from torch_frontend.context_parallel.mesh import RankAxis

Tensor = torch.Tensor
NUMBER = 4
"""The bytes of a number that ranks tell each other."""
AT_LEAST = 0
"""CU_STREAM_WAIT_VALUE_GEQ: a stream waits until the number in memory is not behind its own."""


class GpuMemory:
    """``outbox.PeerMemory`` on the GPUs of one host: torch's symmetric memory, and stream memory operations of CUDA.

    These operations run on a GPU's front end, and copies between GPUs on its copy engines, so that a rank that waits or
    copies occupies no multiprocessor. ``share`` makes it the memory of all ranks.

    Args:
        size: the bytes of each rank's memory.

    Raises:
        OSError, RuntimeError: if this rank has no such memory, or CUDA's driver no such operations.
    """

    def __init__(self, axis: RankAxis, device: torch.device, size: int) -> None:
        self.size, self._rank, self._device = size, axis.rank, device
        # The numbers that others tell this rank lie behind its memory: of each kind, one for each rank.
        self._ranks, numbers = axis.size, 2 * axis.size * NUMBER
        # Without the pool of torch's ``empty``, which keeps the memory for good.
        memory = _allocated(size + numbers, device)
        memory[size:].zero_()
        self._memory, self._copies, self._name = memory, torch.cuda.Stream(device), axis.name
        self._all = [memory] * axis.size
        self._last: torch.cuda.Stream | None = None
        """The stream of the last message. Numbers rise in its order only."""
        self._driver = _stream_operations()
        self.tell(axis.rank, 0, 1)
        self.wait(axis.rank, 0, 1)  # itself, to see whether the driver can
        memory[size:].zero_()
        torch.cuda.current_stream(device).synchronize()  # before another rank can write a number

    def share(self) -> None:
        """Lets the ranks read each other's memory. Every rank calls it, and waits for the others on the host."""
        self._shared = rendezvous(self._memory, self._name)  # type: ignore[arg-type, unused-ignore]
        shape = self._memory.shape
        self._all = [self._shared.get_buffer(rank, shape, torch.uint8) for rank in range(self._ranks)]

    def bytes_of(self, rank: int) -> Tensor:
        """Returns the memory of a rank: uint8 ``[size]``."""
        return self._all[rank][: self.size]

    def tell(self, rank: int, what: int, number: int) -> None:
        """Tells a rank a number, after everything that the current stream has queued."""
        self._operate("cuStreamWriteValue32_v2", rank, what, self._rank, number)

    def wait(self, rank: int, what: int, number: int) -> None:
        """Makes the current stream wait until a rank has told this rank the number, or a later one."""
        self._operate("cuStreamWaitValue32_v2", self._rank, what, rank, number)

    def order(self) -> None:
        """Makes the current stream wait for the stream of the last message, if it is another one."""
        current = torch.cuda.current_stream(self._device)
        if self._last is not None and self._last != current:
            current.wait_stream(self._last)
        self._last = current

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Returns a context on a stream for copies, which waits for what the stream outside has queued."""
        self._copies.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._copies):
            yield

    def mark(self) -> Callable[[], None]:
        """Returns a function that makes its caller's stream wait for what the current stream has queued until now."""
        queued = torch.cuda.current_stream(self._device).record_event()
        return lambda: torch.cuda.current_stream(self._device).wait_event(queued)

    def keep(self, tensor: Tensor) -> None:
        """Keeps the memory of a tensor that is dropped until all copies into it are done."""
        tensor.record_stream(self._copies)

    def finish(self) -> None:
        """Waits on the host until the device has done what the current stream has queued."""
        torch.cuda.current_stream(self._device).synchronize()

    def _operate(self, name: str, owner: int, what: int, teller: int, number: int) -> None:
        """Queues an operation on the number that ``teller`` tells the rank ``owner``."""
        address = self._all[owner].data_ptr() + self.size + NUMBER * (what * self._ranks + teller)
        stream = torch.cuda.current_stream(self._device).cuda_stream
        error = getattr(self._driver, name)(stream, address, number & 0xFFFFFFFF, AT_LEAST)
        if error:
            raise RuntimeError(f"{name} returned CUDA driver error {error}")


def _allocated(size: int, device: torch.device) -> Tensor:
    try:
        return _SymmetricMemory.empty_strided_p2p((size,), (1,), torch.uint8, device)
    except RuntimeError:  # it does not take what torch holds for later tensors
        torch.cuda.empty_cache()
        return _SymmetricMemory.empty_strided_p2p((size,), (1,), torch.uint8, device)


@cache
def _stream_operations() -> Any:
    """Returns CUDA's driver, whose library every process with a GPU has loaded."""
    driver = ctypes.CDLL("libcuda.so.1")
    for name in ("cuStreamWriteValue32_v2", "cuStreamWaitValue32_v2"):
        getattr(driver, name).argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint)
    return driver
