"""Checks the scales of quantised pages: their shapes and dtypes, and their values if these are on the host."""

from __future__ import annotations

from typing import Any

import numpy as np

from attn_core.call.arguments import ArrayFacts
from attn_core.call.pages import BITS
from attn_core.call.spec import DTYPES
from attn_core.errors import DTypeError, ShapeError, SpecError

STORED = {"float8_e4m3fn": "float8_e4m3fn", "int8": "int8", "uint8": "int4"}
"""The dtypes of quantised pages by the dtypes of their arrays."""
ROW_DTYPES = tuple(dtype for dtype in DTYPES if dtype != "float64")
"""The dtypes of queries and of new keys and values beside quantised pages."""


def page_dtype(pool: ArrayFacts) -> str | None:
    """Returns how a pool is quantised; None for a pool of floats."""
    return STORED.get(pool.dtype)


def channels(pool: ArrayFacts) -> int:
    """Returns the channels of a token and head; an int4 pool has two in a byte."""
    return pool.shape[3] * 8 // BITS[page_dtype(pool) or "int8"]


def check_pool_dtype(name: str, pool: ArrayFacts) -> None:
    """Raises DTypeError for a pool of a dtype that no pool has."""
    if pool.dtype not in DTYPES and pool.dtype not in STORED:
        expected = f"{', '.join(DTYPES)}, float8_e4m3fn, int8 or uint8 (two int4 numbers a byte)"
        raise DTypeError(f"{name}: expected one of {expected}, got {pool.dtype}")


def check_beside_pool(name: str, facts: ArrayFacts, pool_name: str, pool: ArrayFacts) -> None:
    """Raises DTypeError unless queries, or new keys or values, go together with a pool."""
    if page_dtype(pool) is None:
        if facts.dtype != pool.dtype:
            raise DTypeError(f"{name}: expected the dtype of {pool_name}, {pool.dtype}, got {facts.dtype}; cast it")
    elif facts.dtype not in ROW_DTYPES:
        where = f"beside quantised pages ({page_dtype(pool)})"
        raise DTypeError(f"{name}: expected one of {', '.join(ROW_DTYPES)} {where}, got {facts.dtype}; cast it")


def scales_kind(pool: ArrayFacts, scales: dict[str, ArrayFacts | None]) -> str | None:
    """Returns whether a pool has scales by "page" or by "token"; None for a pool of floats.

    Args:
        scales: k_scales and v_scales, by their names.

    Raises:
        SpecError, ShapeError, DTypeError: naming the scales.
    """
    dtype = page_dtype(pool)
    num_pages, page_size, kv_heads = pool.shape[:3]
    shapes = {(num_pages, kv_heads): "page", (num_pages, page_size, kv_heads): "token"}
    kinds = []
    for name, facts in scales.items():
        if dtype is None:
            if facts is not None:
                raise SpecError(f"{name}: expected None, because pages in {pool.dtype} have no scales")
            continue
        expected = f"{[num_pages, kv_heads]} for scales by page, or {[num_pages, page_size, kv_heads]} by token"
        if facts is None:
            raise SpecError(f"{name}: expected the scales of pages in {dtype}, float32 of shape {expected}, got None")
        if facts.dtype != "float32":
            raise DTypeError(f"{name}: expected dtype float32, got {facts.dtype}; cast it")
        if facts.shape not in shapes:
            raise ShapeError(f"{name}: expected shape {expected}, got {list(facts.shape)}")
        kinds.append(shapes[facts.shape])
    if len(set(kinds)) > 1:
        raise ShapeError(f"v_scales: expected scales by {kinds[0]} as k_scales, got scales by {kinds[1]}")
    return kinds[0] if kinds else None


def check_used_scales(scales: dict[str, Any], slots: np.ndarray, page_size: int) -> None:
    """Checks the scales that a call reads or stores by, on the host, after its tables have been checked.

    Args:
        scales: k_scales and v_scales as numpy arrays, by their names. slots: that have these scales.

    Raises:
        SpecError: naming the first scale that is zero, negative, infinite or NaN.
    """
    for name, array in scales.items():
        by_page = array.ndim == 2
        rows = np.unique(slots // page_size) if by_page else slots
        used = (array if by_page else array.reshape(-1, array.shape[2]))[rows]  # [rows, kv_heads]
        wrong = ~((used > 0) & np.isfinite(used))
        if wrong.any():
            row, head = (int(index) for index in np.argwhere(wrong)[0])
            at = int(rows[row])
            place = f"{at}, {head}" if by_page else f"{at // page_size}, {at % page_size}, {head}"
            raise SpecError(
                f"{name}[{place}]={float(used[row, head])!r}: expected a positive, finite scale; append_kv writes NaN "
                "for a token with NaN or Inf"
            )
