"""The drop-ins' calls, each beside ``attention`` itself: what a host's signature costs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

import torch_frontend
from torch_frontend import finetrainers, huggingface_attention, unsloth, unsloth_softcapping


def calls(
    shape: tuple[int, int, int, int], device: str, dtype: torch.dtype
) -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
    """(a drop-in's call, ``attention`` with the same arguments) by what it stands for.

    shape: ``[batch, seq, heads, head_dim]``.
    """
    batch, length, heads, dim = shape
    rows = [torch.randn(shape, device=device, dtype=dtype) for _ in range(3)]  # [batch, seq, heads, head_dim]
    q, k, v = (tensor.transpose(1, 2) for tensor in rows)  # as the hosts lay them out
    config = unsloth.AttentionConfig(backend="sdpa", n_kv_heads=heads, n_groups=1)
    context = unsloth.AttentionContext(
        bsz=batch, q_len=length, kv_seq_len=length, n_heads=heads, head_dim=dim, requires_grad=False
    )
    layer = SimpleNamespace(
        is_causal=True,
        training=False,
        config=SimpleNamespace(query_pre_attn_scalar=dim, attn_logit_softcapping=30.0),
    )
    mask = unsloth_softcapping.create_flex_attention_causal_mask(length)
    capped = unsloth_softcapping.slow_attention_softcapping
    causal = partial(torch_frontend.attention, *rows, causal=True)
    softcapped = partial(torch_frontend.attention, *rows, causal=True, softcap=30.0)

    def provided() -> Any:
        with finetrainers.attention_provider("flash"):
            return finetrainers.attention_dispatch(q, k, v, is_causal=True)

    def chosen() -> Any:
        with torch_frontend.use_backend("flash3", "flash4", "flash2", "sdpa_flash"):
            return causal()

    return {
        "Unsloth's run_attention": (
            lambda: unsloth.run_attention(config=config, context=context, Q=q, K=k, V=v),
            causal,
        ),
        "Unsloth's softcapped attention": (lambda: capped(q, k, v, mask, layer, batch, length), softcapped),
        "Finetrainers' attention_dispatch": (
            lambda: finetrainers.attention_dispatch(q, k, v, is_causal=True),
            partial(torch_frontend.attention, *rows, causal=True, alignment="top_left"),
        ),
        "Finetrainers' attention_dispatch in a provider's block": (provided, chosen),
        "transformers' attention interface": (lambda: huggingface_attention.attend(layer, q, k, v, None), causal),
    }
