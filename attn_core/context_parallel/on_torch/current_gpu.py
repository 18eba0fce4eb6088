"""Makes a GPU the current one, which Triton's kernels and torch's pauses run on."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any


def with_current(device: Any) -> AbstractContextManager[Any]:
    """Returns a context in which a ``torch.device`` with a GPU is the current one. It does nothing if it is already:
    usually each rank has set its own, and torch's context would take microseconds."""
    import torch

    return nullcontext() if torch.cuda.current_device() == device.index else torch.cuda.device(device)
