"""Gives an exchange a head start over the kernel that it overlaps."""

from __future__ import annotations

from typing import Any

HEAD_START = 10_000
"""GPU clock cycles, about 5 microseconds."""


def head_start(device: Any) -> None:
    """Delays the compute stream by about 5 us, so that the collective starts before the kernel occupies every SM.

    The order of two streams is not defined. A collective that starts second waits for the kernel and overlaps nothing.
    The delay costs nothing if the collective is waited for next, because that takes longer. Does nothing on a CPU.

    Args:
        device: a ``torch.device``, on whose current stream the kernel will run.
    """
    if device.type == "cuda":
        import torch

        with torch.cuda.device(device):
            torch.cuda._sleep(HEAD_START)  # type: ignore[no-untyped-call, unused-ignore]
