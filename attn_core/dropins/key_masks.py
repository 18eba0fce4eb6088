"""Masks of keys as packed documents: which queries meet which keys, once the keys that a mask drops are gone.

A kernel without masks gives the right result on these documents: no query of a document sees a key that was dropped,
and causal documents are squares, so that no kernel's alignment matters.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Document(NamedTuple):
    """Queries that meet the same keys: ascending positions among all rows laid end to end; causal: one key a query."""

    queries: np.ndarray
    keys: np.ndarray
    causal: bool = False


def kept_documents(keep: np.ndarray, q_len: int, causal: bool) -> list[Document]:
    """The documents of a padded batch; queries that see nothing are in none.

    Args:
        keep: bool ``[batch, kv_len]``: which keys may be seen.
        causal: query i sees keys 0 to i of its row, of those that are kept (top-left alignment).
    """
    found: list[Document] = []
    for row, kept in enumerate(keep):
        queries, keys = row * q_len + np.arange(q_len), row * len(kept) + np.flatnonzero(kept)
        if causal:
            found += _causal_row(kept, queries, keys, row * len(kept))
        elif q_len and len(keys):
            found.append(Document(queries, keys))
    return found


def _causal_row(kept: np.ndarray, queries: np.ndarray, keys: np.ndarray, start: int) -> list[Document]:
    """Queries whose own key is kept are a square; each other query sees the kept keys before it, all of them."""
    square = min(len(queries), len(kept))
    own = np.zeros(len(queries), bool)
    own[:square] = kept[:square]
    seen = np.searchsorted(keys - start, np.arange(len(queries)), side="right")  # how many kept keys are at 0 to i
    found = [Document(queries[own], keys[: own.sum()], causal=True)] if own.any() else []
    for count in np.unique(seen[~own]):
        if count:
            found.append(Document(queries[~own & (seen == count)], keys[:count]))
    return found


def offset_documents(queries: np.ndarray, keys: np.ndarray, causal: bool) -> list[Document]:
    """The documents of ``cu_seqlens_q`` and ``cu_seqlens_k``, without those that have no queries or no keys."""
    spans = zip(queries[:-1], queries[1:], keys[:-1], keys[1:], strict=True)
    return [
        Document(np.arange(first, last), np.arange(left, right), causal)
        for first, last, left, right in spans
        if last > first and right > left
    ]
