"""The current GPU, where Triton's kernels and torch's pauses run; and the pause that gives an exchange a head start."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

HEAD_START = 10_000
"""GPU clock cycles, about 5 microseconds."""


def with_current(device: Any) -> AbstractContextManager[Any]:
    """Returns a context in which a ``torch.device`` with a GPU is the current one. It does nothing if it is already:
    usually each rank has set its own, and torch's context would take microseconds."""
    import torch

    return nullcontext() if torch.cuda.current_device() == device.index else torch.cuda.device(device)


def head_start(device: Any) -> None:
    """Delays the compute stream by about 5 us, so that a collective starts before the next kernel occupies every SM.

    The order of work on two streams is not defined. A collective that starts second waits for the kernel, and nothing
    overlaps. If the stream waits for the collective next, the delay costs nothing, because the collective takes longer.
    Does nothing on a CPU.

    Args:
        device: a ``torch.device``; the kernel will run on its current stream.
    """
    if device.type == "cuda":
        import torch

        with with_current(device):
            # A kernel that spins on the GPU. While the GPU has queued work, a pause of the host would delay nothing.
            torch.cuda._sleep(HEAD_START)  # type: ignore[no-untyped-call, unused-ignore]
