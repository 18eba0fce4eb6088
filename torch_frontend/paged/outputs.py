"""The caller's buffer for the output of a paged call: its checks, and the copy of a result that is elsewhere."""

from __future__ import annotations

from typing import Any

import torch

from attn_core.errors import DeviceError, DTypeError, ShapeError, SpecError
from torch_frontend.dispatch import plan, tensor_kinds

Tensor = torch.Tensor


def check_out(out: Any, q: Tensor, k_pages: Tensor, v_pages: Tensor) -> None:
    """Checks ``out`` for a call whose other arguments are right: ``[tokens, heads, value_dim]`` of q's dtype.

    Raises:
        TypeError, ShapeError, DTypeError, DeviceError, SpecError: naming out, its value and what was expected.
    """
    plan.check_tensor("out", out)
    tensor_kinds.check_data(q, out=out)
    shape = (*q.shape[:2], v_pages.shape[3])
    if tuple(out.shape) != shape:
        raise ShapeError(f"out: expected [tokens, heads, value_dim] = {list(shape)}, got {list(out.shape)}")
    if out.dtype != q.dtype:
        raise DTypeError(f"out: expected the dtype of q, {_name(q)}, got {_name(out)}")
    if out.device != q.device:
        raise DeviceError(f"out: expected the device of q ({q.device}), got {out.device}; move it there")
    if out.requires_grad and torch.is_grad_enabled():
        raise SpecError("out: expected requires_grad=False, because it is written to; use torch.no_grad()")
    if out.stride(-1) != 1 and shape[2] > 1:
        raise ShapeError(f"out: expected dense channels (a last stride of 1), got {list(out.stride())}")
    if torch.compiler.is_compiling() or tensor_kinds.is_watched(q):
        return
    if torch._debug_has_internal_overlap(out) == 1:
        raise SpecError(f"out: expected memory of its own for each element, got the strides {list(out.stride())}")
    for name, other in (("q", q), ("k_pages", k_pages), ("v_pages", v_pages)):
        if _overlap(out, other):
            raise SpecError(f"out: expected memory apart from {name}, which the kernel reads while it writes")


def copied(result: Tensor, out: Tensor) -> Tensor:
    """Returns out with a result in it."""
    with torch.no_grad():
        return out if result is out else out.copy_(result)


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Returns whether the memory between the first and the last element of two tensors has a common part."""
    if not one.numel() or not other.numel():
        return False
    (first, end), (start, stop) = (_span(tensor) for tensor in (one, other))
    return first < stop and start < end


def _span(tensor: Tensor) -> tuple[int, int]:
    first = tensor.data_ptr()
    last = sum([(size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)])
    return first, first + (last + 1) * tensor.element_size()


def _name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
