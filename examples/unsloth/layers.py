"""Attention layers that call ``run_attention`` as Unsloth's models do, patched into models of transformers.

Unsloth replaces the forward of each attention layer: of Llama and Mistral with plain or windowed attention, of Gemma 2
with softcapped attention. ``patch`` does the same here, with forwards written for this example. In Unsloth itself,
``torch_frontend.unsloth.installed`` replaces the functions that its forwards call.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from torch_frontend.unsloth import (
    SDPA,
    AttentionConfig,
    AttentionContext,
    get_packed_info_from_kwargs,
    run_attention,
    select_attention_backend,
)

Tensor = torch.Tensor


def patch(model: Any) -> Any:
    """Replaces the forward of every attention layer of a Llama, Mistral, Granite or Gemma 2. Returns the model.

    The patched model takes ``packed_seq_lengths=``, the lengths of documents in its one row, and ``keep=``, a mask of
    keys ``[batch, keys]`` in which 1 is visible. It ignores the masks that transformers builds.
    """
    for layer in model.model.layers:
        layer.self_attn.forward = MethodType(attention_forward, layer.self_attn)
    return model


def attention_forward(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Any = None,
    cache: Any = None,
    past_key_values: Any = None,
    keep: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Computes an attention layer of ``[batch, tokens, width]``, with the config and context that Unsloth sets."""
    bsz, q_len, _ = hidden_states.shape
    projections = (self.q_proj, self.k_proj, self.v_proj)
    rows = (projection(hidden_states).view(bsz, q_len, -1, self.head_dim) for projection in projections)
    q, k, v = (row.transpose(1, 2) for row in rows)  # [batch, heads, tokens, head_dim]
    q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
    cache = past_key_values if cache is None else cache  # its name before transformers 5.24
    had_cache = cache is not None and cache.get_seq_length(self.layer_idx) > 0
    if cache is not None:
        k, v = cache.update(k, v, self.layer_idx)
    seq_info = get_packed_info_from_kwargs(kwargs, q.device)
    packed = seq_info is not None and not had_cache
    keys = _window(self)
    window = (-1, -1) if keys is None or k.shape[2] <= keys else (keys - 1, 0)
    options = {"causal": True, "softmax_scale": self.scaling, "window_size": window}
    if getattr(self, "attn_logit_softcapping", None) is not None:
        options["softcap"] = self.attn_logit_softcapping
    config = AttentionConfig(
        backend=SDPA if keep is not None else select_attention_backend(packed),
        n_kv_heads=k.shape[1],
        n_groups=q.shape[1] // k.shape[1],
        flash_dense_kwargs=options,
        flash_varlen_kwargs=options | {"dropout_p": 0.0},
    )
    context = AttentionContext(
        bsz=bsz,
        q_len=q_len,
        kv_seq_len=k.shape[2],
        n_heads=q.shape[1],
        head_dim=self.head_dim,
        requires_grad=hidden_states.requires_grad,
        seq_info=seq_info if packed else None,
        training=self.training,
        attention_mask=keep,
        sliding_window=None if window == (-1, -1) else keys,
    )
    out = run_attention(config=config, context=context, Q=q, K=k, V=v)  # [batch, tokens, heads, head_dim]
    return self.o_proj(out.flatten(2)), None


def _window(layer: Any) -> int | None:
    """Returns the number of keys that the layer's queries see, or None for all."""
    kinds = getattr(layer.config, "layer_types", None)
    if kinds is not None and kinds[layer.layer_idx] != "sliding_attention":
        return None
    return getattr(layer.config, "sliding_window", None)
