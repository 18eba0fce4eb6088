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
    copies occupies no multiprocessor. Every rank of the group has to make it at the same time.

    Args:
        size: the bytes of each rank's memory.
    """

    def __init__(self, axis: RankAxis, device: torch.device, size: int) -> None:
        self.size, self._rank, self._device = size, axis.rank, device
        # The numbers that others tell this rank lie behind its memory: of each kind, one for each rank.
        self._ranks, numbers = axis.size, 2 * axis.size * NUMBER
        # Without the pool of torch's ``empty``, which keeps the memory for good.
        memory = _SymmetricMemory.empty_strided_p2p((size + numbers,), (1,), torch.uint8, device)
        memory[size:].zero_()
        torch.cuda.synchronize(device)  # before another rank can write a number
        self._shared = rendezvous(memory, axis.name)  # type: ignore[arg-type, unused-ignore]
        self._all = [self._shared.get_buffer(rank, (size + numbers,), torch.uint8) for rank in range(axis.size)]
        self._memory, self._copies = memory, torch.cuda.Stream(device)
        self._driver = _stream_operations()

    def bytes_of(self, rank: int) -> Tensor:
        """Returns the memory of a rank: uint8 ``[size]``."""
        return self._all[rank][: self.size]

    def tell(self, rank: int, what: int, number: int) -> None:
        """Tells a rank a number, after everything that the current stream has queued."""
        self._operate("cuStreamWriteValue32_v2", rank, what, self._rank, number)

    def wait(self, rank: int, what: int, number: int) -> None:
        """Makes the current stream wait until a rank has told this rank the number, or a later one."""
        self._operate("cuStreamWaitValue32_v2", self._rank, what, rank, number)

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


@cache
def _stream_operations() -> Any:
    """Returns CUDA's driver, whose library every process with a GPU has loaded."""
    driver = ctypes.CDLL("libcuda.so.1")
    for name in ("cuStreamWriteValue32_v2", "cuStreamWaitValue32_v2"):
        getattr(driver, name).argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint)
    return driver
