"""Splits the mask of a call of Unsloth's ``run_attention`` into the two masks of ``attention``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attn_core.call.tensors import dtype_name
from attn_core.dropins.unsloth.arguments import AttentionContext
from attn_core.dropins.unsloth.request import UnslothRequest
from attn_core.errors import DTypeError, ShapeError


def split_mask(request: UnslothRequest, context: AttentionContext, to_bool: Callable[[Any], Any]) -> tuple[Any, Any]:
    """Returns Unsloth's mask as (bool mask, additive bias) of four axes. See ``UnslothRequest.mask`` for its ranks.

    Args:
        to_bool: returns an array of True where an array is not 0.

    Raises:
        ShapeError, DTypeError: for a mask that is not a mask of keys, bool, or float.
    """
    mask = request.mask
    if mask is None:
        return None, None
    _check_mask(request, context)
    if request.keep:
        keys = to_bool(mask)
        if context.seq_info is not None or request.documents is not None:  # rows are laid end to end, so their keys are
            keys = keys.reshape(1, -1)
        return keys[:, None, None, :], None
    table = mask[:, None] if mask.ndim == 3 else mask
    kind = dtype_name(table)
    if kind == "bool":
        return table, None
    if "float" in kind:
        return None, table
    raise DTypeError(
        f"{request.mask_name}: expected bool (True = visible) or a float to be added, got {table.dtype} of shape "
        f"{list(mask.shape)}; a 0/1 mask becomes bool by mask != 0"
    )


def _check_mask(request: UnslothRequest, context: AttentionContext) -> None:
    """Raises ShapeError for a mask with unsupported axes; ``attention`` checks the sizes of complete masks."""
    shape = list(request.mask.shape)
    if request.keep and shape != [context.bsz, context.kv_seq_len]:
        raise ShapeError(
            f"{request.mask_name}: expected a mask of keys, [bsz, kv_len] = [{context.bsz}, {context.kv_seq_len}], "
            f"got {shape}"
        )
    if len(shape) not in (2, 3, 4):
        raise ShapeError(f"{request.mask_name}: expected 2, 3 or 4 axes, got {shape}")
