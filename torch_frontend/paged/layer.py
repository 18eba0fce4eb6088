"""A layer with its keys and values in pages of a pool."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attn_core.call.layers import IN_PAGES, check_features, check_rotary, options_of
from attn_core.paged.step import Pages, Step, check_paged_layer
from torch_frontend.dispatch.tensor_kinds import to_device_of
from torch_frontend.paged.append import append_kv
from torch_frontend.paged.attention import paged_attention


def attend_in_pages(
    layer: Any, x: Tensor, others: dict[str, Any], positions: Tensor | None, pages: Pages
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Writes the keys and values of new tokens ``[tokens, features]`` into the pages, then attends to the pages.

    Args:
        layer: a ``torch_frontend.module.Attention``.
        others: the other arguments of the call by name, which must all be None.
    """
    check_paged_layer(tuple(x.shape), layer.alignment, layer.dropout_rate if layer.training else 0.0, others)
    check_features(tuple(x.shape), None, layer.in_features, layer.in_kv_features)
    check_rotary(layer, positions, (1, x.shape[0]))
    q, k, v = layer.project(x, x)  # [tokens, heads, head_dim]
    # The pool may have another dtype than the parameters, and append_kv does not cast. A quantised one takes float32.
    narrow = torch.float32 if v.dtype == torch.float64 else v.dtype
    dtype, pool_dtype, step = v.dtype, pages.k.dtype if pages.k_scales is None else narrow, pages.step
    if layer.rotary is not None:
        places = token_places(step, x) if positions is None else positions
        q, k = (rows[0].to(dtype) for rows in layer.rotary(q[None], k[None], places.reshape(1, -1)))
    append_kv(pages.k, pages.v, k.to(pool_dtype), v.to(pool_dtype), **step.tables, **pages.scales)
    out = paged_attention(
        q.to(pool_dtype),
        pages.k,
        pages.v,
        **step.tables,
        max_len_q=step.max_len_q,
        **options_of(layer, IN_PAGES),
        sinks=layer.sinks_here(),
        **pages.scales,
    )
    return layer.o_proj(out.to(dtype).flatten(-2)), (pages.k, pages.v, *pages.scales.values())


def token_places(step: Step, x: Tensor) -> Tensor:
    """Returns int ``[tokens]``: the position of each new token ``x [tokens, features]`` in its own sequence."""
    lengths = to_device_of(x, step.seq_lens)
    if step.cu_seqlens_q is None:
        return lengths - 1
    offsets = to_device_of(x, step.cu_seqlens_q)
    token = torch.arange(x.shape[0], dtype=offsets.dtype, device=x.device)
    # Tokens behind the last offset belong to no sequence. The clamp only keeps their index in range.
    sequence = (torch.searchsorted(offsets, token, right=True) - 1).clamp(max=len(offsets) - 2)
    return lengths[sequence] - (offsets[sequence + 1] - token)
