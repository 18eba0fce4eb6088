"""Operands of cuDNN's attention: mask, bias and band as one bias, and results in the layout of torch's plans."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from attn_core.backends.sdpa_cudnn.empty_rows import forward_binding, zero_for_empty_rows
from attn_core.backends.shared import aten_masks
from attn_core.backends.shared.programs.operator_recorder import outside
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Inputs


def additive(spec: AttentionSpec, how: dict[str, Any], q: Any, mask: Any, bias: Any) -> Any:
    """Returns mask, bias and band as one tensor ``[batch or 1, heads or 1, q_len or 1, kv_len]`` in q's dtype."""
    import torch

    if how["band_in_bias"]:
        rows, columns = torch.arange(spec.q_len, device=q.device)[:, None], torch.arange(spec.kv_len, device=q.device)
        seen = aten_masks.needed_band(spec).contains(rows, columns)
        mask = seen if mask is None else mask & seen
    return aten_masks.additive(mask, bias, q.dtype, spec.kv_len, aligned=False)


def kernel_bias(spec: AttentionSpec, how: dict[str, Any], inputs: Inputs) -> tuple[Any, Any]:
    """Returns the kernel's bias, and the rows that see no key if the kernel would not give 0 for them; else None."""
    import torch

    if not aten_masks.explicit(spec):
        return None, None
    added = additive(spec, how, inputs.q, inputs.mask, aten_masks.detached(inputs.bias))
    if zero_for_empty_rows():
        return added, None
    empty = (added == -torch.inf).all(-1, keepdim=True)
    return added.masked_fill(empty, 0.0), empty


def as_allocated_for(q: Any, tensor: Any) -> Any:
    """Returns ``[batch, heads, q_len, dim]`` in the layout in which torch allocates the output for q, copied if needed.

    torch caches plans by the strides of q, k and v alone, but a plan fixes the strides of all tensors.
    """
    strides = _strides_of_results(q.shape, q.stride(), tensor.shape[3], q.device)
    if tensor.stride() == strides:
        return tensor
    return tensor.new_empty_strided(tensor.shape, strides).copy_(tensor)


def without_memory(q: Any, value_dim: int) -> Any:
    """Returns an output for q without memory, in the layout in which torch allocates it."""
    shape = (*q.shape[:3], value_dim)
    return q.new_empty_strided(shape, _strides_of_results(q.shape, q.stride(), value_dim, q.device))


@lru_cache(maxsize=4096)
def _strides_of_results(shape: Any, strides: Any, width: int, device: Any) -> tuple[int, ...]:
    import torch

    if width == shape[3]:
        with outside():  # on the CPU, because a meta tensor has other strides along axes of size 1
            like: tuple[int, ...] = torch.empty_like(torch.empty_strided(shape, strides, device="cpu")).stride()
        return like
    return _dense((*shape[:3], width), _filled(_inner_first(strides), device))


@lru_cache(maxsize=64)
def _filled(order: tuple[int, ...], device: Any) -> tuple[int, ...]:
    """Returns the axes of an output of another width than q's from the innermost one on; ``order`` are q's axes.

    torch's versions sort the axes in different ways (``alloc_with_matching_layout``), so a tiny call shows the order.
    """
    import torch

    shape = (2, 2, 2, 64)
    with outside(), torch.inference_mode(False), torch.no_grad():
        q = torch.zeros(shape, dtype=torch.bfloat16, device=device).as_strided(shape, _dense(shape, order))
        v = q.new_zeros((2, 2, 2, 32))
        out = forward_binding()(q, q, v, None, True, 0.0, False, False, scale=1.0)[0]
    return _inner_first(out.stride())


def _inner_first(strides: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(range(len(strides)), key=lambda axis: strides[axis]))


def _dense(shape: tuple[int, ...], order: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the strides of a tensor without gaps, whose axes in memory are in this order, the innermost one first."""
    strides, step = [0] * len(shape), 1
    for axis in order:
        strides[axis], step = step, step * shape[axis]
    return tuple(strides)
