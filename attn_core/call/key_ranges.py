"""Key ranges: for each key the ranges of queries that see it, a mask of O(kv_len) numbers. Definition and checks.

Key ``j`` of kv head ``g`` in batch row ``b`` is visible to query ``i`` iff ``start <= i < stop`` for one of its ranges
``(start, stop) = key_ranges[b, g, j, r]``. A range with ``start == stop`` is empty: it fills up a key that needs fewer
ranges than another one. Queries count from 0 in the whole row, in packed rows through all documents. Causal, window,
documents and mask hide further pairs. ``attn_core.masks`` builds such arrays.

With keys and values in pages there are ranges for the new tokens alone, which are the tokens of q: row ``j`` belongs to
the key that token ``j`` of q has written, and queries are numbered as the tokens of q. Every query sees the keys before
them. So the drafts of speculative decoding form a tree.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from attn_core.call.kinds import is_number
from attn_core.call.tensors import A, Array
from attn_core.errors import ShapeError, SpecError

LAYOUT = "[batch or 1, kv_heads or 1, kv_len, ranges, 2]"
LAYOUT_OF_PAGES = "[1, kv_heads or 1, tokens of q, ranges, 2]"
MOST_RANGES = 2


def check_shape(shape: tuple[int, ...] | None, batch: int, kv_heads: int, keys: int, layout: str = LAYOUT) -> None:
    """Checks the shape of key ranges; None means that there are none.

    Args:
        keys: the number of keys that have ranges. layout: the names of the axes, for the error.

    Raises:
        ShapeError: naming the axes.
    """
    if shape is None:
        return
    full = f"{layout} = [{batch} or 1, {kv_heads} or 1, {keys}, 1 or {MOST_RANGES}, 2]"
    fits = len(shape) == 5 and shape[0] in (1, batch) and shape[1] in (1, kv_heads) and shape[2] == keys
    if not fits or shape[3] not in range(1, MOST_RANGES + 1) or shape[4] != 2:
        raise ShapeError(f"key_ranges: expected shape {full}, got [{', '.join(map(str, shape))}]")


def check_values(key_ranges: np.ndarray, q_len: int) -> None:
    """Checks ranges whose values are on the host. They are not checked against a length that is a symbol.

    Raises:
        SpecError: naming the first wrong range and its key.
    """
    starts, stops = key_ranges[..., 0], key_ranges[..., 1]
    wrong = (starts < 0) | (starts > stops)
    if is_number(q_len):
        wrong |= stops > q_len
    if wrong.any():
        row, head, key, which = (int(index) for index in np.argwhere(wrong)[0])
        start, stop = key_ranges[row, head, key, which].tolist()
        raise SpecError(
            f"key_ranges: expected 0 <= start <= stop <= q_len ({q_len}), got start {start} and stop {stop} for key "
            f"{key} (batch row {row}, kv head {head}, range {which}); start == stop is an empty range"
        )


def contains(key_ranges: A, rows: A) -> A:
    """Returns which queries see which keys, bool ``[..., queries, keys]``; the definition, in any framework.

    Args:
        key_ranges: ``[..., keys, ranges, 2]``, whose values need not be valid: nothing is indexed by them.
        rows: the queries' places in the row, ints ``[queries]``, or ``[..., queries]`` if rows differ in theirs.
    """
    seen: Any = None
    for which in range(key_ranges.shape[-2]):
        starts, stops = (key_ranges[..., which, end][..., None, :] for end in (0, 1))  # [..., 1, keys]
        inside = (rows[..., None] >= starts) & (rows[..., None] < stops)
        seen = inside if seen is None else seen | inside
    return seen


def within_band(
    starts: np.ndarray, stops: np.ndarray, edges: tuple[int | None, int | None], q_len: int
) -> tuple[np.ndarray, np.ndarray]:
    """Cuts ranges ``[..., keys]`` at the band of causal and window, ``low <= key - query <= high``, and at the row."""
    (low, high), key = edges, np.arange(starts.shape[-1])
    starts = np.maximum(starts, 0 if high is None else key - high)
    return starts, np.minimum(stops, q_len if low is None else key - low + 1)


def visible_blocks(
    key_ranges: np.ndarray, q_len: int, edges: tuple[int | None, int | None], size: int = 128
) -> tuple[int, int]:
    """Returns how many blocks of ``size`` queries and keys have a visible pair, and how many there are.

    Args:
        key_ranges: ``[batch or 1, kv_heads or 1, kv_len, ranges, 2]``, valid.
        edges: the band of causal and window, see ``within_band``.
    """
    rows, heads, kv_len, ranges, _ = key_ranges.shape
    q_blocks, k_blocks = -(-q_len // size), -(-kv_len // size)
    # Each range adds 1 from its first block of queries on, and takes it away behind its last.
    changes = np.zeros((rows, heads, k_blocks, q_blocks + 1), np.int64)
    for which in range(ranges):
        of_range = key_ranges[..., which, 0].astype(np.int64), key_ranges[..., which, 1].astype(np.int64)
        starts, stops = within_band(*of_range, edges, q_len)
        row, head, key = np.nonzero(starts < stops)
        first, last = starts[row, head, key] // size, (stops[row, head, key] - 1) // size
        np.add.at(changes, (row, head, key // size, first), 1)
        np.add.at(changes, (row, head, key // size, last + 1), -1)
    seen = changes.cumsum(-1)[..., :-1] > 0
    return int(seen.sum()), seen.size


def visible_in_ranges(key_ranges: Array, q_len: int, num_heads: int) -> np.ndarray:
    """Returns the pairs that ranges show: bool ``[batch or 1, heads or 1, q_len, kv_len]``; 1 head if all share it."""
    ranges = np.asarray(key_ranges)
    seen: np.ndarray = contains(ranges, np.arange(q_len))
    return seen if seen.shape[1] == 1 else np.repeat(seen, num_heads // seen.shape[1], axis=1)
