"""Computes attention of rows that share a prefix, for torch tensors (see attn_core.dropins.unsloth.prefix)."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from attn_core.dropins.unsloth.arguments import AttentionContext, trains
from attn_core.dropins.unsloth.prefix import shared_prefixes
from attn_core.dropins.unsloth.request import UnslothRequest
from torch_frontend.recomputed import attention_of_layer

Tensor = torch.Tensor


def attend(q: Tensor, k: Tensor, v: Tensor, request: UnslothRequest, context: AttentionContext, backend: Any) -> Tensor:
    """Returns ``[bsz, len, heads, value_dim]``: each token attends to its own run and to its group's shared prefix.

    Two calls compute the two parts; their log-sum-exps give the weights of the merge.
    """
    shared = shared_prefixes(request, context, _on_host)
    rows = [tensor.flatten(0, 1) for tensor in (q, k, v)]  # [bsz * len, heads, head_dim]
    options: dict[str, Any] = {"softcap": request.softcap, "scale": request.scale}
    options |= {"deterministic": request.deterministic, "backend": backend, "return_lse": True}
    attention = partial(attention_of_layer, trains=trains(context))
    own, own_lse = attention(*rows, causal=True, seq_info=shared.own, **options)
    # Not causal, because a prefix lies before every token that shares it.
    prefix, prefix_lse = attention(*rows, seq_info=shared.prefix, **options)
    # Two softmaxes merge with the weights exp(lse) / sum of both, which is a sigmoid of the difference.
    share = torch.sigmoid(prefix_lse - own_lse).mT[..., None]  # [bsz * len, heads, 1]; 0 where no prefix is seen
    # In the dtype of the log-sum-exp, so that the merge rounds only once.
    merged = torch.lerp(own.to(share.dtype), prefix.to(share.dtype), share).to(own.dtype)
    return merged.unflatten(0, q.shape[:2])


def _on_host(labels: Any) -> Any:
    """Returns token labels as a numpy array; waits for a GPU."""
    return labels.cpu().numpy() if isinstance(labels, Tensor) else labels
