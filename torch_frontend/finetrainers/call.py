"""Runs a call of Finetrainers' ``attention_dispatch`` as calls of ``attention``; see dispatch.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from attn_core.call.seq_info import SeqInfo, check_cu_seqlens
from attn_core.dropins.finetrainers import FLASH_VARLEN, KERNELS, SAGE_VARLEN, VARLEN, AttentionProvider
from attn_core.dropins.finetrainers_kwargs import Words, interpret
from attn_core.dropins.key_masks import kept_documents, offset_documents
from attn_core.errors import DTypeError, ShapeError, SpecError
from attn_core.selection import override
from torch_frontend.attention import attention
from torch_frontend.dispatch.autocast import autocast_dtype, in_autocast
from torch_frontend.dispatch.plan import check_tensor, smaller
from torch_frontend.finetrainers.key_masks import attend_documents, attend_to_kept_keys
from torch_frontend.finetrainers.masks import key_mask, mask_tensor

Tensor = torch.Tensor
Results = tuple[Tensor, Tensor | None]
"""The output and, if requested, the log-sum-exp."""


class DispatchCall(NamedTuple):
    """The arguments that torch's own function also has."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Any
    dropout_p: float
    is_causal: bool
    scale: float | None
    enable_gqa: bool


def run_on_provider(provider: AttentionProvider, call: DispatchCall, kwargs: dict[str, Any] | None) -> Any:
    """Runs a call on a provider's kernel, or raises with every reason against it."""
    _check_together(call)
    check_heads(call)
    options = interpret(provider, kwargs)
    call = normalise(call._replace(attn_mask=mask_tensor(provider, call.query, call.key, call.attn_mask)))
    names = override.requested() or KERNELS[provider] or None
    if options.documents is not None:
        results = _run_documents(provider, call, options, options.documents, names)
    elif call.attn_mask is not None and provider in VARLEN:
        results = _run_key_mask(provider, call, options, names)
    else:
        results = run_dense(call, options, names)
    return results if options.return_lse else results[0]


def run_dense(call: DispatchCall, options: Words, backend: tuple[str, ...] | None) -> Results:
    """Runs rows without documents: ``[batch, heads, q_len, value_dim]``, or fewer axes as in query."""
    query, key, value, mask, dropout, causal, scale, _ = call
    anchored = options.window is not None or options.alibi_slopes is not None
    q_len, kv_len = query.shape[-2], key.shape[-2]
    if causal and torch.compiler.is_compiling():  # no comparison of symbols; attention_kwargs are not compiled
        key, value, mask = _cut_keys(smaller(q_len, kv_len), key, value, mask)
    elif causal and q_len != kv_len:
        if anchored:
            raise SpecError(
                f"is_causal with window_size or alibi_slopes, q_len {q_len} and kv_len {kv_len}: expected equal "
                "lengths; is_causal counts from the first key, flash-attn's window_size and alibi_slopes from the last"
            )
        if kv_len > q_len:
            key, value, mask = _cut_keys(q_len, key, value, mask)
    missing = 4 - query.dim()
    if missing:  # axes of 1 in front
        query, key, value = (tensor[(None,) * missing] for tensor in (query, key, value))
    added = mask is not None and mask.dtype != torch.bool
    results = attention(
        query.transpose(1, 2),  # [batch, heads, len, head_dim] -> [batch, len, heads, head_dim]
        key.transpose(1, 2),
        value.transpose(1, 2),
        causal=causal,
        alignment="bottom_right" if anchored else "top_left",
        window=options.window,
        softcap=options.softcap,
        scale=scale,
        mask=None if added else mask,
        bias=mask if added else None,
        alibi_slopes=options.alibi_slopes,
        dropout=dropout,
        deterministic=options.deterministic,
        backend=backend,
        return_lse=options.return_lse,
    )
    out, lse = results if options.return_lse else (results, None)
    out = out.transpose(1, 2)
    return out[(0,) * missing] if missing else out, lse


def _cut_keys(length: int, key: Tensor, value: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Cuts off the keys that no query of a causal call sees, so that both alignments of the kernels agree."""
    if mask is not None and mask.dim() and mask.shape[-1] == key.shape[-2]:
        mask = mask[..., :length]
    return key[..., :length, :], value[..., :length, :], mask


def _run_key_mask(
    provider: AttentionProvider, call: DispatchCall, options: Words, names: tuple[str, ...] | None
) -> Results:
    """Runs a varlen provider's mask of keys: packs the visible keys of each row."""
    if options.window is not None or options.alibi_slopes is not None:
        raise SpecError(
            f"attn_mask with window_size or alibi_slopes: provider {provider.value} packs the visible keys, "
            "which changes the distances between them; use another provider"
        )
    keep = key_mask(provider, call.key, call.attn_mask)
    q, k, v = (tensor.transpose(1, 2) for tensor in call[:3])  # [batch, len, heads, head_dim]
    attend = _attention_with(call, options, names)
    if provider is FLASH_VARLEN and not call.is_causal:
        out, lse = attend_to_kept_keys(attend, q, k, v, keep)
        return out.transpose(1, 2), lse
    documents = kept_documents(keep.cpu().numpy(), q.shape[1], call.is_causal)
    results = attend_documents(attend, *_join_rows(q, k, v), documents, packed=provider is FLASH_VARLEN)
    return _split_rows(results, q)


def _run_documents(
    provider: AttentionProvider, call: DispatchCall, options: Words, info: SeqInfo, names: tuple[str, ...] | None
) -> Results:
    """Runs packed documents of the rows laid end to end; causal and windows align at each document's last key."""
    if call.attn_mask is not None:
        raise SpecError("attn_mask with cu_seqlens_q and cu_seqlens_k: both define what is visible; pass one")
    for side, offsets_of_side in (("q", info.cu_seqlens_q), ("k", info.cu_seqlens_k)):
        check_tensor(f"attention_kwargs['cu_seqlens_{side}']", offsets_of_side)
    q, k, v = (tensor.transpose(1, 2) for tensor in call[:3])  # [batch, len, heads, head_dim]
    queries = info.cu_seqlens_q.to(q.device, torch.int32)
    keys = queries if info.cu_seqlens_k is info.cu_seqlens_q else info.cu_seqlens_k.to(q.device, torch.int32)
    attend, rows = _attention_with(call, options, names), _join_rows(q, k, v)
    if provider is not SAGE_VARLEN:
        info = SeqInfo(queries, keys, info.max_len_q, info.max_len_k)
        return _split_rows(attend(*rows, causal=call.is_causal, seq_info=info), q)
    offsets = [cu_seqlens.cpu().numpy() for cu_seqlens in (queries, keys)]
    for side, cu_seqlens, part in zip("qk", offsets, rows[:2], strict=True):
        check_cu_seqlens(cu_seqlens, getattr(info, f"max_len_{side}"), side=side, tokens=len(part))
    documents = offset_documents(offsets[0], offsets[1], call.is_causal)
    return _split_rows(attend_documents(attend, *rows, documents, packed=False), q)


def _attention_with(call: DispatchCall, options: Words, names: tuple[str, ...] | None) -> Callable[..., Results]:
    """Returns ``attention`` with the call's options: (q, k, v, causal=, seq_info=) -> (out, lse or None)."""

    def attend(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, seq_info: SeqInfo | None) -> Results:
        results = attention(
            q,
            k,
            v,
            causal=causal,
            window=options.window,
            softcap=options.softcap,
            scale=call.scale,
            alibi_slopes=options.alibi_slopes,
            seq_info=seq_info,
            dropout=call.dropout_p,
            deterministic=options.deterministic,
            backend=names,
            return_lse=options.return_lse,
        )
        return results if options.return_lse else (results, None)

    return attend


def _join_rows(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Lays the rows of the batch end to end."""
    return q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)  # [batch * len, heads, head_dim]


def _split_rows(results: Results, q: Tensor) -> Results:
    """Reshapes ``[batch * q_len, heads, dim]`` to ``[batch, heads, q_len, dim]``; the log-sum-exp has no dim."""
    (out, lse), rows = results, tuple(q.shape[:2])
    return out.unflatten(0, rows).transpose(1, 2), None if lse is None else lse.unflatten(1, rows).transpose(0, 1)


def normalise(call: DispatchCall) -> DispatchCall:
    """Returns an equivalent call that ``attention`` accepts: in autocast's dtype, and with a scale above 0.

    Under autocast, torch's own function casts every floating tensor except float64, and so does this.
    """
    if isinstance(call.scale, (int, float)) and call.scale <= 0:
        call = call._replace(query=call.query * (-1 if call.scale else 0), scale=-call.scale or 1.0)
    query, key, value, mask = in_autocast(*call[:4])
    return call._replace(query=query, key=key, value=value, attn_mask=mask)


def check_heads(call: DispatchCall) -> None:
    """Raises SpecError for grouped heads without ``enable_gqa``; a single kv head broadcasts to all heads."""
    if call.enable_gqa or call.query.dim() < 3:
        return
    heads, kv_heads = call.query.shape[-3], call.key.shape[-3]
    if kv_heads not in (1, heads):
        raise SpecError(
            f"enable_gqa={call.enable_gqa} with {heads} heads of query and {kv_heads} of key: pass enable_gqa=True"
        )


def _check_together(call: DispatchCall) -> None:
    """Checks query, key and value against each other; errors name them as the host does."""
    query, key, value = call[:3]
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        check_tensor(name, tensor)
        if tensor.dim() != 4:
            raise ShapeError(f"{name}: expected [batch, heads, len, head_dim], got {list(tensor.shape)}")
        if tensor.shape[0] != query.shape[0]:
            raise ShapeError(f"{name}: expected the batch of query ({query.shape[0]}), got {tensor.shape[0]}")
        if tensor.dtype != query.dtype and autocast_dtype(query.device) is None:
            raise DTypeError(f"{name}: expected the dtype of query ({query.dtype}), got {tensor.dtype}; cast it")
    if key.shape[3] != query.shape[3]:
        raise ShapeError(f"key: expected the head_dim of query ({query.shape[3]}), got {key.shape[3]}")
    if value.shape[1:3] != key.shape[1:3]:
        expected, got = list(key.shape[1:3]), list(value.shape[1:3])
        raise ShapeError(f"value: expected the heads and length of key {expected}, got {got}")
