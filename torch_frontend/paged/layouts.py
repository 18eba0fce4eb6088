"""The pools of other libraries as ``paged_attention`` and ``append_kv`` take them, for torch tensors."""

from __future__ import annotations

import torch

from attn_core.paged import layouts
from torch_frontend.dispatch.plan import check_tensor

Tensor = torch.Tensor


def pages_of(cache: Tensor | tuple[Tensor, Tensor], layout: str) -> tuple[Tensor, Tensor]:
    """Returns a pool of another library as ``(k_pages, v_pages)``: views of its memory, so nothing is copied.

    ``append_kv`` on the views writes into the cache.

    Args:
        cache: one tensor with keys and values, or a pair of tensors.
        layout: "NHD", "HND", "vllm", "interleaved" or "heads_first"; ``attn_core.paged.layouts.pages_of`` says which
            axes and errors these have.
    """
    return layouts.pages_of(cache, layout, check_tensor, Tensor.permute)
