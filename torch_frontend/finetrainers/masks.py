"""Converts ``attn_mask`` of each of Finetrainers' providers to a mask of scores or of keys."""

from __future__ import annotations

from typing import Any

import torch

from attn_core.dropins.finetrainers import AttentionProvider
from attn_core.dropins.finetrainers_call import with_mask_axes
from attn_core.errors import ShapeError
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
    return with_mask_axes(provider, query, key, mask)  # type: ignore[no-any-return]


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


def without_copies(mask: Tensor) -> Tensor:
    """Returns the mask with one entry for all heads, and one for all queries, if that axis was expanded."""
    if mask.dim() == 4:
        for axis in (1, 2):
            mask = mask.narrow(axis, 0, 1) if mask.shape[axis] > 1 and mask.stride(axis) == 0 else mask
    return mask
