"""Checks of the offsets of packed documents whose values are on the host."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from attn_core.errors import ShapeError, SpecError

FEW_OFFSETS = 128
"""Up to this many offsets are checked as Python's ints, because each of numpy's functions takes a microsecond."""


def check_cu_seqlens(cu_seqlens: np.ndarray, max_len: int, *, side: str, tokens: int | None = None) -> None:
    """Checks offsets whose values are on the host, against the token count when it is known.

    Raises:
        ShapeError, SpecError: naming the first thing wrong with ``cu_seqlens_q`` or ``cu_seqlens_k``.
    """
    name = f"seq_info.cu_seqlens_{side}"
    if cu_seqlens.ndim != 1 or len(cu_seqlens) < 2:
        raise ShapeError(
            f"{name}: expected shape [documents + 1] with at least one document, got {list(cu_seqlens.shape)}"
        )
    if len(cu_seqlens) <= FEW_OFFSETS and _are_valid(cu_seqlens.tolist(), max_len, tokens):
        return
    if cu_seqlens[0] != 0:
        raise SpecError(f"{name}: expected to start at 0, got {int(cu_seqlens[0])}; prepend the zero")
    # In int64, because the difference of two int32 offsets may wrap, and a decrease then looks like growth.
    lengths = np.diff(cu_seqlens.astype(np.int64))
    if (lengths < 0).any():
        at = int(np.argmax(lengths < 0))
        raise SpecError(
            f"{name}: expected non-decreasing offsets, got {int(cu_seqlens[at])} then {int(cu_seqlens[at + 1])} "
            f"at position {at + 1}; pass cumulative lengths, not lengths"
        )
    if tokens is not None and cu_seqlens[-1] > tokens:
        raise SpecError(
            f"{name}: expected to end at the token count {tokens} or before it, got {int(cu_seqlens[-1])}; "
            f"{_why_too_many(lengths, tokens)}"
        )
    if lengths.max(initial=0) > max_len:
        raise SpecError(
            f"seq_info.max_len_{side}={max_len}: expected at least the longest document, {int(lengths.max())} tokens"
        )


def _why_too_many(lengths: np.ndarray, tokens: int) -> str:
    """Returns what may be wrong with documents that have more tokens than their row."""
    if len(lengths) > 1 and lengths[0] == 0 and lengths[-1] <= tokens and (np.diff(lengths) >= 0).all():
        return "the lengths start with 0 and never decrease, so they look like offsets: pass np.diff of them"
    return "the row may be longer than its documents (padding at the end), but not shorter"


def _are_valid(ends: list[int], max_len: int, tokens: int | None) -> bool:
    """Returns whether offsets are valid."""
    fits = tokens is None or ends[-1] <= tokens
    lengths = [stop - start for start, stop in pairwise(ends)]
    return ends[0] == 0 and fits and min(lengths) >= 0 and max(lengths) <= max_len
