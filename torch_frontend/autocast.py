"""What ``torch.autocast`` makes of attention's tensors, for the drop-ins whose hosts heed it."""

from __future__ import annotations

from typing import Any

import torch


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype that autocast has attention computed in on this device, or None while it is off."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


def in_autocast(*tensors: Any) -> tuple[Any, ...]:
    """The tensors as torch's own attention casts them: floating ones but float64. None and the others stay.

    The first is a tensor, and says where they are.
    """
    dtype = autocast_dtype(tensors[0].device)
    if dtype is None:
        return tensors
    return tuple(tensor.to(dtype) if tensor is not None and _is_cast(tensor.dtype) else tensor for tensor in tensors)


def _is_cast(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype != torch.float64
