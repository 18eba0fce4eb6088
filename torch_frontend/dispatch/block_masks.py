"""BlockMask of torch's FlexAttention: its mask function, which says what is visible; its tables only repeat it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from attn_core.errors import ShapeError, SpecError


def is_block_mask(value: Any) -> bool:
    """Returns whether a value is torch's ``BlockMask``; imports nothing."""
    kind = type(value)
    return kind.__name__ == "BlockMask" and kind.__module__ == "torch.nn.attention.flex_attention"


def function_of(mask: Any, batch: Any, heads: Any, q_len: Any, kv_len: Any, name: str) -> Callable[..., Any]:
    """Returns a BlockMask's mask function, ``f(b, h, q, k)``.

    Args:
        batch, heads, q_len, kv_len: of the call.
        name: of the argument, for errors.

    Raises:
        ShapeError: for a mask of other sizes.
        SpecError: for a mask whose blocks alone say what is visible.
    """
    from torch.nn.attention.flex_attention import noop_mask

    mask_batch, mask_heads, *lengths = mask.shape
    if mask_batch not in (1, batch) or mask_heads not in (1, heads) or lengths != [q_len, kv_len]:
        raise ShapeError(
            f"{name}: expected a BlockMask of [{batch} or 1, {heads} or 1, {q_len}, {kv_len}], got {list(mask.shape)}"
        )
    if mask.mask_mod is noop_mask and not _lists_all_blocks(mask):
        raise SpecError(
            f"{name}: expected a BlockMask that has a mask function, because its blocks alone would have to be read "
            "from the device; pass mask_mod= to BlockMask.from_kv_blocks, or no mask if it hides nothing"
        )
    return mask.mask_mod  # type: ignore[no-any-return]


def _lists_all_blocks(mask: Any) -> bool:
    """Returns whether a mask without a function is known to hide nothing: only if its counts can be read at once."""
    import torch

    counts = [table for table in (mask.kv_num_blocks, mask.full_kv_num_blocks) if table is not None]
    if torch.compiler.is_compiling() or not all([type(table) is torch.Tensor and table.is_cpu for table in counts]):
        return False
    try:
        numbers = sum(np.array(table.tolist()) for table in counts)  # no mode sees it
    except RuntimeError:  # a wrapper of a transform
        return False
    return bool((numbers == -(-mask.shape[-1] // mask.BLOCK_SIZE[1])).all())
