"""Converts ``attn_mask`` of each of Finetrainers' providers to a mask of scores or of keys."""

from __future__ import annotations

from typing import Any

import torch

from attn_core.dropins.finetrainers import AttentionProvider
from attn_core.dropins.finetrainers_call import with_mask_axes
from attn_core.expressions import ExpressionError, trace_mask
from attn_core.expressions.tracing import TracedFunction
from torch_frontend.dispatch.block_masks import function_of, is_block_mask
from torch_frontend.dispatch.plan import check_tensor

Tensor = torch.Tensor


def mask_tensor(provider: AttentionProvider, query: Tensor, key: Tensor, mask: Any) -> Tensor | None:
    """Returns the mask as a tensor: flex's BlockMask as a dense mask, a key mask of two axes with four axes.

    A BlockMask becomes a dense mask only if ``mask_function`` cannot read it.

    Raises:
        DTypeError, ShapeError: for an invalid mask, or one whose two axes are ambiguous.
    """
    if mask is None:
        return None
    if is_block_mask(mask) and provider is AttentionProvider.FLEX:
        return _dense_block_mask(mask, query, key)
    check_tensor("attn_mask", mask)
    return with_mask_axes(provider, query, key, mask)  # type: ignore[no-any-return]


def mask_function(provider: AttentionProvider, query: Tensor, key: Tensor, mask: Any) -> TracedFunction | None:
    """Returns the function of flex's BlockMask as an expression.

    None for other masks and providers, under torch.compile, and for a function that cannot become one.
    """
    if not is_block_mask(mask) or provider is not AttentionProvider.FLEX or torch.compiler.is_compiling():
        return None
    (batch, heads, q_len, _), kv_len = query.shape, key.shape[2]
    try:
        return trace_mask(function_of(mask, batch, heads, q_len, kv_len, "attn_mask"))
    except ExpressionError:
        return None


def _dense_block_mask(mask: Any, query: Tensor, key: Tensor) -> Tensor:
    """Builds a BlockMask's dense mask by its mask function; takes q_len * kv_len elements."""
    from torch.nn.attention.flex_attention import create_mask

    (batch, heads, q_len, _), kv_len = query.shape, key.shape[2]
    function = function_of(mask, batch, heads, q_len, kv_len, "attn_mask")
    mask_batch, mask_heads = mask.shape[:2]
    return create_mask(function, mask_batch, mask_heads, q_len, kv_len, device=query.device)


def without_copies(mask: Tensor) -> Tensor:
    """Returns the mask with one entry for all heads, and one for all queries, if that axis was expanded."""
    if mask.dim() == 4:
        for axis in (1, 2):
            mask = mask.narrow(axis, 0, 1) if mask.shape[axis] > 1 and mask.stride(axis) == 0 else mask
    return mask
