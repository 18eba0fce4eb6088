"""Casts tensors under ``torch.autocast`` exactly as torch's own attention does."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

_KINDS = frozenset(
    kind for kind in ("cpu", "cuda", "hpu", "mps", "mtia", "xla", "xpu") if torch.amp.is_autocast_available(kind)
)
"""Device types that have autocast. Looked up once, because older compilers cannot trace the lookup."""

is_on = torch._C._is_any_autocast_enabled
"""Returns whether autocast is on for any device type."""


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Returns the dtype in which autocast computes attention on this device, or None if it is off."""
    if not is_on() or device.type not in _KINDS:
        return None
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


def in_autocast(*tensors: Any) -> tuple[Any, ...]:
    """Returns the tensors cast as torch's own attention casts them: all floating ones except float64.

    The first tensor must not be None: its device decides whether autocast is on. Other tensors may be None.
    """
    dtype = autocast_dtype(tensors[0].device)
    if dtype is None:
        return tensors
    return tuple(tensor.to(dtype) if tensor is not None and _is_cast(tensor.dtype) else tensor for tensor in tensors)


def switched_off(device: torch.device) -> AbstractContextManager[object]:
    """Returns a context that turns autocast off on the device, because a backend chooses its own dtypes."""
    return nullcontext() if autocast_dtype(device) is None else torch.autocast(device.type, enabled=False)


def _is_cast(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype != torch.float64
