"""TwoStreams: runs the second of two steps beside the first one, on a stream of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from itertools import islice
from typing import Any, TypeVar

from attn_core.context_parallel.on_torch.current_gpu import with_current

Block = TypeVar("Block", bound=tuple[Any, ...])
Tensors = TypeVar("Tensors", bound=tuple[Any, ...])


class TwoStreams:
    """Two steps of one pass on a GPU, whose kernels overlap.

    A step has small kernels before and after a large one, and the last blocks of a large one leave most of the GPU
    idle. On one stream the other step would wait for them. The first step runs on the current stream. The second one
    runs on another stream, which waits for the keys, and its results are used on the current stream.

    Passes of one step, or of more than two, run on the current stream alone: in a ring of three or more ranks, the next
    exchange would have to wait for a step's kernel. So do those on a CPU.

    Later work of the second stream uses its memory again. So it first waits for what the current stream may still do
    with such memory: at the beginning of a pass for all earlier work, and later for its own results.

    Args:
        device: a ``torch.device``.
        steps: the number of steps.
    """

    def __init__(self, device: Any, steps: int) -> None:
        self._device, self._used = device, device.type == "cuda" and steps == 2
        self._beside = False
        """Whether the second step runs now, on the second stream."""
        self._has_results = False
        """Whether the current stream has results of this pass from the second one."""

    @property
    def beside(self) -> bool:
        """Whether a step runs beside the current stream, which then has no keys yet."""
        return self._beside

    def blocks(self, blocks: Iterable[Block]) -> Iterator[Block]:
        """Yields what ``blocks`` yields: ``(step, tiles, (k, v))`` of each step. Waits for the second one's keys on the
        second stream."""
        if not self._used:
            yield from blocks
            return
        import torch

        with with_current(self._device):
            current = torch.cuda.current_stream(self._device)
            self._current, self._second = current, _second_stream(self._device, current.cuda_stream)
            self._joined, self._begun = torch.cuda.Event(), torch.cuda.Event()
            self._begun.record(current)
        remaining = iter(blocks)
        yield from islice(remaining, 1)
        self._second.wait_event(self._begun)
        self._beside = True
        yield from self.run(list, remaining)
        self.join()

    def run(self, launch: Callable[..., Any], *arguments: Any) -> Any:
        """Returns ``launch(*arguments)``, which is called on the step's stream."""
        if not self._beside:
            return launch(*arguments)
        import torch

        with with_current(self._device):  # set_stream would change it for good
            torch.cuda.set_stream(self._second)
            try:
                return launch(*arguments)
            finally:
                torch.cuda.set_stream(self._current)

    def results(self, launch: Callable[..., Tensors], *arguments: Any) -> Tensors:
        """Returns ``launch(*arguments)``, tensors that it computes on the step's stream, for use on the current one."""
        if self._has_results:
            self._begun.record(self._current)
            self._second.wait_event(self._begun)
        tensors: Tensors = self.run(launch, *arguments)
        if self._beside:
            self._wait()
            self._has_results = True
        return tensors

    def join(self) -> None:
        """Lets the rest of the pass run on the current stream, after what the second one has."""
        if self._beside:
            self._wait()
            self._beside = self._has_results = False

    def _wait(self) -> None:
        self._joined.record(self._second)
        self._current.wait_event(self._joined)


# One for each stream of calls, because a stream that a CUDA graph captures must not get work of other calls.
@lru_cache(maxsize=64)
def _second_stream(device: Any, current: int) -> Any:
    """Returns the second stream of a stream, which is named by its handle."""
    import torch

    return torch.cuda.Stream(device)
