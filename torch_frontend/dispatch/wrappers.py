"""Wraps the functions of a backend for a plan: whatever metadata decides is decided once, not on every call."""

from __future__ import annotations

from typing import Any

import torch

Tensor = torch.Tensor


def with_four_axes(shortcut: Any, mask: Any, bias: Any) -> Any:
    """Wraps a shortcut so that the mask and the bias may have fewer than four axes; the function itself if they do not.

    The missing axes of size 1 are in front.

    Args:
        mask, bias: ``plan.Metadata`` of them, or None.
    """
    at_mask, at_bias = ((None,) * (0 if table is None else 4 - len(table[0])) for table in (mask, bias))
    if shortcut is None or not (at_mask or at_bias):
        return shortcut

    def run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, bias: Tensor | None = None) -> Any:
        if mask is not None and at_mask:
            mask = mask[at_mask]
        if bias is not None and at_bias:
            bias = bias[at_bias]
        return shortcut(q, k, v, mask, bias)

    return run


def on_device(function: Any, device: torch.device) -> Any:
    """Wraps a function to run with its tensors' GPU as the current one, because Triton launches on the current GPU.

    With one GPU or none it returns the function itself.
    """
    if function is None or device.type != "cuda" or torch.cuda.device_count() < 2:
        return function

    def run(*arguments: Any, **keywords: Any) -> Any:
        if torch.cuda.current_device() == device.index:  # as usual; the context would take microseconds
            return function(*arguments, **keywords)
        with torch.cuda.device(device):
            return function(*arguments, **keywords)

    return run
