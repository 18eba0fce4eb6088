"""flash_attn_varlen_func and its packed forms, with the arguments of flash-attn 2.8, for JAX arrays."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from attn_core.call.options import check_flag
from attn_core.call.seq_info import SeqInfo
from attn_core.dropins.flash_attn import (
    KEYS_PACKED,
    OPTIONS,
    SELF_PACKED,
    VARLEN_PAGES,
    check_packed,
    host_int,
    options_of,
    rate_of,
    renamed,
    slopes_of_tokens,
)
from attn_core.errors import DTypeError, ShapeError, SpecError
from attn_core.expressions.tracing import TracedFunction
from jax_frontend.attention import attention
from jax_frontend.dispatch import plan
from jax_frontend.flash_attn.probabilities import lse_of_flash_attn, places_in_documents, with_probabilities
from jax_frontend.paged.attention import paged_attention
from jax_frontend.qkvpacked import attention_qkvpacked

Array = jax.Array
Results = Array | tuple[Array, Array, Array]


def flash_attn_varlen_func(
    q: Array,
    k: Array,
    v: Array,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Array | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Array | None = None,
    *,
    dropout_rng: Array | None = None,
) -> Results:
    """Computes ``flash_attn.flash_attn_varlen_func(...)`` on packed documents, with its gradients.

    Args:
        q: ``[total_q, heads, head_dim]``; k, v: ``[total_k, kv_heads, head_dim]``. With block_table they are a pool
            ``[num_pages, page_size, kv_heads, head_dim]`` of any page size, without gradients and dropout.
        cu_seqlens_q, cu_seqlens_k: int32 ``[documents + 1]``, the offsets of the documents.
        max_seqlen_q, max_seqlen_k: ints on the host, at least the longest document.
        alibi_slopes: ``[heads]``, or ``[documents, heads]``: outside of pages on backends with score functions.
        block_table: int32 ``[documents, width]``: each document's pages in order. cu_seqlens_k then counts its keys.

    The other arguments and the errors are those of ``flash_attn_func``; the diagonals lie in each document.

    Returns:
        ``[total_q, heads, head_dim]``; with return_attn_probs also softmax_lse, float32 ``[heads, total_q]``, and
        S_dmask, empty without dropout, else ``[documents, heads, max_seqlen_q, max_seqlen_k]``.
    """
    names = OPTIONS if block_table is None else VARLEN_PAGES
    try:
        info = documents_of(q, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        options = options_of(softmax_scale, causal, window_size, softcap, deterministic)
        if block_table is not None:
            rate = rate_of(dropout_p)
            if rate:
                raise SpecError(f"dropout_p={dropout_p}: expected 0 with block_table, because pages are for inference")
            return _in_pages((q, k, v), info, alibi_slopes, block_table, return_attn_probs, options)
        options |= _slopes(q, k, info, alibi_slopes)
        if check_flag("return_attn_probs", return_attn_probs):
            return with_probabilities((q, k, v), rate_of(dropout_p), dropout_rng, {**options, "seq_info": info})
        return attention(q, k, v, seq_info=info, dropout=dropout_p, dropout_rng=dropout_rng, **options)
    except (SpecError, TypeError) as error:
        raise renamed(error, names) from None


def flash_attn_varlen_qkvpacked_func(
    qkv: Array,
    cu_seqlens: Array,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Array | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    dropout_rng: Array | None = None,
) -> Results:
    """Computes ``flash_attn.flash_attn_varlen_qkvpacked_func(...)``.

    Args:
        qkv: ``[total, 3, heads, head_dim]``.
        cu_seqlens: int32 ``[documents + 1]``. max_seqlen: an int on the host, at least the longest document.

    The other arguments, the results and the errors are those of ``flash_attn_varlen_func``.
    """
    try:
        plan.check_array("qkv", qkv)
        check_packed("qkv", qkv.shape, 3, packed=True)
        info = documents_of(qkv, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, of=("", ""))
        options = options_of(softmax_scale, causal, window_size, softcap, deterministic)
        options |= _slopes(qkv[:, 0], qkv[:, 1], info, alibi_slopes) | {"seq_info": info}
        if check_flag("return_attn_probs", return_attn_probs):
            return with_probabilities((qkv[:, 0], qkv[:, 1], qkv[:, 2]), rate_of(dropout_p), dropout_rng, options)
        return attention_qkvpacked(qkv, dropout=dropout_p, dropout_rng=dropout_rng, **options)
    except (SpecError, TypeError) as error:
        raise renamed(error, SELF_PACKED) from None


def flash_attn_varlen_kvpacked_func(
    q: Array,
    kv: Array,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Array | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    dropout_rng: Array | None = None,
) -> Results:
    """Computes ``flash_attn.flash_attn_varlen_kvpacked_func(...)``.

    Args:
        q: ``[total_q, heads, head_dim]``. kv: ``[total_k, 2, kv_heads, head_dim]``.

    The other arguments, the results and the errors are those of ``flash_attn_varlen_func``.
    """
    try:
        plan.check_array("kv", kv)
        check_packed("kv", kv.shape, 2, packed=True)
        k, v = kv[:, 0], kv[:, 1]
        info = documents_of(q, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        options = options_of(softmax_scale, causal, window_size, softcap, deterministic) | _slopes(
            q, k, info, alibi_slopes
        )
        if check_flag("return_attn_probs", return_attn_probs):
            return with_probabilities((q, k, v), rate_of(dropout_p), dropout_rng, {**options, "seq_info": info})
        return attention(q, k, v, seq_info=info, dropout=dropout_p, dropout_rng=dropout_rng, **options)
    except (SpecError, TypeError) as error:
        raise renamed(error, KEYS_PACKED) from None


def documents_of(
    q: Any, queries: Any, keys: Any, longest_q: Any, longest_k: Any, of: tuple[str, str] = ("_q", "_k")
) -> SeqInfo:
    """Returns the documents of a call, checked except for the values of the offsets."""
    plan.check_array("q", q)
    lengths = []
    for side, offsets, longest in zip(of, (queries, keys), (longest_q, longest_k), strict=True):
        plan.check_array(f"cu_seqlens{side}", offsets)
        if offsets.ndim != 1 or offsets.shape[0] < 2:
            raise ShapeError(f"cu_seqlens{side}: expected [documents + 1], got {list(offsets.shape)}")
        if offsets.dtype != jnp.int32:
            raise DTypeError(f"cu_seqlens{side}: expected dtype int32, got {offsets.dtype}; cast it to int32")
        lengths.append(host_int(f"max_seqlen{side}", longest))
    return SeqInfo(queries, keys, *lengths)


def _slopes(q: Array, k: Any, info: SeqInfo, slopes: Any) -> dict[str, Any]:
    """Returns the keywords that add ALiBi: the slopes, or a function if each document has its own."""
    if slopes is None:
        return {}
    plan.check_array("alibi_slopes", slopes)
    documents = info.cu_seqlens_q.shape[0] - 1
    if slopes.ndim != 2 or documents == 1 or q.ndim != 3 or k.ndim != 3:
        return {"alibi_slopes": slopes}
    if tuple(slopes.shape) != (documents, q.shape[1]):
        raise ShapeError(
            f"alibi_slopes: expected [heads] = [{q.shape[1]}] or [documents, heads] = [{documents}, {q.shape[1]}], got "
            f"{list(slopes.shape)}"
        )
    of_query, queries = places_in_documents(info.cu_seqlens_q, q.shape[0])
    _, keys = places_in_documents(info.cu_seqlens_k, k.shape[0])
    more = jnp.diff(info.cu_seqlens_k) - jnp.diff(info.cu_seqlens_q)  # keys of a document than queries
    of_query = jnp.minimum(of_query, documents - 1)  # a token behind the last offset sees no key
    wide = slopes.astype(jnp.promote_types(q.dtype, jnp.float32))
    arrays = wide[of_query], queries + more[of_query], keys
    return {"score_mod": TracedFunction(slopes_of_tokens(), arrays)}


def _in_pages(
    qkv: tuple[Array, Array, Array], info: SeqInfo, slopes: Any, table: Any, with_lse: Any, options: dict[str, Any]
) -> Results:
    with_lse = check_flag("return_attn_probs", with_lse)
    for name, pool in (("k", qkv[1]), ("v", qkv[2])):
        plan.check_array(name, pool)
        if pool.dtype != qkv[0].dtype:  # these functions have no scales for quantised pages
            raise DTypeError(f"{name}: expected the dtype of q, {qkv[0].dtype}, got {pool.dtype}; cast it")
    how: dict[str, Any] = {**options, "alibi_slopes": slopes, "max_len_q": info.max_len_q, "return_lse": with_lse}
    how |= {"block_table": table, "cu_seqlens_q": info.cu_seqlens_q, "seq_lens": jnp.diff(info.cu_seqlens_k)}
    results = paged_attention(*qkv, **how)
    if not with_lse:
        return results  # type: ignore[no-any-return]
    out, lse = results
    return out, lse_of_flash_attn(lse), jnp.zeros(0, qkv[0].dtype)
