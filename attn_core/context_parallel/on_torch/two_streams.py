"""TwoStreams: runs the second of two steps on a stream of its own, so that it overlaps the first one."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from itertools import islice
from typing import Any, TypeVar

from attn_core.context_parallel.on_torch.current_gpu import with_current

Block = TypeVar("Block", bound=tuple[Any, ...])
Tensors = TypeVar("Tensors", bound=tuple[Any, ...])
NON_BLOCKING = 1
"""CU_STREAM_NON_BLOCKING: other streams would wait for torch's default one, and it for them."""


class TwoStreams:
    """Two steps of one pass on a GPU, whose kernels overlap.

    A step has small kernels before and after a large one, and the last blocks of a large one leave most of the GPU
    idle. On one stream the other step would wait for them. The first step runs on the current stream. The second one
    runs on a stream of its own, which waits for the keys, and its results are used on the current stream. Launch the
    kernels of both by ``results``. Before anything else of the second step runs on the current stream, call ``join``.

    Passes of one step, or of more than two, run on the current stream alone: in a ring of three or more ranks, the next
    exchange would have to wait for a step's kernel. So do those on a CPU, and those that wait for the host, unless a
    CUDA graph captures them: the second stream costs the host time.

    Later work of the second stream uses its memory again, and nothing else has that stream. So it first waits for what
    the current stream may still do with such memory: at the beginning of a pass for all earlier work, and later for
    its own results.

    Args:
        device: a ``torch.device``.
        steps: the number of steps.
        waits_for_host: whether the host takes longer to launch the pass than the device to run it.
    """

    def __init__(self, device: Any, steps: int, *, waits_for_host: bool = False) -> None:
        self._device, self._may_overlap = device, device.type == "cuda" and steps == 2
        self._waits_for_host = waits_for_host
        self._on_second = self._has_results = False

    @property
    def on_second(self) -> bool:
        """Whether the second step runs now, on its own stream. The current stream then has not waited for the keys."""
        return self._on_second

    def blocks(self, blocks: Iterable[Block]) -> Iterator[Block]:
        """Yields what ``blocks`` yields: ``(step, tiles, (k, v))`` of each step. The second stream waits for the second
        one's keys, the current one if the step has no tiles."""
        import torch

        if not self._may_overlap or (self._waits_for_host and not torch.cuda.is_current_stream_capturing()):
            yield from blocks
            return
        with with_current(self._device):
            self._current = torch.cuda.current_stream(self._device)
            self._ready, self._done = torch.cuda.Event(), torch.cuda.Event()
            self._ready.record(self._current)
            self._second = _second_stream(self._device, self._current.cuda_stream)
        if self._second is None:
            yield from blocks
            return
        remaining = iter(blocks)
        yield from islice(remaining, 1)
        self._second.wait_event(self._ready)
        self._on_second = True
        try:
            # No name for a block, so that its keys are freed when the caller has dropped them.
            yield from map(self._joined_without_tiles, iter(lambda: self._run(next, remaining, None), None))
        finally:
            self.join()

    def results(self, launch: Callable[..., Tensors], *arguments: Any) -> Tensors:
        """Returns ``launch(*arguments)``, tensors that it computes on the step's stream, for use on the current one."""
        if not self._on_second:
            return launch(*arguments)
        if self._has_results:
            self._ready.record(self._current)
            self._second.wait_event(self._ready)
        try:
            return self._run(launch, *arguments)  # type: ignore[no-any-return]
        finally:  # also after an error: a caller may try again
            self._wait()
            self._has_results = True

    def join(self) -> None:
        """Lets the rest of the pass run on the current stream, after everything that the second one has."""
        if self._on_second:
            self._wait()
            self._on_second = self._has_results = False

    def _joined_without_tiles(self, block: Block) -> Block:
        """Joins before a step that has no kernels: what follows it runs on the current stream."""
        if not block[1]:
            self.join()
        return block

    def _run(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Returns ``call(*arguments)``, with the second stream as the current one."""
        import torch

        with with_current(self._device):  # set_stream would change it for good
            torch.cuda.set_stream(self._second)
            try:
                return call(*arguments)
            finally:
                torch.cuda.set_stream(self._current)

    def _wait(self) -> None:
        self._done.record(self._second)
        self._current.wait_event(self._done)


# One for each stream of calls, because a stream that a CUDA graph captures must not get work of other calls.
@lru_cache(maxsize=64)
def _second_stream(device: Any, current: int) -> Any:
    """Returns the second stream of a stream, which is named by its handle; None if CUDA's driver makes none.

    Its GPU must be the current one, also of the driver, as it is after an event was recorded there. torch's own streams
    come from a pool of 32, so others would have this stream, too, and its memory.
    """
    import torch

    try:
        handle = ctypes.c_void_p()
        if ctypes.CDLL("libcuda.so.1").cuStreamCreate(ctypes.byref(handle), NON_BLOCKING):
            return None
        return torch.cuda.ExternalStream(handle.value, device)
    except OSError:  # a GPU of another maker
        return None
