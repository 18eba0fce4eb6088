"""Masks of JAX's splash attention: read into causal and a window, into key ranges, or into a mask.

The meaning of splash's classes, for query i and key j, each counted from 0 in its row:

    FullMask                      every pair
    CausalMask(offset)            j <= i + offset
    LocalMask((left, right), offset)          i + offset - left <= j <= i + offset + right; None is unbounded
    ChunkedCausalMask(chunk_size)             j <= i, and both are in one chunk
    NumpyMask(array)              True
    LogicalAnd, LogicalOr         of two masks
    MultiHeadMask(masks)          one for each query head; they must be equal here

A class is read only under its full name, from its attributes: this module imports no JAX. A subclass may mean anything.
Sources: splash_attention_mask.py in jax 0.10 to 0.12, jax/experimental/pallas/ops/tpu/splash_attention, and the same
classes in tokamax, tokamax/_src/ops/experimental/tpu/splash_attention.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from attn_core.call.mask_tables import Reach, one_range, ranges_of_table, reach_of_table
from attn_core.call.seq_info import is_number
from attn_core.errors import ShapeError, SpecError

MODULES = (
    "jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask",
    "tokamax._src.ops.experimental.tpu.splash_attention.splash_attention_mask",
)
TABLES = ("NumpyMask", "LogicalAnd", "LogicalOr")
"""Classes that are looked at pair by pair if they are no band."""
CLASSES = ("FullMask", "CausalMask", "LocalMask", "ChunkedCausalMask", *TABLES, "MultiHeadMask")
MOST_PAIRS = 2**24
"""The most pairs of queries and keys that are looked at one by one."""


class SplashCall(NamedTuple):
    """The options of a call that say what is visible, beside a splash mask.

    Attributes:
        causal, alignment, window, key_ranges, seq_info: as the caller passed them.
        slopes: whether the call has ALiBi slopes, which ``alignment`` anchors as well.
        q_len, kv_len, heads: of the call.
    """

    causal: Any
    alignment: Any
    window: Any
    key_ranges: Any
    seq_info: Any
    slopes: bool
    q_len: Any
    kv_len: Any
    heads: Any


class SplashMeaning(NamedTuple):
    """What a splash mask says: options in the place of the caller's, and key ranges or a mask, numpy arrays or None."""

    causal: Any
    alignment: Any
    window: Any
    key_ranges: np.ndarray | None = None
    mask: np.ndarray | None = None


def is_splash_mask(value: Any) -> bool:
    """Returns whether a value is a mask object of splash attention that ``read`` knows."""
    kind = type(value)
    return kind.__name__ in CLASSES and kind.__module__ in MODULES


def read(mask: Any, call: SplashCall) -> SplashMeaning:
    """Returns what a splash mask means for a call.

    Raises:
        SpecError, ShapeError: if the mask belongs to rows of other lengths or another number of heads, if an option
            says the same or contradicts it, or if it is of a kind that no argument expresses; naming the remedy.
    """
    shown = f"mask: {type(mask).__name__}"
    _check_free(shown, call)
    if type(mask).__name__ == "MultiHeadMask":
        mask = _of_all_heads(mask, shown, call.heads)
    if not (is_number(call.q_len) and is_number(call.kv_len)):
        raise SpecError(f"{shown}: expected lengths that are numbers, because the mask has them, got symbolic ones")
    if tuple(mask.shape) != (call.q_len, call.kv_len):
        raise ShapeError(
            f"{shown}: expected one of {call.q_len} queries and {call.kv_len} keys, got {list(mask.shape)}"
        )
    _check_order(mask, shown)
    reach = _reach(mask)
    table = _table(mask, shown) if reach is None and type(mask).__name__ in TABLES else None
    if table is not None:
        reach = reach_of_table(table)
    if reach is not None:
        options = _options(reach, call)
        return options or SplashMeaning(*call[:3], key_ranges=one_range(*_queries(reach, call)))
    if table is None:  # chunks
        keys = np.arange(call.kv_len)
        stops = np.minimum((keys // mask.chunk_size + 1) * mask.chunk_size, call.q_len)
        return SplashMeaning(*call[:3], key_ranges=one_range(keys, stops))
    ranges = ranges_of_table(table)
    return SplashMeaning(*call[:3], key_ranges=ranges, mask=table[None, None] if ranges is None else None)


def _check_free(shown: str, call: SplashCall) -> None:
    """Raises SpecError for options that the object has as well."""
    repeated = {"causal=True": call.causal is True, "window=": call.window is not None}
    for option, clashes in (repeated | {"key_ranges=": call.key_ranges is not None}).items():
        if clashes:
            raise SpecError(f"{shown} with {option}: expected one of the two, because both say what is visible")


def _of_all_heads(mask: Any, shown: str, heads: Any) -> Any:
    """Returns the mask that all heads of a MultiHeadMask share."""
    masks = tuple(mask.masks)
    if len(masks) != heads:
        raise ShapeError(f"{shown}: expected one mask for each of {heads} query heads, got {len(masks)}")
    for head, other in enumerate(masks):
        for one in (masks[0], other):
            if not is_splash_mask(one):
                raise SpecError(f"{shown}: expected splash masks, got {type(one).__module__}.{type(one).__qualname__}")
        if other is not masks[0] and _key(other) != _key(masks[0]):
            raise SpecError(
                f"{shown}: expected the same mask for every head, got another one for head {head} than for head 0; "
                "pass mask= of shape [1, heads, q_len, kv_len], or key_ranges= with an axis of kv heads"
            )
    return masks[0]


def _key(mask: Any) -> tuple[Any, ...]:
    """Returns what two masks must share to be equal. Their own equality raises for some classes."""
    parts = [_key(part) if is_splash_mask(part) else part for part in _parts(mask)]
    return type(mask).__name__, tuple(mask.shape), *parts


def _parts(mask: Any) -> tuple[Any, ...]:
    """Returns the attributes that a mask is made of."""
    match type(mask).__name__:
        case "CausalMask":
            return (mask.offset,)
        case "LocalMask":
            return tuple(mask.window_size), mask.offset
        case "ChunkedCausalMask":
            return (mask.chunk_size,)
        case "NumpyMask":
            return (np.asarray(mask.array).tobytes(),)
        case "LogicalAnd" | "LogicalOr":
            return mask.left, mask.right
    return ()


def _check_order(mask: Any, shown: str) -> None:
    """Raises SpecError for a mask of queries in another order, and for a part of a mask that is no splash mask."""
    if not is_splash_mask(mask) or type(mask).__name__ == "MultiHeadMask":
        kind = type(mask)
        raise SpecError(f"{shown}: expected masks of splash as parts, got {kind.__module__}.{kind.__qualname__}")
    order = getattr(mask, "q_sequence", None)
    if order is not None and not np.array_equal(order, np.arange(mask.shape[0])):
        raise SpecError(
            f"{shown}: expected queries in their order, got a mask with another q_sequence; pass mask_mod= with the "
            "places of the queries as aux="
        )
    for part in _parts(mask) if type(mask).__name__ in ("LogicalAnd", "LogicalOr") else ():
        _check_order(part, shown)


def _reach(mask: Any) -> Reach | None:
    """Returns the distances of a mask that is a band; None for another mask."""
    match type(mask).__name__:
        case "FullMask":
            return Reach(None, None)
        case "CausalMask":
            return Reach(None, int(mask.offset))
        case "LocalMask":
            left, right = mask.window_size
            low, high = None if left is None else mask.offset - left, None if right is None else mask.offset + right
            return Reach(None if low is None else int(low), None if high is None else int(high))
        case "LogicalAnd":
            one, other = _reach(mask.left), _reach(mask.right)
            if one is None or other is None:
                return None
            lows, highs = ([end for end in ends if end is not None] for ends in zip(one, other, strict=True))
            return Reach(max(lows, default=None), min(highs, default=None))
    return None


def _table(mask: Any, shown: str) -> np.ndarray:
    """Returns a mask pair by pair, bool ``[q_len, kv_len]``."""
    queries, keys = mask.shape
    if queries * keys > MOST_PAIRS:
        raise SpecError(
            f"{shown}: expected at most {MOST_PAIRS} pairs of a mask that is no band, got {queries} x {keys}; pass "
            "key_ranges=, which attn_core.masks builds, or mask_mod="
        )
    return np.array(mask[slice(0, queries), slice(0, keys)], bool)  # a copy, because its owner may write to it


def _options(reach: Reach, call: SplashCall) -> SplashMeaning | None:
    """Returns causal and a window that mean a band; None if key ranges are needed.

    These are needed for a band whose diagonal lies outside of it, with documents, whose own diagonals splash does not
    follow, and if another alignment would move the anchor of ALiBi slopes.
    """
    low, high = reach
    if low is not None and low <= 1 - call.q_len:
        low = None  # the last query sees the first key
    if high is not None and high >= call.kv_len - 1:
        high = None
    if low is None and high is None:
        return SplashMeaning(*call[:3])
    for alignment in _alignments(high, call):
        diagonal = call.kv_len - call.q_len if alignment == "bottom_right" else 0
        left, right = None if low is None else diagonal - low, None if high is None else high - diagonal
        if (left is None or left >= 0) and (right is None or right >= 0):
            causal = right == 0
            return SplashMeaning(causal, alignment, None if causal and left is None else (left, right))
    return None


def _alignments(high: int | None, call: SplashCall) -> tuple[str, ...]:
    """Returns the alignments that a band may be measured from, the usual one first."""
    if call.seq_info is not None:
        return ()
    if call.slopes and call.q_len != call.kv_len:
        return (call.alignment,)
    # splash counts from the first key, as "top_left" does. But more kernels have causal than a window that means it.
    ends_there = high not in (None, 0) and high == call.kv_len - call.q_len
    return ("bottom_right", "top_left") if ends_there else ("top_left", "bottom_right")


def _queries(reach: Reach, call: SplashCall) -> tuple[np.ndarray, np.ndarray]:
    """Returns the first query that sees each key of a band, and the one after the last: int64 ``[kv_len]``."""
    keys = np.arange(call.kv_len)
    starts = np.zeros_like(keys) if reach.high is None else keys - reach.high
    stops = np.full_like(keys, call.q_len) if reach.low is None else keys - reach.low + 1
    return np.clip(starts, 0, call.q_len), np.clip(stops, 0, call.q_len)
