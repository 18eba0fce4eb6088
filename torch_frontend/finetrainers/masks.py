"""Converts ``attn_mask`` of each of Finetrainers' providers to a mask of scores or of keys."""

from __future__ import annotations

from typing import Any

import torch

from attn_core.dropins.finetrainers import VARLEN, AttentionProvider, two_axes
from attn_core.errors import DTypeError, ShapeError
from torch_frontend.dispatch.plan import check_tensor

Tensor = torch.Tensor


def mask_tensor(provider: AttentionProvider, query: Tensor, key: Tensor, mask: Any) -> Tensor | None:
    """Returns the mask as a tensor: flex's BlockMask as a dense mask, a key mask of two axes with four axes.

    Raises:
        DTypeError, ShapeError: for an invalid mask, or one whose two axes are ambiguous.
    """
    if mask is None:
        return None
    if type(mask).__name__ == "BlockMask" and provider is AttentionProvider.FLEX:
        return _dense_block_mask(mask, query, key)
    check_tensor("attn_mask", mask)
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise DTypeError(
            f"attn_mask: expected bool (True = visible) or a float to be added, got {mask.dtype}; a 0/1 mask becomes "
            "bool by attn_mask != 0"
        )
    if mask.dim() == 2 and provider not in VARLEN:
        kind = two_axes(provider, tuple(mask.shape), query.shape[0], query.shape[2], key.shape[2])
        return mask[:, None, None, :] if kind == "keys" else mask
    return mask


def _dense_block_mask(mask: Any, query: Tensor, key: Tensor) -> Tensor:
    """Builds a BlockMask's dense mask by its mask function; takes q_len * kv_len elements."""
    from torch.nn.attention.flex_attention import create_mask

    (batch, heads, q_len, _), kv_len = query.shape, key.shape[2]
    mask_batch, mask_heads, *lengths = mask.shape
    if mask_batch not in (1, batch) or mask_heads not in (1, heads) or lengths != [q_len, kv_len]:
        raise ShapeError(
            f"attn_mask: expected a BlockMask of [{batch} or 1, {heads} or 1, {q_len}, {kv_len}], "
            f"got {list(mask.shape)}"
        )
    return create_mask(mask.mask_mod, mask_batch, mask_heads, q_len, kv_len, device=query.device)


def key_mask(provider: AttentionProvider, key: Tensor, mask: Tensor) -> Tensor:
    """Returns a varlen provider's mask as bool ``[batch, kv_len]``, True for visible keys.

    Raises:
        DTypeError, ShapeError: for an additive mask, or one that differs among queries or heads.
    """
    batch, _, kv_len, _ = key.shape
    shape, expected = list(mask.shape), f"[batch, kv_len] = [{batch}, {kv_len}], or [batch, 1, 1, kv_len]"
    if mask.dtype != torch.bool:
        raise DTypeError(
            f"attn_mask: provider {provider.value} takes bool masks of keys {expected}, got {mask.dtype} {shape}; "
            "for an additive mask use another provider"
        )
    keep = mask
    if mask.dim() == 4:
        for axis in (1, 2):  # an expanded axis is equal for every head or query
            keep = keep.narrow(axis, 0, 1) if keep.shape[axis] > 1 and keep.stride(axis) == 0 else keep
        keep = keep.squeeze((1, 2))  # [batch, 1, 1, kv_len] -> [batch, kv_len]
    elif mask.dim() == 1:
        keep = mask[None]
    if keep.dim() != 2 or keep.shape[0] not in (1, batch) or keep.shape[1] not in (1, kv_len):
        raise ShapeError(
            f"attn_mask: provider {provider.value} takes masks of keys {expected}, got {shape}; for a mask that "
            "differs among queries or heads use another provider"
        )
    return keep.expand(batch, kv_len)
