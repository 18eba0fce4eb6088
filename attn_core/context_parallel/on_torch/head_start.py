"""Gives an exchange a head start over the kernel that it overlaps."""

from __future__ import annotations

from typing import Any

from attn_core.context_parallel.on_torch.current_gpu import with_current

HEAD_START = 10_000
"""GPU clock cycles, about 5 microseconds."""


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
