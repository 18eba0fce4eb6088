"""Views ``[batch, len, heads, dim]`` of tensors ``[batch, heads, len, dim]``, the layout of torch's own attention."""

from __future__ import annotations

from typing import Any

import torch

from torch_frontend.dispatch.plan import check_tensor


def all_exchanged(qkv: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns ``exchanged`` of q, k and v. torch has no view of a tensor without its memory, which is named here."""
    try:
        return tuple(map(exchanged, qkv))
    except RuntimeError:
        for name, tensor in zip("qkv", qkv, strict=True):
            check_tensor(name, tensor)
        raise


def exchanged(tensor: Any) -> Any:
    """Returns a view with the axes of the sequence and the heads exchanged; any other value as it is."""
    return tensor.transpose(-3, -2) if isinstance(tensor, torch.Tensor) and tensor.dim() > 2 else tensor


def first_exchanged(results: Any) -> Any:
    """Returns the output, or a tuple that begins with it, with the output ``exchanged``."""
    return (exchanged(results[0]), *results[1:]) if isinstance(results, tuple) else exchanged(results)
