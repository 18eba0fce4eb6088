"""Whether a kernel can read a tensor as it is, and a copy for a kernel that cannot.

A rule ``(tensor) -> bool`` says what a kernel needs: a dense last axis, strides and an address that divide. The rules
that several kernels have stand here. A rule that one kernel has stands beside that kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING

from attn_core.call.observe import operand_copied

if TYPE_CHECKING:
    from torch import Tensor

Rule = Callable[["Tensor"], bool]


def whole_vectors(tensor: Tensor) -> bool:
    """Returns whether a kernel that loads 16 bytes at a time can read the tensor.

    The last axis must be dense, and every other stride and the address a multiple of 16 bytes. A tensor with an
    expanded axis (stride 0) does not fit either. The stride of an axis of length 1 may be any.
    """
    # The usual tensor first, because a call asks for up to eight: rows without gaps, of whole vectors in every dtype.
    if tensor.is_contiguous() and not (tensor.data_ptr() | tensor.shape[-1]) % 16:
        return True
    strides = tensor.stride()
    return _in_whole_vectors(tensor.shape, strides, tensor.element_size()) and not tensor.data_ptr() % 16


@lru_cache(maxsize=4096)
def _in_whole_vectors(shape: tuple[int, ...], strides: tuple[int, ...], size: int) -> bool:
    """Returns whether strides fit ``whole_vectors``."""
    others = zip(shape[:-1], strides[:-1], strict=True)
    return strides[-1] == 1 and not any(length > 1 and (step <= 0 or step * size % 16) for length, step in others)


def dense_channels(tensor: Tensor) -> bool:
    """Returns whether the channels of the tensor, its last axis, are next to each other."""
    return tensor.is_contiguous() or tensor.stride(-1) == 1


def readable(tensor: Tensor, can_read: Rule = whole_vectors) -> Tensor:
    """Returns the tensor, or a contiguous copy if the kernel cannot read the tensor."""
    return tensor if can_read(tensor) else copied(tensor)


def readable_rows(q: Tensor, k: Tensor, v: Tensor, can_read: Rule = whole_vectors) -> tuple[Tensor, Tensor, Tensor]:
    """Returns three tensors whose rows are a multiple of 16 bytes as ``readable``, with one test for the usual case."""
    # Contiguous rows of whole vectors begin at whole vectors if the first one does; the addresses are tested at once.
    contiguous = q.is_contiguous() and k.is_contiguous() and v.is_contiguous()
    if contiguous and not (q.data_ptr() | k.data_ptr() | v.data_ptr()) % 16:
        return q, k, v
    return readable(q, can_read), readable(k, can_read), readable(v, can_read)


def writable(buffer: Tensor | None) -> Tensor | None:
    """Returns the buffer if a kernel can write into it 16 bytes at a time, else None."""
    return buffer if buffer is not None and whole_vectors(buffer) else None


def copied(tensor: Tensor) -> Tensor:
    """Returns a contiguous copy of an operand."""
    import torch

    operand_copied()
    return tensor.clone(memory_format=torch.contiguous_format)
