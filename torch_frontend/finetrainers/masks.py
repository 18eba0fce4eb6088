"""What ``attn_mask`` says to each of Finetrainers' providers, as a mask of scores or of keys."""

from __future__ import annotations

from typing import Any

import torch

from attn_core.dropins.finetrainers import VARLEN, AttentionProvider, two_axes
from attn_core.errors import DTypeError, ShapeError
from torch_frontend.dispatch.plan import check_tensor

Tensor = torch.Tensor


def stated_mask(provider: AttentionProvider, query: Tensor, key: Tensor, mask: Any) -> Tensor | None:
    """The mask as a tensor: a BlockMask of flex written out, one of two axes that is of keys with four.

    Raises:
        DTypeError, ShapeError: for a mask that is none, or whose two axes cannot be told.
    """
    if mask is None:
        return None
    if type(mask).__name__ == "BlockMask" and provider is AttentionProvider.FLEX:
        return _written_out(mask, query, key)
    check_tensor("attn_mask", mask)
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise DTypeError(
            f"attn_mask: expected bool (True = visible) or a float to be added, got {mask.dtype}; a 0/1 mask becomes "
            "bool by attn_mask != 0"
        )
    if mask.dim() == 2 and provider not in VARLEN:
        about = two_axes(provider, tuple(mask.shape), query.shape[0], query.shape[2], key.shape[2])
        return mask[:, None, None, :] if about == "keys" else mask
    return mask


def _written_out(mask: Any, query: Tensor, key: Tensor) -> Tensor:
    """A BlockMask's own mask function for every query and key: exact, and as large as that."""
    from torch.nn.attention.flex_attention import create_mask

    (batch, heads, q_len, _), kv_len = query.shape, key.shape[2]
    mask_batch, mask_heads, *lengths = mask.shape
    if mask_batch not in (1, batch) or mask_heads not in (1, heads) or lengths != [q_len, kv_len]:
        raise ShapeError(
            f"attn_mask: expected a BlockMask of [{batch} or 1, {heads} or 1, {q_len}, {kv_len}], "
            f"got {list(mask.shape)}"
        )
    return create_mask(mask.mask_mod, mask_batch, mask_heads, q_len, kv_len, device=query.device)


def kept_keys(provider: AttentionProvider, key: Tensor, mask: Tensor) -> Tensor:
    """bool ``[batch, kv_len]``: the keys that a varlen provider's mask keeps.

    Raises:
        DTypeError, ShapeError: for a mask that is added, or that differs among queries or heads.
    """
    batch, _, kv_len, _ = key.shape
    given, wanted = list(mask.shape), f"[batch, kv_len] = [{batch}, {kv_len}], or [batch, 1, 1, kv_len]"
    if mask.dtype != torch.bool:
        raise DTypeError(
            f"attn_mask: provider {provider.value} takes bool masks of keys {wanted}, got {mask.dtype} {given}; for a "
            "mask that is added use another provider"
        )
    keep = mask
    if mask.dim() == 4:
        for axis in (1, 2):  # an expanded axis says the same for every head and query
            keep = keep.narrow(axis, 0, 1) if keep.shape[axis] > 1 and keep.stride(axis) == 0 else keep
        keep = keep.squeeze((1, 2))  # [batch, 1, 1, kv_len] -> [batch, kv_len]
    elif mask.dim() == 1:
        keep = mask[None]
    if keep.dim() != 2 or keep.shape[0] not in (1, batch) or keep.shape[1] not in (1, kv_len):
        raise ShapeError(
            f"attn_mask: provider {provider.value} takes masks of keys {wanted}, got {given}; for a mask that differs "
            "among queries or heads use another provider"
        )
    return keep.expand(batch, kv_len)
