"""The pools of other libraries as ``paged_attention`` and ``append_kv`` take them, for torch tensors."""

from __future__ import annotations

import torch

from attn_core.paged import layouts
from torch_frontend.dispatch.plan import check_tensor

Tensor = torch.Tensor


def pages_of(cache: Tensor | tuple[Tensor, Tensor], layout: str) -> tuple[Tensor, Tensor]:
    """Returns a pool of another library as ``(k_pages, v_pages)``: views of its memory, so nothing is copied.

    ``append_kv`` on the views writes into the cache. Axes by layout, as a pair of arrays and as one array:

    - ``"NHD"``: ``[pages, size, heads, dim]``; ``[pages, 2, size, heads, dim]`` (FlashInfer).
    - ``"HND"``: ``[pages, heads, size, dim]``; ``[pages, 2, heads, size, dim]`` (FlashInfer).
    - ``"vllm"``: ``[blocks, size, heads, dim]``; ``[blocks, 2, size, heads, dim]`` or ``[2, blocks, ...]``, whichever
      has the axis of 2.
    - ``"interleaved"``: only as one array, ``[pages, size, 2 * heads, dim]``, keys at even heads (JAX's
      ragged_paged_attention).
    - ``"heads_first"``: only as a pair, ``[heads, pages, size, dim]`` (JAX's paged_attention).

    Args:
        cache: one tensor with keys and values, or a pair of tensors, whose dims may differ.
        layout: one of the names above.

    Returns:
        k_pages ``[num_pages, page_size, kv_heads, head_dim]``, and v_pages.

    Raises:
        SpecError: for an unknown layout, or one that the cache's form does not have.
        ShapeError: for a shape that is not of the layout, or that fits two orders of the axes.
        TypeError: for a cache that is neither a tensor nor a pair of tensors.
    """
    return layouts.pages_of(cache, layout, check_tensor, Tensor.permute)
