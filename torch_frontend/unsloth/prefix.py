"""Computes attention of rows that share a prefix, for torch tensors (see attn_core.dropins.unsloth.prefix)."""

from __future__ import annotations

from typing import Any

import torch

from attn_core.dropins.unsloth.arguments import AttentionContext, trains
from attn_core.dropins.unsloth.prefix import shared_prefixes
from attn_core.dropins.unsloth.request import UnslothRequest
from torch_frontend.recomputed import attention_of_layer

Tensor = torch.Tensor


def attend(q: Tensor, k: Tensor, v: Tensor, request: UnslothRequest, context: AttentionContext, backend: Any) -> Tensor:
    """Returns ``[bsz, len, heads, value_dim]``: each token attends to its own run and to its group's shared prefix."""
    shared = shared_prefixes(request, context, _on_host)
    out = attention_of_layer(
        *(tensor.flatten(0, 1)[None] for tensor in (q, k, v)),  # [1, bsz * len, heads, head_dim]
        trains=trains(context),
        key_ranges=shared.key_ranges,
        softcap=request.softcap,
        scale=request.scale,
        deterministic=request.deterministic,
        invariant=request.invariant,
        backend=backend,
    )
    return out[0].unflatten(0, q.shape[:2])  # type: ignore[no-any-return]


def _on_host(labels: Any) -> Any:
    """Returns token labels as a numpy array; waits for a GPU."""
    return labels.cpu().numpy() if isinstance(labels, Tensor) else labels
