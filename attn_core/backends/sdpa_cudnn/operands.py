"""Operands of cuDNN's attention: mask, bias and band as one bias, and results in the layout of torch's plans."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from attn_core.backends.sdpa_cudnn.empty_rows import zero_for_empty_rows
from attn_core.backends.shared import aten_masks
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

    torch caches plans by the strides of q, k and v, but a plan fixes the strides of all tensors.
    """
    import torch

    if tensor.stride() == _strides_of_results(q.shape, q.stride()):
        return tensor
    return torch.empty_like(q).copy_(tensor)


@lru_cache(maxsize=4096)
def _strides_of_results(shape: Any, strides: Any) -> tuple[int, ...]:
    import torch

    like: tuple[int, ...] = torch.empty_like(torch.empty_strided(shape, strides, device="meta")).stride()
    return like
