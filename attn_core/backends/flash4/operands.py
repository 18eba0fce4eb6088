"""FlashAttention-4's operands: the window in its own convention, and tensors that it can read and write."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from attn_core.call.counters import operand_copied
from attn_core.call.masks import band
from attn_core.call.spec import AttentionSpec


def window(spec: AttentionSpec) -> tuple[int | None, int | None]:
    """Returns the band as distances from the bottom-right diagonal, possibly negative; None if a side hides nothing."""
    left, right, offset = band(spec)
    if spec.packed:  # each document has its own diagonal, which the kernel finds; ``refuses`` allows bottom-right only
        return left, right
    shift = spec.kv_len - spec.q_len - offset  # how far the bottom-right diagonal lies to the right of the spec's
    left = None if left is None or left + shift >= spec.kv_len - 1 else left + shift
    right = None if right is None or right - shift >= spec.q_len - 1 else right - shift
    return left, right


def backward_width(dim: int) -> int:
    """Returns the head dimension at which the backward writes and reads dq in the same widths."""
    return -(-dim // 32) * 32 if dim <= 128 else -(-dim // 64) * 64


def copy_if_expanded(tensor: Any) -> Any:
    """Returns the tensor, copied if an axis is expanded: flash-attn-4 would compile another kernel for stride 0.

    Its entry points themselves copy strides and addresses that are not multiples of 16 bytes.
    """
    return copied(tensor) if 0 in tensor.stride() else tensor


def writable(buffer: Any) -> Any:
    """Returns the buffer if the kernel can write into it, else None. The kernel stores 16 bytes at a time.

    A FakeTensor has no address. It stands for a whole buffer of XLA's, and XLA aligns those to more than 16 bytes.
    """
    if buffer is None:
        return None
    strides, size = buffer.stride(), buffer.element_size()
    # A contiguous buffer may have rows that are no multiple of 16 bytes, as the log-sum-exp's: the kernel allows that.
    dense = strides[-1] == 1 and all(step > 0 and step * size % 16 == 0 for step in strides[:-1])
    aligned = hasattr(buffer, "fake_mode") or buffer.data_ptr() % 16 == 0
    return buffer if (dense or buffer.is_contiguous()) and aligned else None


@lru_cache(maxsize=4096)
def _aligned(strides: tuple[int, ...]) -> bool:
    """Returns whether rows of 16-bit elements are dense, and all of them a multiple of 16 bytes apart."""
    return strides[-1] == 1 and all(step > 0 and step % 8 == 0 for step in strides[:-1])


def readable(tensor: Any) -> Any:
    """Returns a tensor ``[..., dim]`` of 16-bit elements without its graph, copied if the kernel cannot read it."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    return tensor if _aligned(tensor.stride()) and not tensor.data_ptr() % 16 else copied(tensor)


def dense(tensor: Any) -> Any:
    """Returns the tensor, copied unless it is contiguous and its address is a multiple of 16 bytes."""
    return tensor if tensor.is_contiguous() and not tensor.data_ptr() % 16 else copied(tensor)


def copied(tensor: Any) -> Any:
    """Returns a contiguous copy."""
    import torch

    operand_copied()
    return tensor.clone(memory_format=torch.contiguous_format)
