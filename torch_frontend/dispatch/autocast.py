"""What ``torch.autocast`` makes of a call: the tensors are cast as torch's own attention casts them, no more."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

_KINDS = frozenset(
    kind for kind in ("cpu", "cuda", "hpu", "mps", "mtia", "xla", "xpu") if torch.amp.is_autocast_available(kind)
)
"""Looked up here, for older compilers cannot trace the question."""

is_on = torch._C._is_any_autocast_enabled
"""Whether autocast is on for any kind of device."""


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype that autocast has attention computed in on this device, or None while it is off."""
    if not is_on() or device.type not in _KINDS:
        return None
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


def in_autocast(*tensors: Any) -> tuple[Any, ...]:
    """The tensors as torch's own attention casts them: floating ones but float64. None and the others stay.

    The first is a tensor, and says where they are.
    """
    dtype = autocast_dtype(tensors[0].device)
    if dtype is None:
        return tensors
    return tuple(tensor.to(dtype) if tensor is not None and _is_cast(tensor.dtype) else tensor for tensor in tensors)


def switched_off(device: torch.device) -> AbstractContextManager[Any]:
    """A block in which autocast is off on the device: a backend's own arithmetic is in the dtypes that it names."""
    return nullcontext() if autocast_dtype(device) is None else torch.autocast(device.type, enabled=False)


def _is_cast(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype != torch.float64
