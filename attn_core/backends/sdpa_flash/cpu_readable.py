"""Operands as torch's CPU flash kernel can read them."""

from __future__ import annotations

from typing import Any

from attn_core.call.counters import operand_copied
from attn_core.call.tensors import Inputs


def all_readable(inputs: Inputs) -> Inputs:
    """Returns inputs that the kernel can read."""
    q, k, v = inputs[:3]
    if q.is_contiguous() and k.is_contiguous() and v.is_contiguous():
        return inputs
    return inputs._replace(q=readable(q), k=readable(k), v=readable(v))


def readable(tensor: Any) -> Any:
    """Returns a ``[batch, seq, heads, dim]`` tensor, copied only if the kernel cannot read its rows."""
    batch_stride, seq_stride, head_stride, last_stride = tensor.stride()
    width = tensor.shape[3]
    if last_stride != 1 or min(seq_stride, head_stride) < width or batch_stride < 1:
        operand_copied()
        return tensor.contiguous()
    return tensor


def readable_heads(tensor: Any) -> Any:
    """``readable`` for a ``[batch, heads, seq, dim]`` tensor."""
    batch_stride, head_stride, seq_stride, last_stride = tensor.stride()
    width = tensor.shape[3]
    if last_stride != 1 or seq_stride < width or head_stride < width or batch_stride < 1:
        operand_copied()
        return tensor.contiguous()
    return tensor
