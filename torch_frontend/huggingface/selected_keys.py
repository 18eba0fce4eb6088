"""Keys and sinks that sparse-index models compute for each query: ``indices=``, ``block_indices=`` and ``sinks=``.

These models select keys with a small network of their own (DeepSeek V3.2, GLM-MoE-DSA, MiniMax M3). They build the mask
of the selected keys for ``eager`` and ``sdpa`` only, and pass other attention functions the indices. Here the indices
become the mask that ``sdpa`` would get.
"""

from __future__ import annotations

from typing import Any

import torch

from attn_core.errors import ShapeError, SpecError
from torch_frontend.huggingface.described_mask import DescribedMask
from torch_frontend.huggingface.layer_call import LayerCall

Tensor = torch.Tensor


def selected_keys(indices: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Returns the keys that a model selected for all heads, bool ``[batch, 1, q_len, kv_len]``.

    Args:
        indices: ints ``[batch, q_len, count]``; a negative one selects nothing.
        query, key: ``[batch, heads, len, head_dim]``.

    Raises:
        ShapeError: if the indices have other axes.
    """
    (batch, _, queries, _), keys = query.shape, key.shape[2]
    if indices.dim() != 3 or tuple(indices.shape[:2]) != (batch, queries):
        raise ShapeError(f"indices: expected [{batch}, {queries}, count], got {list(indices.shape)}")
    # A negative index marks one more place, which the slice drops.
    places = torch.where(indices < 0, keys, indices).long()
    marks = torch.zeros((batch, queries, keys + 1), dtype=torch.bool, device=indices.device)
    return marks.scatter(-1, places, True)[:, None, :, :keys]


def mask_of_blocks(
    module: Any, block_indices: Tensor, attention_mask: Any, query: Tensor, key: Tensor, position_ids: Tensor | None
) -> Tensor:
    """Returns the mask that a layer's own indexer builds from selected blocks, as for ``sdpa``: 0, or the lowest float.

    Args:
        block_indices: ints ``[batch, index_heads, q_len, count]``.
        query, key: ``[batch, heads, len, head_dim]``.

    Raises:
        SpecError: if the layer's indexer has no ``build_block_mask``.
    """
    build = getattr(getattr(module, "indexer", None), "build_block_mask", None)
    if build is None:
        raise SpecError(
            f"block_indices: expected a layer with indexer.build_block_mask, as MiniMax M3 has, got "
            f"{type(module).__name__}; load the model with attn_implementation='eager'"
        )
    if position_ids is None:
        position_ids = torch.arange(key.shape[2] - query.shape[2], key.shape[2], device=query.device)
    if position_ids.dim() == 1:
        position_ids = position_ids[None]
    dense = attention_mask.build() if isinstance(attention_mask, DescribedMask) else attention_mask
    result: Tensor = build(
        block_indices, dense, key.shape[2], query.dtype, query.device, position_ids.expand(query.shape[0], -1)
    )
    return result


def with_selected(call: LayerCall, selected: Tensor, batch: int) -> LayerCall:
    """Returns a call that sees only the selected keys among its visible keys.

    Args:
        selected: bool ``[batch, 1, q_len, kv_len]``.
    """
    if call.seq_info is not None and batch > 1:
        selected = _end_to_end(selected)
    if call.seen is not None:
        selected = selected[..., : call.seen]
    return call._replace(mask=selected if call.mask is None else selected & call.mask)


def absorb(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Returns attention whose softmax has one more logit per query, which has no value.

    That logit scales a row by ``exp(lse) / (exp(lse) + exp(sink))``.

    Args:
        out: attention without sinks, ``[batch, q_len, heads, value_dim]``.
        lse: its log-sum-exp, ``[batch, heads, q_len]``.
        sinks: ``[batch, heads, q_len, 1]``.

    Raises:
        ShapeError: for sinks of another shape.
    """
    if sinks.shape != (*lse.shape, 1):
        raise ShapeError(f"sinks: expected one for each query, {[*lse.shape, 1]}, got {list(sinks.shape)}")
    share = torch.sigmoid(lse - sinks[..., 0].to(lse.dtype))  # [batch, heads, q_len]
    return (out * share.transpose(1, 2)[..., None]).to(out.dtype)


def _end_to_end(selected: Tensor) -> Tensor:
    """Returns the table ``[1, 1, batch * q_len, batch * kv_len]`` of rows that are laid end to end."""
    batch, _, queries, keys = selected.shape
    own = torch.eye(batch, dtype=torch.bool, device=selected.device)[:, None, :, None]  # [batch, 1, batch, 1]
    return (selected.transpose(1, 2) & own).reshape(1, 1, batch * queries, batch * keys)
