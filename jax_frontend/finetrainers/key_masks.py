"""Masks of keys on kernels that have none: the keys that are left, packed (see attn_core.dropins.key_masks)."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from attn_core.call.seq_info import SeqInfo
from attn_core.dropins.key_masks import Document

Array = jax.Array
Found = tuple[Array, Array | None]
Attend = Callable[..., Found]
"""(q, k, v, causal=, seq_info=) -> (out, lse) on the kernel that was asked for; lse None where nobody wants it."""


def attend_left(attend: Attend, q: Array, k: Array, v: Array, keep: Array) -> Found:
    """Every query on its row's kept keys, in one packed call, without reading the mask on the host.

    Each row's kept keys come first, as a document with all of the row's queries; its other keys are a document without
    queries. So nothing's size depends on the mask's values, and the mask may be traced.

    Args:
        q: ``[batch, q_len, heads, head_dim]``; k, v: ``[batch, kv_len, kv_heads, ...]``.
        keep: bool ``[batch, kv_len]``.

    Returns:
        ``[batch, q_len, heads, value_dim]`` and the log-sum-exp ``[batch, heads, q_len]``.
    """
    (batch, q_len, heads), kv_len = q.shape[:3], k.shape[1]
    kept_first = jnp.argsort(~keep, axis=1, stable=True)[:, :, None, None]  # [batch, kv_len, 1, 1]
    kept = keep.sum(axis=1)
    lengths_k = jnp.stack((kept, kv_len - kept), axis=1)  # [batch, 2]
    ends_q = (np.arange(2 * batch + 1) + 1) // 2 * q_len
    ends_k = jnp.concatenate((jnp.zeros(1, jnp.int32), jnp.cumsum(lengths_k.reshape(-1), dtype=jnp.int32)))
    info = SeqInfo(jnp.asarray(ends_q, jnp.int32), ends_k, q_len, kv_len)
    # A kernel may look into the document behind, where 0 * NaN of padding would be NaN: what is left out becomes 0.
    is_kept = jnp.take_along_axis(keep[:, :, None, None], kept_first, axis=1)
    k, v = (jnp.where(is_kept, jnp.take_along_axis(array, kept_first, axis=1), 0) for array in (k, v))
    rows = (array.reshape(-1, *array.shape[2:]) for array in (q, k, v))  # [batch * len, heads, head_dim]
    out, lse = attend(*rows, causal=False, seq_info=info)
    rows_lse = None if lse is None else lse.reshape(heads, batch, q_len).swapaxes(0, 1)
    return out.reshape(batch, q_len, *out.shape[1:]), rows_lse


def attend_documents(attend: Attend, q: Array, k: Array, v: Array, documents: list[Document], packed: bool) -> Found:
    """Documents that are known on the host; rows of queries in none of them are 0, their log-sum-exp -inf.

    Args:
        q: ``[tokens, heads, head_dim]``; k and v likewise.
        packed: one packed call for causal and one for the other documents, for kernels that have packed documents;
            else a call for each.

    Returns:
        ``[tokens, heads, value_dim]`` and the log-sum-exp ``[heads, tokens]``.
    """
    groups = [[document] for document in documents]
    if packed:
        groups = [[each for each in documents if each.causal is causal] for causal in (True, False)]
    out = jnp.zeros((*q.shape[:2], v.shape[2]), q.dtype)
    lse: Array | None = jnp.full(q.shape[1::-1], -jnp.inf, jnp.promote_types(q.dtype, jnp.float32))
    for group in filter(None, groups):
        queries = np.concatenate([document.queries for document in group])
        keys = np.concatenate([document.keys for document in group])
        found, found_lse = _attend_group(attend, (q[queries], k[keys], v[keys]), group, packed)
        out = out.at[queries].set(found)
        lse = None if found_lse is None or lse is None else lse.at[:, queries].set(found_lse)
    return out, lse


def _attend_group(attend: Attend, parts: tuple[Array, ...], group: list[Document], packed: bool) -> Found:
    causal = group[0].causal
    if not packed:
        out, lse = attend(*(part[None] for part in parts), causal=causal, seq_info=None)
        return out[0], None if lse is None else lse[0]
    info = SeqInfo.from_lengths([len(each.queries) for each in group], [len(each.keys) for each in group])
    return attend(*parts, causal=causal, seq_info=info)
