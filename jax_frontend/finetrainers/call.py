"""One call of Finetrainers' ``attention_dispatch`` as calls of ``attention``; see dispatch.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attn_core.call.seq_info import SeqInfo, check_cu_seqlens
from attn_core.dropins.finetrainers import FLASH_VARLEN, KERNELS, NATIVE, SAGE_VARLEN, VARLEN, AttentionProvider
from attn_core.dropins.finetrainers_kwargs import Words, interpret
from attn_core.dropins.key_masks import kept_documents, offset_documents
from attn_core.errors import DTypeError, ShapeError, SpecError
from attn_core.selection import override
from jax_frontend.attention import attention
from jax_frontend.dispatch.plan import check_array
from jax_frontend.finetrainers.key_masks import attend_documents, attend_left
from jax_frontend.finetrainers.masks import kept_keys, stated_mask

Array = jax.Array
Found = tuple[Array, Array | None]
"""The output and, where it was asked for, the log-sum-exp."""


class Call(NamedTuple):
    """The arguments that torch's own function has, too; and the key that dropout needs in JAX."""

    query: Array
    key: Array
    value: Array
    attn_mask: Any
    dropout_p: float
    is_causal: bool
    scale: float | None
    enable_gqa: bool
    dropout_rng: Array | None


def on_provider(provider: AttentionProvider, call: Call, given: dict[str, Any] | None) -> Any:
    """The call on a provider's kernel, or every reason why not."""
    _check_together(call, (2, 3, 4) if provider is NATIVE and not given else (4,))
    check_heads(call)
    words = interpret(provider, given)
    call = rephrased(call._replace(attn_mask=stated_mask(provider, call.query, call.key, call.attn_mask)))
    names = override.requested() or KERNELS[provider] or None
    if words.documents is not None:
        found = _on_documents(provider, call, words, words.documents, names)
    elif call.attn_mask is not None and provider in VARLEN:
        found = _on_kept_keys(provider, call, words, names)
    else:
        found = dense(call, words, names)
    return found if words.return_lse else found[0]


def dense(call: Call, words: Words, backend: tuple[str, ...] | None) -> Found:
    """Rows without documents: ``[batch, heads, q_len, value_dim]``, or fewer axes like query."""
    query, key, value, mask = call[:4]
    anchored = words.window is not None or words.alibi_slopes is not None
    q_len, kv_len = query.shape[-2], key.shape[-2]
    if call.is_causal and q_len != kv_len:
        if anchored:
            raise SpecError(
                f"is_causal with window_size or alibi_slopes, q_len {q_len} and kv_len {kv_len}: expected equal "
                "lengths; is_causal counts from the first key, flash-attn's window_size and alibi_slopes from the last"
            )
        if kv_len > q_len:  # nobody sees the keys behind; without them every kernel's alignment is the same
            key, value = key[..., :q_len, :], value[..., :q_len, :]
            mask = mask[..., :q_len] if mask is not None and mask.ndim and mask.shape[-1] == kv_len else mask
    missing = 4 - query.ndim
    if missing:  # axes of 1 in front
        query, key, value = (array[(None,) * missing] for array in (query, key, value))
    added = mask is not None and mask.dtype != jnp.bool_
    found = attention(
        *(array.swapaxes(1, 2) for array in (query, key, value)),  # [batch, heads, len, ..] -> [batch, len, heads, ..]
        causal=call.is_causal,
        alignment="bottom_right" if anchored else "top_left",
        mask=None if added else mask,
        bias=mask if added else None,
        **_options(call, words, backend),
    )
    out, lse = found if words.return_lse else (found, None)
    out = out.swapaxes(1, 2)
    return out[(0,) * missing] if missing else out, lse


def _on_kept_keys(provider: AttentionProvider, call: Call, words: Words, names: tuple[str, ...] | None) -> Found:
    """A varlen provider's mask of keys: those that are left, packed."""
    if words.window is not None or words.alibi_slopes is not None:
        raise SpecError(
            f"attn_mask with window_size or alibi_slopes: provider {provider.value} packs the keys that are left, "
            "whose distances are no longer those of the rows; use another provider"
        )
    keep = kept_keys(provider, call.key, call.attn_mask)
    q, k, v = (array.swapaxes(1, 2) for array in call[:3])  # [batch, len, heads, head_dim]
    attend = _attend(call, words, names)
    if provider is FLASH_VARLEN and not call.is_causal:
        out, lse = attend_left(attend, q, k, v, keep)
        return out.swapaxes(1, 2), lse
    if isinstance(keep, jax.core.Tracer):  # which keys are left is not known yet: a mask, to be taken or refused
        return dense(call._replace(attn_mask=keep[:, None, None, :]), words, names)
    documents = kept_documents(np.asarray(keep), q.shape[1], call.is_causal)
    found = attend_documents(attend, *_end_to_end(q, k, v), documents, packed=provider is FLASH_VARLEN)
    return _in_rows(found, q)


def _on_documents(
    provider: AttentionProvider, call: Call, words: Words, info: SeqInfo, names: tuple[str, ...] | None
) -> Found:
    """Documents that run through the rows laid end to end; causal and windows count from their last keys."""
    if call.attn_mask is not None:
        raise SpecError("attn_mask with cu_seqlens_q and cu_seqlens_k: they say twice what is visible; give one")
    for side, given in (("q", info.cu_seqlens_q), ("k", info.cu_seqlens_k)):
        check_array(f"attention_kwargs['cu_seqlens_{side}']", given)
    q, k, v = (array.swapaxes(1, 2) for array in call[:3])  # [batch, len, heads, head_dim]
    attend, rows = _attend(call, words, names), _end_to_end(q, k, v)
    traced = any(isinstance(given, jax.core.Tracer) for given in (info.cu_seqlens_q, info.cu_seqlens_k))
    if provider is not SAGE_VARLEN or traced:
        queries, keys = (jnp.asarray(given, jnp.int32) for given in (info.cu_seqlens_q, info.cu_seqlens_k))
        info = SeqInfo(queries, keys, info.max_len_q, info.max_len_k)
        return _in_rows(attend(*rows, causal=call.is_causal, seq_info=info), q)
    offsets_q, offsets_k = np.asarray(info.cu_seqlens_q), np.asarray(info.cu_seqlens_k)
    check_cu_seqlens(offsets_q, info.max_len_q, side="q", tokens=len(rows[0]))
    check_cu_seqlens(offsets_k, info.max_len_k, side="k", tokens=len(rows[1]))
    documents = offset_documents(offsets_q, offsets_k, call.is_causal)
    return _in_rows(attend_documents(attend, *rows, documents, packed=False), q)


def _options(call: Call, words: Words, backend: tuple[str, ...] | None) -> dict[str, Any]:
    """What every form of a call hands to ``attention`` alike."""
    return {
        "window": words.window,
        "softcap": words.softcap,
        "scale": call.scale,
        "alibi_slopes": words.alibi_slopes,
        "dropout": call.dropout_p,
        "deterministic": words.deterministic,
        "backend": backend,
        "return_lse": words.return_lse,
        "dropout_rng": call.dropout_rng,
    }


def _attend(call: Call, words: Words, names: tuple[str, ...] | None) -> Callable[..., Found]:
    """``attention`` with the call's options, on its kernel: (q, k, v, causal=, seq_info=) -> (out, lse or None)."""

    def attend(q: Array, k: Array, v: Array, *, causal: bool, seq_info: SeqInfo | None) -> Found:
        found = attention(q, k, v, causal=causal, seq_info=seq_info, **_options(call, words, names))
        return found if words.return_lse else (found, None)

    return attend


def _end_to_end(q: Array, k: Array, v: Array) -> tuple[Array, Array, Array]:
    """``[batch, len, heads, head_dim]`` -> ``[batch * len, heads, head_dim]`` each."""
    return q.reshape(-1, *q.shape[2:]), k.reshape(-1, *k.shape[2:]), v.reshape(-1, *v.shape[2:])


def _in_rows(found: Found, q: Array) -> Found:
    """``[batch * q_len, heads, dim]`` -> ``[batch, heads, q_len, dim]``, and the log-sum-exp without dim."""
    (out, lse), (batch, q_len, heads) = found, q.shape[:3]
    out = out.reshape(batch, q_len, heads, -1).swapaxes(1, 2)
    return out, None if lse is None else lse.reshape(heads, batch, q_len).swapaxes(0, 1)


def rephrased(call: Call) -> Call:
    """The call as ``attention`` takes it, with the same meaning: with a scale above 0."""
    if isinstance(call.scale, (int, float)) and call.scale <= 0:
        return call._replace(query=call.query * (-1 if call.scale else 0), scale=-call.scale or 1.0)
    return call


def check_heads(call: Call) -> None:
    """Raises SpecError for fewer kv heads than heads, unless that is asked for or one serves all."""
    if call.enable_gqa or call.query.ndim < 3:
        return
    heads, kv_heads = call.query.shape[-3], call.key.shape[-3]
    if kv_heads not in (1, heads):
        raise SpecError(
            f"enable_gqa={call.enable_gqa} with {heads} heads of query and {kv_heads} of key: pass enable_gqa=True"
        )


def _check_together(call: Call, ranks: tuple[int, ...]) -> None:
    """What must agree between query, key and value, under the names they have here."""
    query, key, value = call[:3]
    for name, array in (("query", query), ("key", key), ("value", value)):
        check_array(name, array)
        if array.ndim not in ranks or array.ndim != query.ndim:
            raise ShapeError(f"{name}: expected [batch, heads, len, head_dim], got {list(array.shape)}")
        if array.shape[:-3] != query.shape[:-3]:
            raise ShapeError(f"{name}: expected the batch of query {list(query.shape[:-3])}, got {list(array.shape)}")
        if array.dtype != query.dtype:
            raise DTypeError(f"{name}: expected the dtype of query ({query.dtype}), got {array.dtype}; cast it")
    if key.shape[-1] != query.shape[-1]:
        raise ShapeError(f"key: expected the head_dim of query ({query.shape[-1]}), got {key.shape[-1]}")
    if value.shape[:-1] != key.shape[:-1]:
        wanted, got = list(key.shape[:-1]), list(value.shape[:-1])
        raise ShapeError(f"value: expected the heads and length of key {wanted}, got {got}")
