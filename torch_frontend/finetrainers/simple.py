"""Runs simple calls of ``attention_dispatch``: plain, fitting tensors of four axes without unusual options.

Most calls are simple. The checks of the other calls take longer than a small kernel.
"""

from __future__ import annotations

from typing import Any

import torch

from torch_frontend.attention import attention
from torch_frontend.dispatch import heads_first

Tensor = torch.Tensor


def is_simple(query: Any, key: Any, value: Any, is_causal: Any, enable_gqa: Any) -> bool:
    """Returns whether these are plain, fitting tensors ``[batch, heads, len, head_dim]`` without unusual options."""
    if type(query) is not Tensor or type(key) is not Tensor or type(value) is not Tensor:
        return False
    if query.is_nested or key.is_nested or value.is_nested:  # a strided one has no shape
        return False
    q, k, v = query.shape, key.shape, value.shape
    if len(q) != 4 or len(k) != 4 or k[0] != q[0] or k[3] != q[3] or v[:3] != k[:3] or len(v) != 4:
        return False
    if (k[1] != q[1] and not (enable_gqa and k[1] and not q[1] % k[1])) or (is_causal and q[2] != k[2]):
        return False
    if query.layout is not torch.strided or key.layout is not torch.strided or value.layout is not torch.strided:
        return False
    return 0 not in q and 0 not in k and v[3] != 0 and query.device.type in ("cpu", "cuda")


def is_table(mask: Any, query: Any) -> bool:
    """Returns whether a mask is a plain tensor ``[batch, heads, q_len, kv_len]`` that torch's own function accepts."""
    if type(mask) is not Tensor or mask.layout is not torch.strided or mask.dim() != 4:
        return False
    return mask.dtype in (torch.bool, torch.float32, query.dtype)


def run_simple(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: Any,
    causal: bool,
    scale: float | None,
    names: Any,
) -> Tensor:
    """Returns ``attention`` of simple tensors and a mask that ``is_table``, aligned at the first key.

    Args:
        dropout: 0 of some type, which the plan checks.
        names: the requested backends.
    """
    added = mask is not None and mask.dtype != torch.bool
    tables: dict[str, Any] = {"mask": None if added else mask, "bias": mask if added else None}
    if query.is_cpu and type(dropout) is float:
        options: dict[str, Any] = {"causal": causal, "alignment": "top_left", "scale": scale, "backend": names}
        out = heads_first.attend(query, key, value, **options, **tables)
        if out is not None:
            return out
    out = attention(
        query.transpose(1, 2),  # [batch, heads, len, head_dim] -> [batch, len, heads, head_dim]
        key.transpose(1, 2),
        value.transpose(1, 2),
        causal=causal,
        alignment="top_left",
        scale=scale,
        dropout=dropout,
        backend=names,
        **tables,
    )
    return out.transpose(1, 2)  # type: ignore[no-any-return]
