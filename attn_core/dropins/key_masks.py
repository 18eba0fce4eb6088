"""Expresses masks of keys as packed documents without the masked keys, for kernels that have no masks.

A document has only visible keys. A causal document has as many keys as queries, so kernels may align either way.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Document(NamedTuple):
    """Queries that see the same keys, as ascending positions among all rows laid end to end.

    causal: query i of the document sees its keys 0 to i; it has as many keys as queries.
    """

    queries: np.ndarray
    keys: np.ndarray
    causal: bool = False


def kept_documents(keep: np.ndarray, q_len: int, causal: bool) -> list[Document]:
    """Returns the documents of a padded batch. Queries that see no key are in none.

    Args:
        keep: bool ``[batch, kv_len]``: the visible keys.
        causal: query i sees the visible ones of keys 0 to i of its row (top-left alignment).
    """
    documents: list[Document] = []
    for row, visible in enumerate(keep):
        queries, keys = row * q_len + np.arange(q_len), row * len(visible) + np.flatnonzero(visible)
        if causal:
            documents += _causal_row(visible, queries, keys, row * len(visible))
        elif q_len and len(keys):
            documents.append(Document(queries, keys))
    return documents


def _causal_row(visible: np.ndarray, queries: np.ndarray, keys: np.ndarray, start: int) -> list[Document]:
    """Returns the documents of a causal row.

    The queries whose own key is visible form a causal square. Every other query sees all visible keys before it;
    queries that see the same keys share a document.
    """
    square = min(len(queries), len(visible))
    sees_itself = np.zeros(len(queries), bool)  # whether the query's own key is visible
    sees_itself[:square] = visible[:square]
    seen = np.searchsorted(keys - start, np.arange(len(queries)), side="right")  # visible keys among 0 to i
    documents = []
    if sees_itself.any():
        documents.append(Document(queries[sees_itself], keys[: sees_itself.sum()], causal=True))
    for count in np.unique(seen[~sees_itself]):
        # Queries with no visible key before them are in no document, so their output is 0.
        if count:
            documents.append(Document(queries[~sees_itself & (seen == count)], keys[:count]))
    return documents


def offset_documents(queries: np.ndarray, keys: np.ndarray, causal: bool) -> list[Document]:
    """Returns the documents of ``cu_seqlens_q`` and ``cu_seqlens_k`` that have both queries and keys."""
    spans = zip(queries[:-1], queries[1:], keys[:-1], keys[1:], strict=True)
    return [
        Document(np.arange(first, last), np.arange(left, right), causal)
        for first, last, left, right in spans
        if last > first and right > left
    ]
