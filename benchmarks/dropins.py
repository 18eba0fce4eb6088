"""The drop-ins' calls, each with the same call of ``attention``, to measure the overhead of the drop-ins."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

import torch_frontend
from torch_frontend import finetrainers, unsloth
from torch_frontend.huggingface import attention as huggingface_attention
from torch_frontend.unsloth import softcapping

IN_A_BLOCK = 100


class Calls(NamedTuple):
    """A drop-in's call, and ``attention`` on views of the same tensors; ``times`` is the number of calls in a run."""

    dropin: Callable[[], Any]
    attention: Callable[[], Any]
    times: int = 1


def calls(shape: tuple[int, int, int, int], device: str, dtype: torch.dtype) -> dict[str, Calls]:
    """Returns the calls by name; ``shape`` is ``[batch, seq, heads, head_dim]``."""
    batch, length, heads, dim = shape
    rows = [torch.randn(shape, device=device, dtype=dtype) for _ in range(3)]  # [batch, seq, heads, head_dim]
    q, k, v = (tensor.transpose(1, 2) for tensor in rows)  # the hosts' layout
    config = unsloth.AttentionConfig(backend="sdpa", n_kv_heads=heads, n_groups=1)
    context = unsloth.AttentionContext(
        bsz=batch, q_len=length, kv_seq_len=length, n_heads=heads, head_dim=dim, requires_grad=False
    )
    layer = SimpleNamespace(
        is_causal=True,
        training=False,
        config=SimpleNamespace(query_pre_attn_scalar=dim, attn_logit_softcapping=30.0),
    )
    mask = softcapping.create_flex_attention_causal_mask(length)
    capped = softcapping.slow_attention_softcapping
    kernels = ("flash3", "flash4", "flash2", "sdpa_flash")

    def plain(**options: Any) -> Any:  # a direct call on these tensors
        return torch_frontend.attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), causal=True, **options)

    def in_a_block(block: Any, call: Callable[[], Any]) -> None:
        with block:
            for _ in range(IN_A_BLOCK):
                call()

    def dispatch() -> Any:
        return finetrainers.attention_dispatch(q, k, v, is_causal=True)

    def in_the_hosts_layout() -> Any:
        return plain(alignment="top_left").transpose(1, 2)

    blocks = (
        lambda: in_a_block(finetrainers.attention_provider("flash"), dispatch),
        lambda: in_a_block(torch_frontend.use_backend(*kernels), in_the_hosts_layout),
    )
    return {
        "Unsloth's run_attention": Calls(
            lambda: unsloth.run_attention(config=config, context=context, Q=q, K=k, V=v), plain
        ),
        "Unsloth's softcapped attention": Calls(
            lambda: capped(q, k, v, mask, layer, batch, length), partial(plain, softcap=30.0)
        ),
        "Finetrainers' attention_dispatch": Calls(dispatch, in_the_hosts_layout),
        "Finetrainers' attention_dispatch in a provider's block": Calls(*blocks, IN_A_BLOCK),
        "transformers' attention interface": Calls(lambda: huggingface_attention.attend(layer, q, k, v, None), plain),
    }
