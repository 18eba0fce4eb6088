"""Runs key masks on kernels without masks by packing the visible keys (see torch_frontend.finetrainers.key_masks)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from attn_core.call.seq_info import SeqInfo

Tensor = torch.Tensor
Results = tuple[Tensor, Tensor | None]
Attend = Callable[..., Results]
"""(q, k, v, causal=, seq_info=) -> (out, lse) on the requested kernel; lse is None unless requested."""


def attend_to_kept_keys(attend: Attend, q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Results:
    """Computes attention to each row's visible keys in one packed call, without reading the mask on the host.

    A row's visible keys become a document with all of the row's queries. Its hidden keys become a document without
    queries, so that no size depends on the mask's values.

    Args:
        q: ``[batch, q_len, heads, head_dim]``; k, v: ``[batch, kv_len, kv_heads, ...]``.
        keep: bool ``[batch, kv_len]``.

    Returns:
        ``[batch, q_len, heads, value_dim]`` and the log-sum-exp ``[batch, heads, q_len]``.
    """
    batch, q_len = q.shape[:2]
    kv_len = k.shape[1]
    # Stable, so that visible keys keep their order and every run sums them alike.
    visible_first = torch.argsort(~keep, dim=1, stable=True)
    rows = torch.arange(batch, device=keep.device)[:, None] * kv_len
    order = (visible_first + rows).flatten()  # [batch * kv_len]
    visible = keep.sum(dim=1)
    lengths_k = torch.stack((visible, kv_len - visible), dim=1)
    ends_q = (torch.arange(2 * batch + 1, dtype=torch.int32, device=keep.device) + 1) // 2 * q_len
    info = SeqInfo(ends_q, _offsets(lengths_k), q_len, kv_len)
    # A kernel's last tile may reach into the next document, where 0 * NaN of padding is NaN. So hidden keys become 0.
    hidden = ~keep.flatten()[order][:, None, None]
    k, v = (tensor.flatten(0, 1).index_select(0, order).masked_fill(hidden, 0) for tensor in (k, v))
    out, lse = attend(q.flatten(0, 1), k, v, causal=False, seq_info=info)
    rows_lse = None if lse is None else lse.unflatten(1, (batch, q_len)).transpose(0, 1)
    return out.unflatten(0, (batch, q_len)), rows_lse


def _offsets(lengths: Tensor) -> Tensor:
    """Returns the int32 ``[1 + 2 * rows]`` offsets of lengths ``[rows, 2]``."""
    ends = lengths.flatten().cumsum(0, dtype=torch.int32)
    return torch.nn.functional.pad(ends, (1, 0))


def attend_documents(
    attend: Attend, q: Tensor, k: Tensor, v: Tensor, documents: list[Document], packed: bool
) -> Results:
    """Computes attention of documents that are known on the host. Queries in no document get 0, and -inf as lse.

    Args:
        q: ``[tokens, heads, head_dim]``; k and v likewise.
        packed: whether the kernel supports packed documents: then one call for all causal documents and one for the
            others, else a call for each.

    Returns:
        ``[tokens, heads, value_dim]`` and the log-sum-exp ``[heads, tokens]``.
    """
    groups = [[document] for document in documents]
    if packed:
        groups = [[each for each in documents if each.causal is causal] for causal in (True, False)]
    outs: list[Tensor] = []
    lses: list[Tensor] = []
    rows: list[Tensor] = []
    for group in filter(None, groups):
        queries = _index([document.queries for document in group], q.device)
        keys = _index([document.keys for document in group], q.device)
        parts = (q.index_select(0, queries), k.index_select(0, keys), v.index_select(0, keys))
        out, lse = _attend_group(attend, parts, group, packed)
        outs.append(out)
        lses += [] if lse is None else [lse]
        rows.append(queries)
    whole = q.new_zeros(*q.shape[:2], v.shape[2])
    unseen = q.new_full(q.shape[1::-1], -torch.inf, dtype=torch.promote_types(q.dtype, torch.float32))
    if not outs:  # no query sees a key: connect the inputs, so that their gradients are 0 and not None
        return whole + (q[:0].sum() + k[:0].sum() + v[:0].sum()), unseen
    where = torch.cat(rows)
    lse = unseen.index_copy(1, where, torch.cat(lses, dim=1)) if lses else None
    return whole.index_copy(0, where, torch.cat(outs)), lse


def _attend_group(attend: Attend, parts: tuple[Tensor, ...], group: list[Document], packed: bool) -> Results:
    causal = group[0].causal
    if not packed:
        out, lse = attend(*(part[None] for part in parts), causal=causal, seq_info=None)
        return out[0], None if lse is None else lse[0]
    info = SeqInfo.from_lengths([len(each.queries) for each in group], [len(each.keys) for each in group])
    return attend(*parts, causal=causal, seq_info=info)


def _index(positions: list[np.ndarray], device: torch.device) -> Tensor:
    return torch.from_numpy(np.concatenate(positions)).to(device)


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
