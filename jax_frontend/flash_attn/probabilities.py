"""The log-sum-exp and the softmax weights that flash-attn's ``return_attn_probs`` returns, for JAX arrays."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from attn_core.call.seq_info import SeqInfo
from jax_frontend.attention import attention
from jax_frontend.dispatch import plan

Array = jax.Array
Options = dict[str, Any]
PORTABLE = ("math", "jax_xla")
"""The backends that drop the same weights for every width of the values. The second needs no torch."""


def lse_of_flash_attn(lse: Array) -> Array:
    """Returns a log-sum-exp in flash-attn 2's convention: +inf, not -inf, for a query that sees no key."""
    return jnp.where(lse == -jnp.inf, jnp.inf, lse)


def with_probabilities(
    qkv: tuple[Array, ...], dropout: float, key: Array | None, options: Options
) -> tuple[Array, Array, Array]:
    """Returns (out, softmax_lse, S_dmask) of ``attention``.

    Args:
        qkv: q, k and v of ``attention``.
        options: its other keywords, among them seq_info for packed arrays.
    """
    q, k, v = qkv
    if not dropout:
        out, lse = attention(q, k, v, return_lse=True, dropout_rng=key, **options)
        return out, lse_of_flash_attn(lse), jnp.zeros(0, q.dtype)
    for name, array in (("q", q), ("k", k), ("v", v)):
        plan.check_array(name, array)
    drops = {"dropout": dropout, "dropout_rng": key, **options, "backend": PORTABLE}
    out, lse = attention(q, k, v, return_lse=True, **drops)
    # The weights are the output for values that are rows of an identity, which these backends alone take so wide.
    wide, widest = (jax.lax.stop_gradient(array).astype(jnp.float32) for array in (q, k))
    values = _identity(k, options.get("seq_info"))
    weights = attention(wide, widest, values, **options, backend=PORTABLE)
    after_dropout = attention(wide, widest, values, **drops)
    largest = weights.max(-1, keepdims=True, initial=0.0)
    numerators = weights / jnp.where(largest > 0, largest, 1.0)
    signed = jnp.where((after_dropout == 0) & (weights > 0), -numerators, numerators).astype(out.dtype)
    return out, lse_of_flash_attn(lse), _by_document(signed, options.get("seq_info"))


def _identity(k: Array, info: SeqInfo | None) -> Array:
    """Returns float32 values ``[..., kv_len, kv_heads, width]``, 1 at the place of their key in its row or document."""
    length, heads = k.shape[-3], k.shape[-2]
    places, width = jnp.arange(length), length
    if info is not None:
        _, places = places_in_documents(info.cu_seqlens_k, length)
        width = info.max_len_k
    rows = (places[:, None] == jnp.arange(width)).astype(jnp.float32)
    return jnp.broadcast_to(rows[:, None], (*k.shape[:-3], length, heads, width))


def _by_document(weights: Array, info: SeqInfo | None) -> Array:
    """Returns weights ``[batch, heads, q_len, kv_len]`` of ``[batch, q_len, heads, kv_len]`` or packed ones."""
    if info is None:
        return weights.swapaxes(1, 2)
    documents, places = places_in_documents(info.cu_seqlens_q, weights.shape[0])
    table = jnp.zeros((info.cu_seqlens_q.shape[0] - 1, info.max_len_q, *weights.shape[1:]), weights.dtype)
    return table.at[documents, places].set(weights, mode="drop").swapaxes(1, 2)


def places_in_documents(cu_seqlens: Array, tokens: int) -> tuple[Array, Array]:
    """Returns the document of each token, and its place there, int32 ``[tokens]``.

    A token behind the last offset has the number of documents as its document.
    """
    at = jnp.arange(tokens, dtype=jnp.int32)
    documents = jnp.searchsorted(cu_seqlens[1:], at, side="right").astype(jnp.int32)
    return documents, at - cu_seqlens[documents]
