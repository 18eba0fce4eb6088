"""FlashAttention-4's operands: the window as distances of its own, and tensors that it can read and write."""

from __future__ import annotations

from typing import Any

from attn_core.call.masks import band
from attn_core.call.spec import AttentionSpec


def window(spec: AttentionSpec) -> tuple[int | None, int | None]:
    """The band as distances from the bottom-right diagonal, negative ones among them; None where nothing is hidden."""
    left, right, offset = band(spec)
    if spec.packed:
        return left, right
    shift = spec.kv_len - spec.q_len - offset  # how far the bottom-right diagonal lies to the right of the spec's
    left = None if left is None or left + shift >= spec.kv_len - 1 else left + shift
    right = None if right is None or right - shift >= spec.q_len - 1 else right - shift
    return left, right


def spread(tensor: Any) -> Any:
    """The tensor without expanded axes, which would each be a kernel of their own. What else the kernel cannot read
    (strides and addresses that are no multiple of 16 bytes) the entry points copy themselves."""
    if 0 not in tensor.stride():
        return tensor
    import torch

    return tensor.clone(memory_format=torch.contiguous_format)


def writable(buffer: Any) -> Any:
    """A buffer that the kernel can write into, or None: it stores 16 bytes at a time. A FakeTensor has no address; what
    it stands for is a whole buffer of XLA's, and those lie on multiples of more than 16."""
    if buffer is None:
        return None
    strides, size = buffer.stride(), buffer.element_size()
    dense = strides[-1] == 1 and all(step > 0 and step * size % 16 == 0 for step in strides[:-1])
    lies_well = hasattr(buffer, "fake_mode") or buffer.data_ptr() % 16 == 0
    return buffer if (dense or buffer.is_contiguous()) and lies_well else None
