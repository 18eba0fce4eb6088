"""Copies the gradients that a kernel's backward op cannot read, if torch's own autograd calls the op.

Kernels load 16 bytes at a time, and not all ops check addresses: a gradient of another address breaks the device.
torch makes gradients contiguous for its flash and efficient kernels, but not for cuDNN, and it caches cuDNN's plans
by the layout of q, k and v alone, so a plan for one layout of the gradient would silently run on another layout.
Upstream: ``aten/src/ATen/native/transformers/cuda/attention_backward.cu``, torch 2.11 to 2.15.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from attn_core.backends.shared.readable import readable

Hook = Callable[[tuple[Any, ...]], tuple[Any, ...] | None]


def copy_unaligned(out: Any) -> None:
    """Copies the gradient of ``out``, the first result of an op, before the op's backward if it is unaligned."""
    node = out.grad_fn
    if node is not None:
        node.register_prehook(_aligned)


def copy_other_layouts(out: Any) -> None:
    """As ``copy_unaligned``, and also copies a gradient whose strides differ from ``out``'s."""
    node = out.grad_fn
    if node is not None:
        node.register_prehook(_in_strides(out.stride()))


def _aligned(gradients: tuple[Any, ...]) -> tuple[Any, ...] | None:
    dout, *others = gradients
    read = None if dout is None else readable(dout, _is_aligned)
    return None if read is dout else (read, *others)


@lru_cache(maxsize=4096)
def _in_strides(strides: tuple[int, ...]) -> Hook:
    def copied(gradients: tuple[Any, ...]) -> tuple[Any, ...] | None:
        dout, *others = gradients
        if dout is None or (dout.stride() == strides and _is_aligned(dout)):
            return None
        return (dout.new_empty_strided(dout.shape, strides).copy_(dout), *others)

    return copied


def _is_aligned(dout: Any) -> bool:
    try:
        return not dout.data_ptr() % 16
    except RuntimeError:  # a tensor of vmap or functorch has no address; its values get tensors of their own
        return True
