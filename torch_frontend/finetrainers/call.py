"""Runs a call of Finetrainers' ``attention_dispatch`` as calls of ``attention``; see dispatch.py."""

from __future__ import annotations

from typing import Any

import torch

from attn_core.call.offset_checks import check_cu_seqlens
from attn_core.call.seq_info import SeqInfo
from attn_core.dropins.finetrainers import FLASH_VARLEN, KERNELS, SAGE_VARLEN, VARLEN, AttentionProvider
from attn_core.dropins.finetrainers_call import (
    DispatchCall,
    HostOptions,
    attention_with,
    check_alignment,
    check_arrays,
    check_heads,
    check_unmasked,
    cut_keys,
    interpret,
    key_mask,
    with_mask_axes,
    with_positive_scale,
)
from attn_core.expressions import ExpressionError, trace_mask
from attn_core.expressions.tracing import TracedFunction
from attn_core.selection import override
from torch_frontend.attention import attention
from torch_frontend.dispatch.autocast import autocast_dtype, in_autocast
from torch_frontend.dispatch.block_masks import function_of, is_block_mask
from torch_frontend.dispatch.plan import check_tensor, smaller
from torch_frontend.finetrainers.key_masks import (
    attend_documents,
    attend_to_kept_keys,
    kept_documents,
    offset_documents,
)

Tensor = torch.Tensor
Results = tuple[Tensor, Tensor | None]
"""The output and, if requested, the log-sum-exp."""


def run_on_provider(provider: AttentionProvider, call: DispatchCall, kwargs: dict[str, Any] | None) -> Any:
    """Runs a call on a provider's kernel, or raises with every reason against it."""
    for name, tensor in (("query", call.query), ("key", call.key), ("value", call.value)):
        check_tensor(name, tensor)
    check_arrays(call, any_dtypes=autocast_dtype(call.query.device) is not None)
    check_heads(call)
    options = interpret(provider, kwargs)
    mask_mod = mask_function(provider, call.query, call.key, call.attn_mask)
    mask = None if mask_mod is not None else mask_tensor(provider, call.query, call.key, call.attn_mask)
    call = normalise(call._replace(attn_mask=mask))
    names = override.requested() or KERNELS[provider] or None
    if options.documents is not None:
        results = _run_documents(provider, call, options, options.documents, names)
    elif call.attn_mask is not None and provider in VARLEN:
        results = _run_key_mask(provider, call, options, names)
    else:
        results = run_dense(call, options, names, mask_mod)
    return results if options.return_lse else results[0]


def run_dense(
    call: DispatchCall, options: HostOptions, backend: tuple[str, ...] | None, mask_mod: TracedFunction | None = None
) -> Results:
    """Runs rows without documents: ``[batch, heads, q_len, value_dim]``, or fewer axes as in query."""
    query, key, value, mask, causal = *call[:4], call.is_causal
    q_len, kv_len = query.shape[-2], key.shape[-2]
    if causal and torch.compiler.is_compiling():  # no comparison of symbols; attention_kwargs are not compiled
        key, value, mask = cut_keys(smaller(q_len, kv_len), key, value, mask)
    elif causal and q_len != kv_len:
        check_alignment(options, q_len, kv_len)
        # No query sees a key behind its own place, so kernels need not be able to align top left.
        if kv_len > q_len:
            key, value, mask = cut_keys(q_len, key, value, mask)
    missing = 4 - query.dim()
    if missing:  # axes of 1 in front
        query, key, value = (tensor[(None,) * missing] for tensor in (query, key, value))
    added = mask is not None and mask.dtype != torch.bool
    out, lse = attention_with(attention, call, options, backend)(
        query.transpose(1, 2),  # [batch, heads, len, head_dim] -> [batch, len, heads, head_dim]
        key.transpose(1, 2),
        value.transpose(1, 2),
        causal=causal,
        alignment="bottom_right" if options.anchored else "top_left",
        mask=None if added else mask,
        mask_mod=mask_mod,
        bias=mask if added else None,
    )
    out = out.transpose(1, 2)
    return out[(0,) * missing] if missing else out, lse


def _run_key_mask(
    provider: AttentionProvider, call: DispatchCall, options: HostOptions, names: tuple[str, ...] | None
) -> Results:
    """Runs a varlen provider's mask of keys: packs the visible keys of each row."""
    keep = key_mask(provider, call, options, without_copies(call.attn_mask))
    keep = keep.expand(call.key.shape[0], call.key.shape[2])  # [batch, kv_len]
    q, k, v = (tensor.transpose(1, 2) for tensor in call[:3])  # [batch, len, heads, head_dim]
    attend = attention_with(attention, call, options, names)
    if provider is FLASH_VARLEN and not call.is_causal:
        out, lse = attend_to_kept_keys(attend, q, k, v, keep)
        return out.transpose(1, 2), lse
    # The positions of the documents depend on the mask's values, so this waits for the device.
    documents = kept_documents(keep.cpu().numpy(), q.shape[1], call.is_causal)
    results = attend_documents(attend, *_join_rows(q, k, v), documents, packed=provider is FLASH_VARLEN)
    return _split_rows(results, q)


def _run_documents(
    provider: AttentionProvider, call: DispatchCall, options: HostOptions, info: SeqInfo, names: tuple[str, ...] | None
) -> Results:
    """Runs packed documents of the rows laid end to end; causal and windows align at each document's last key."""
    check_unmasked(call)
    for side, offsets_of_side in (("q", info.cu_seqlens_q), ("k", info.cu_seqlens_k)):
        check_tensor(f"attention_kwargs['cu_seqlens_{side}']", offsets_of_side)
    q, k, v = (tensor.transpose(1, 2) for tensor in call[:3])  # [batch, len, heads, head_dim]
    queries = info.cu_seqlens_q.to(q.device, torch.int32)
    keys = queries if info.cu_seqlens_k is info.cu_seqlens_q else info.cu_seqlens_k.to(q.device, torch.int32)
    attend, rows = attention_with(attention, call, options, names), _join_rows(q, k, v)
    if provider is not SAGE_VARLEN:
        info = SeqInfo(queries, keys, info.max_len_q, info.max_len_k)
        return _split_rows(attend(*rows, causal=call.is_causal, seq_info=info), q)
    # SageAttention runs one call for each document, so their sizes must be on the host.
    offsets = [cu_seqlens.cpu().numpy() for cu_seqlens in (queries, keys)]
    for side, cu_seqlens, part in zip("qk", offsets, rows[:2], strict=True):
        check_cu_seqlens(cu_seqlens, getattr(info, f"max_len_{side}"), side=side, tokens=len(part))
    documents = offset_documents(offsets[0], offsets[1], call.is_causal)
    return _split_rows(attend_documents(attend, *rows, documents, packed=False), q)


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
    call = with_positive_scale(call)
    query, key, value, mask = in_autocast(*call[:4])
    return call._replace(query=query, key=key, value=value, attn_mask=mask)


def mask_tensor(provider: AttentionProvider, query: Tensor, key: Tensor, mask: Any) -> Tensor | None:
    """Returns the mask as a tensor: flex's BlockMask as a dense mask, a key mask of two axes with four axes.

    A BlockMask becomes a dense mask only if ``mask_function`` cannot read it.

    Raises:
        DTypeError, ShapeError: for an invalid mask, or one whose two axes are ambiguous.
    """
    if mask is None:
        return None
    if is_block_mask(mask) and provider is AttentionProvider.FLEX:
        return _dense_block_mask(mask, query, key)
    check_tensor("attn_mask", mask)
    return with_mask_axes(provider, query, key, mask)  # type: ignore[no-any-return]


def mask_function(provider: AttentionProvider, query: Tensor, key: Tensor, mask: Any) -> TracedFunction | None:
    """Returns the function of flex's BlockMask as an expression.

    None for other masks and providers, under torch.compile, and for a function that cannot become one.
    """
    if not is_block_mask(mask) or provider is not AttentionProvider.FLEX or torch.compiler.is_compiling():
        return None
    (batch, heads, q_len, _), kv_len = query.shape, key.shape[2]
    try:
        return trace_mask(function_of(mask, batch, heads, q_len, kv_len, "attn_mask"))
    except ExpressionError:
        return None


def _dense_block_mask(mask: Any, query: Tensor, key: Tensor) -> Tensor:
    """Builds a BlockMask's dense mask by its mask function; takes q_len * kv_len elements."""
    from torch.nn.attention.flex_attention import create_mask

    (batch, heads, q_len, _), kv_len = query.shape, key.shape[2]
    function = function_of(mask, batch, heads, q_len, kv_len, "attn_mask")
    mask_batch, mask_heads = mask.shape[:2]
    return create_mask(function, mask_batch, mask_heads, q_len, kv_len, device=query.device)


def without_copies(mask: Tensor) -> Tensor:
    """Returns the mask with one entry for all heads, and one for all queries, if that axis was expanded."""
    if mask.dim() == 4:
        for axis in (1, 2):
            mask = mask.narrow(axis, 0, 1) if mask.shape[axis] > 1 and mask.stride(axis) == 0 else mask
    return mask
