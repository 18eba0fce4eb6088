"""Packed documents for torch's memory-efficient kernel: its layout of the log-sum-exp, and a fix for causal documents.

The kernel writes the log-sum-exp as ``[documents, heads, longest]``, we use ``[heads, tokens]``. Indices computed from
the offsets on the device convert between the two. No function synchronises, and wrong offsets never read outside a
tensor.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class QueryTokens(NamedTuple):
    """Each token's document and position in it (int64 ``[tokens]``), and whether the document has no key."""

    document: Any
    position: Any
    empty: Any


def split_at_first_key(cu_seqlens_q: Any, cu_seqlens_k: Any) -> tuple[Any, Any]:
    """Splits each document in two: the queries without a key, then the rest. Returns two int32 ``[2 * documents + 1]``.

    In a document with more queries than keys, bottom-right causal leaves the first ``queries - keys`` without a key.
    The kernel is wrong there (it stores the negative distance unsigned: pytorch#193632). Split into a separate document
    without keys they are harmless, and the remaining document has as many queries as keys.
    """
    import torch

    starts_q, starts_k = cu_seqlens_q[:-1], cu_seqlens_k[:-1]
    without = ((cu_seqlens_q[1:] - starts_q) - (cu_seqlens_k[1:] - starts_k)).clamp(min=0)
    # [documents, 2] -> [2 * documents]: each document's start, and the start of its queries that see a key
    queries = torch.stack((starts_q, starts_q + without), dim=1).flatten()
    keys = torch.stack((starts_k, starts_k), dim=1).flatten()
    return torch.cat((queries, cu_seqlens_q[-1:])), torch.cat((keys, cu_seqlens_k[-1:]))


def places(cu_seqlens_q: Any, cu_seqlens_k: Any, tokens: int, longest: int) -> QueryTokens:
    """Locates ``tokens`` query tokens in documents of at most ``longest`` queries."""
    import torch

    at = torch.arange(tokens, device=cu_seqlens_q.device, dtype=cu_seqlens_q.dtype)  # searchsorted needs equal dtypes
    # Clamps keep every index valid even if the offsets are wrong.
    document = torch.searchsorted(cu_seqlens_q[1:], at, right=True).clamp(max=cu_seqlens_q.shape[0] - 2)
    position = (at - cu_seqlens_q[document]).clamp(0, longest - 1).long()
    empty = cu_seqlens_k[document + 1] == cu_seqlens_k[document]
    return QueryTokens(document, position, empty)


def by_token(raw: Any, where: QueryTokens) -> Any:
    """``[documents, heads, longest]`` -> ``[heads, tokens]``, -inf for tokens without a key."""
    import torch

    lse = raw.transpose(0, 1)[:, where.document, where.position]
    return lse.masked_fill(where.empty, -torch.inf)


def by_document(lse: Any, where: QueryTokens, documents: int, longest: int) -> Any:
    """``[heads, tokens]`` -> ``[documents, heads, longest]``, +inf (a weight of 0) for padding and rows with no key."""
    import torch

    raw = lse.new_full((documents, lse.shape[0], longest), torch.inf)
    raw[where.document, :, where.position] = lse.masked_fill(lse == -torch.inf, torch.inf).t()
    return raw
