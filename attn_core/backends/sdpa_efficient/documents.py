"""Packed documents as torch's memory-efficient kernel knows them: log-sum-exps by document, and causal made sound.

The kernel writes ``[documents, heads, longest]`` where the project has ``[heads, tokens]``; the two are gathers of each
other, by indices that come from the offsets on the device. Nothing here synchronises, and offsets that lie read
nothing outside a tensor.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Places(NamedTuple):
    """Of each token: its document, its position there (both int64 ``[tokens]``), and whether it has no key to see."""

    document: Any
    position: Any
    empty: Any


def split_at_first_key(cu_seqlens_q: Any, cu_seqlens_k: Any) -> tuple[Any, Any]:
    """Offsets of twice as many documents, int32 ``[2 * documents + 1]``: the queries without a key, then the rest.

    In a document with more queries than keys, bottom-right causal leaves the first ``queries - keys`` without a key.
    The kernel is wrong there (the distance is negative and is kept unsigned: pytorch#193632). As a document of their
    own, without keys, they trouble nobody, and what follows is a square.
    """
    import torch

    starts_q, starts_k = cu_seqlens_q[:-1], cu_seqlens_k[:-1]
    without = ((cu_seqlens_q[1:] - starts_q) - (cu_seqlens_k[1:] - starts_k)).clamp(min=0)
    # [documents, 2] -> [2 * documents]: each start, and the start of what sees a key
    queries = torch.stack((starts_q, starts_q + without), dim=1).flatten()
    keys = torch.stack((starts_k, starts_k), dim=1).flatten()
    return torch.cat((queries, cu_seqlens_q[-1:])), torch.cat((keys, cu_seqlens_k[-1:]))


def places(cu_seqlens_q: Any, cu_seqlens_k: Any, tokens: int, longest: int) -> Places:
    """Where each of ``tokens`` query tokens is, in documents of at most ``longest`` queries."""
    import torch

    at = torch.arange(tokens, device=cu_seqlens_q.device, dtype=cu_seqlens_q.dtype)  # searchsorted wants one dtype
    document = torch.searchsorted(cu_seqlens_q[1:], at, right=True).clamp(max=cu_seqlens_q.shape[0] - 2)
    position = (at - cu_seqlens_q[document]).clamp(0, longest - 1).long()
    empty = cu_seqlens_k[document + 1] == cu_seqlens_k[document]
    return Places(document, position, empty)


def by_token(raw: Any, where: Places) -> Any:
    """``[documents, heads, longest]`` -> ``[heads, tokens]``, -inf for tokens without a key."""
    import torch

    found = raw.transpose(0, 1)[:, where.document, where.position]
    return found.masked_fill(where.empty, -torch.inf)


def by_document(lse: Any, where: Places, documents: int, longest: int) -> Any:
    """``[heads, tokens]`` -> ``[documents, heads, longest]``, +inf (a weight of 0) where no token or no key is."""
    import torch

    raw = lse.new_full((documents, lse.shape[0], longest), torch.inf)
    raw[where.document, :, where.position] = lse.masked_fill(lse == -torch.inf, torch.inf).t()
    return raw
