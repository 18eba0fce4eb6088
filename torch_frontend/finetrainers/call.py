"""Runs a call of Finetrainers' ``attention_dispatch`` as calls of ``attention``: what each provider means.

Apart from dispatch.py, which runs simple calls at once. Kernels without masks run a key mask on packed visible keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from attn_core.call.seq_info import SeqInfo, check_cu_seqlens
from attn_core.dropins import finetrainers
from attn_core.dropins.finetrainers import (
    FLASH_VARLEN,
    SAGE_VARLEN,
    VARLEN,
    Attend,
    AttentionProvider,
    DispatchCall,
    HostOptions,
    Results,
    SharedRows,
    attention_with,
)
from attn_core.errors import SpecError
from attn_core.expressions import ExpressionError, trace_mask
from attn_core.expressions.tracing import TracedFunction
from torch_frontend.attention import attention
from torch_frontend.dispatch.autocast import autocast_dtype, in_autocast
from torch_frontend.dispatch.functions import function_of, is_block_mask
from torch_frontend.dispatch.plan import check_tensor

Tensor = torch.Tensor


def run_on_provider(provider: AttentionProvider, call: DispatchCall, kwargs: dict[str, Any] | None) -> Any:
    """Runs a call on a provider's kernel, or raises with every reason against it."""
    check_tensors(call)
    options = finetrainers.interpret(provider, kwargs)
    mask_mod, mask = None, call.attn_mask
    if is_block_mask(mask) and provider is AttentionProvider.FLEX:
        mask_mod, mask = read_block_mask(mask, call.query, call.key)
    elif mask is not None:
        check_tensor("attn_mask", mask)
        mask = finetrainers.with_mask_axes(provider, call.query, call.key, mask)
    call = finetrainers.with_positive_scale(call._replace(attn_mask=mask))
    attend = attention_with(attention, call, options, provider)
    if options.documents is not None:
        results = _run_documents(provider, call, options.documents, attend)
    elif call.attn_mask is not None and provider in VARLEN:
        results = _run_key_mask(provider, call, options, attend)
    else:
        results = finetrainers.run_dense(attend, call, options, mask_mod=mask_mod)
    return results if options.return_lse else results[0]


def check_mesh(mesh: Any) -> None:
    """Raises TypeError or ShapeError unless the ranks of a mesh can share a row."""
    from torch_frontend.context_parallel.mesh import group_names  # few programs have a mesh

    group_names(mesh)


def run_over_ranks(
    shared: SharedRows, provider: AttentionProvider, call: DispatchCall, kwargs: Mapping[str, Any] | None
) -> Any:
    """Returns the result of a call on this rank's consecutive part of the positions.

    Raises:
        SpecError and its subclasses: for arguments that are invalid, or that ranks cannot share.
        NoBackendError: if no backend, or not the provider's, can run a part of the call.
    """
    from torch_frontend.context_parallel.attention import context_parallel_attention

    check_tensors(call)
    options = finetrainers.interpret(provider, kwargs)
    if call.attn_mask is not None:
        raise SpecError("attn_mask: expected None with a mesh, because every rank would need another part of it")
    if options.documents is not None:
        raise SpecError(
            "attention_kwargs['cu_seqlens_q']: expected none with a mesh, because the host's ranks hold parts of every "
            "row; torch_frontend.context_parallel_attention takes seq_info= of whole rows"
        )
    if call.is_causal:
        raise SpecError(
            "is_causal=True: expected False with a mesh; the host cuts rows into consecutive parts, but its causal "
            "ring reads them in torch's head-and-tail order. torch_frontend.context_parallel_attention has layout="
        )
    call = finetrainers.with_positive_scale(call)
    over_ranks = {"mesh": shared.mesh, "strategy": shared.strategy, "layout": "contiguous"}
    rows = [tensor.transpose(1, 2) for tensor in call[:3]]  # [batch, heads, shard, dim] -> [batch, shard, heads, dim]
    out, lse = attention_with(context_parallel_attention, call, options, provider, **over_ranks)(*rows)
    out = out.transpose(1, 2)
    return (out, lse) if options.return_lse else out


def check_tensors(call: DispatchCall) -> None:
    """Raises TypeError, SpecError or one of its subclasses for query, key and value."""
    for name, tensor in zip(finetrainers.NAMES, call[:3], strict=True):
        check_tensor(name, tensor)
    finetrainers.check_operands(call, any_dtypes=autocast_dtype(call.query.device) is not None)


def _run_key_mask(provider: AttentionProvider, call: DispatchCall, options: HostOptions, attend: Attend) -> Results:
    """Runs a varlen provider's mask of keys: packs the visible keys of each row."""
    keep = finetrainers.key_mask(provider, call, options, without_copies(call.attn_mask))
    keep = keep.expand(call.key.shape[0], call.key.shape[2])  # [batch, kv_len]
    if provider is FLASH_VARLEN and not call.is_causal:
        return finetrainers.run_visible_keys(
            attend, call, keep, torch, lambda tensor, places: tensor.index_select(0, places)
        )
    # The positions of the documents depend on the mask's values, so this waits for the device.
    documents = kept_documents(keep.cpu().numpy(), call.query.shape[2], call.is_causal)
    return attend_documents(attend, call, documents, packed=provider is FLASH_VARLEN)


def _run_documents(provider: AttentionProvider, call: DispatchCall, info: SeqInfo, attend: Attend) -> Results:
    """Runs packed documents of the rows laid end to end."""
    info = finetrainers.checked_documents(
        call, info, check_tensor, lambda offsets: offsets.to(call.query.device, torch.int32)
    )
    if provider is not SAGE_VARLEN:
        return finetrainers.run_documents(attend, call, info)
    # SageAttention runs one call for each document, so their sizes must be on the host.
    offsets = [cu_seqlens.cpu().numpy() for cu_seqlens in (info.cu_seqlens_q, info.cu_seqlens_k)]
    for side, cu_seqlens, tensor in zip("qk", offsets, call[:2], strict=True):
        tokens = tensor.shape[0] * tensor.shape[2]
        check_cu_seqlens(cu_seqlens, getattr(info, f"max_len_{side}"), side=side, tokens=tokens)
    documents = offset_documents(offsets[0], offsets[1], call.is_causal)
    return attend_documents(attend, call, documents, packed=False)


def read_block_mask(mask: Any, query: Tensor, key: Tensor) -> tuple[TracedFunction | None, Tensor | None]:
    """Returns the function of flex's BlockMask as an expression; or its dense mask if it cannot become one, which takes
    q_len * kv_len elements.
    """
    from torch.nn.attention.flex_attention import create_mask

    (batch, heads, q_len, _), kv_len = query.shape, key.shape[2]
    function = function_of(mask, batch, heads, q_len, kv_len, "attn_mask")
    try:
        return trace_mask(function), None
    except ExpressionError:
        mask_batch, mask_heads = mask.shape[:2]
        return None, create_mask(function, mask_batch, mask_heads, q_len, kv_len, device=query.device)


def without_copies(mask: Tensor) -> Tensor:
    """Returns the mask with one entry for all heads, and one for all queries, if that axis was expanded."""
    if mask.dim() == 4:
        for axis in (1, 2):
            mask = mask.narrow(axis, 0, 1) if mask.shape[axis] > 1 and mask.stride(axis) == 0 else mask
    return mask


def attend_documents(attend: Attend, call: DispatchCall, documents: list[Document], packed: bool) -> Results:
    """Computes attention of documents that are known on the host. Queries in no document get 0, and -inf as lse.

    Args:
        packed: whether the kernel supports packed documents: then one call for all causal documents and one for the
            others, else a call for each.
    """
    rows = [tensor.transpose(1, 2) for tensor in in_autocast(*call[:3])]  # [batch, len, heads, head_dim]
    q, k, v = map(finetrainers.joined, rows)
    groups = [[document] for document in documents]
    if packed:
        groups = [[each for each in documents if each.causal is causal] for causal in (True, False)]
    outs, lses, places = [], [], []
    for group in filter(None, groups):
        queries = _index([document.queries for document in group], q.device)
        keys = _index([document.keys for document in group], q.device)
        parts = (q.index_select(0, queries), k.index_select(0, keys), v.index_select(0, keys))
        out, lse = _attend_group(attend, parts, group, packed)
        outs.append(out)
        lses += [] if lse is None else [lse]
        places.append(queries)
    out = q.new_zeros(*q.shape[:2], v.shape[2])
    lse = q.new_full(q.shape[1::-1], -torch.inf, dtype=torch.promote_types(q.dtype, torch.float32))
    if outs:
        where = torch.cat(places)
        out = out.index_copy(0, where, torch.cat(outs))
        lse = lse.index_copy(1, where, torch.cat(lses, dim=1)) if lses else None
    else:  # no query sees a key: connect the inputs, so that their gradients are 0 and not None
        out = out + (q[:0].sum() + k[:0].sum() + v[:0].sum())
    return finetrainers.split_rows((out, lse), rows[0])


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
