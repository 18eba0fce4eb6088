"""FlashMask's column-wise indices as key ranges."""

from __future__ import annotations

from typing import Any

import numpy as np

from attn_core.call.options import check_flag
from attn_core.errors import ShapeError, SpecError


def from_flashmask(indices: Any, causal: bool) -> np.ndarray:
    """Returns FlashMask's ``startend_row_indices`` as key ranges; theirs say which queries do not see a key.

    With r the last axis: causal, 1: ``q sees k iff k <= q < r0``; causal, 2: ``k <= q, and not r0 <= q < r1``; not
    causal, 2: ``r1 <= q < r0``; not causal, 4: ``not r0 <= q < r1, and not r2 <= q < r3``. The ranges have causal in
    them, so call attention without it or with it.

    Args:
        indices: ints ``[batch or 1, kv_heads or 1, tokens, 1, 2 or 4]`` for as many queries as keys: the queries at
            which hiding starts and ends below the diagonal, then above it.
        causal: as in FlashMask.

    Returns:
        int32 ``[batch or 1, kv_heads or 1, tokens, 1 or 2, 2]``.

    Raises:
        ShapeError, SpecError: for another shape, for an index that is negative or beyond ``tokens``, and for a key
            whose queries form three ranges.
    """
    array, causal = np.asarray(indices), check_flag("causal", causal)
    expected = (1, 2) if causal else (2, 4)
    if array.ndim != 4 or array.shape[-1] not in expected:
        last = " or ".join(map(str, expected))
        raise ShapeError(
            f"indices: expected [batch or 1, kv_heads or 1, tokens, {last}] with causal={causal}, got "
            f"{list(array.shape)}"
        )
    if array.size and array.dtype.kind not in "iu":
        raise SpecError(f"indices: expected whole numbers, got dtype {array.dtype}")
    tokens = array.shape[2]
    if (wrong := (array < 0) | (array > tokens)).any():
        at = tuple(np.argwhere(wrong)[0].tolist())
        raise SpecError(f"indices{list(at)}={array[at]}: expected a query from 0 to {tokens}, the number of tokens")
    ends = array.astype(np.int64)
    key = np.broadcast_to(np.arange(tokens), ends.shape[:3])
    end = np.full_like(key, tokens)
    if array.shape[-1] == 1:
        pairs = [(key, ends[..., 0])]
    elif causal:
        start, stop = ends[..., 0], np.maximum(ends[..., 0], ends[..., 1])
        pairs = [(key, start), (np.maximum(key, stop), end)]
    elif array.shape[-1] == 2:
        pairs = [(ends[..., 1], ends[..., 0])]
    else:
        pairs = _two_of_three(ends, end)
    whole = np.stack([np.stack(pair, -1) for pair in pairs], -2)
    return np.ascontiguousarray(np.where(whole[..., :1] < whole[..., 1:], whole, 0), np.int32)


def _two_of_three(ends: np.ndarray, end: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns the queries outside two hidden ranges of each key, ``[batch, kv_heads, tokens, 4]``, as two ranges."""
    hidden = ends.reshape(*ends.shape[:-1], 2, 2)
    # An empty hidden range hides nothing; moved to the end, it leaves its neighbours whole.
    hidden = np.where(hidden[..., :1] < hidden[..., 1:], hidden, end[..., None, None])
    order = np.argsort(hidden[..., 0], -1, kind="stable")
    hidden = np.take_along_axis(hidden, order[..., None], -2)
    (first, first_stop), (second, second_stop) = ((hidden[..., at, 0], hidden[..., at, 1]) for at in (0, 1))
    last = np.maximum(first_stop, second_stop)
    three = [(np.zeros_like(end), first), (first_stop, second), (last, end)]
    present = np.stack([start < stop for start, stop in three], -1)
    if (present.sum(-1) > 2).any():
        row, head, key = np.argwhere(present.sum(-1) > 2)[0].tolist()
        raise SpecError(
            f"indices: expected at most 2 ranges of queries that see a key, got 3 for key {key} (batch row {row}, kv "
            f"head {head}); pass a mask"
        )
    # The ranges that are not empty come first, in their order.
    order = np.argsort(~present, -1, kind="stable")
    starts, stops = (np.take_along_axis(np.stack(side, -1), order, -1) for side in zip(*three, strict=True))
    return [(starts[..., at], stops[..., at]) for at in (0, 1)]
