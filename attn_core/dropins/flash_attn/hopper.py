"""The functions of FlashAttention 3 (``hopper/flash_attn_interface.py`` of flash-attention)."""

from __future__ import annotations

from typing import Any, ClassVar, Generic

from attn_core.call.kinds import is_host_int
from attn_core.call.options import check_flag
from attn_core.call.tensors import A as Array
from attn_core.dropins.flash_attn.arguments import (
    CACHE,
    OPTIONS,
    SELF_PACKED,
    check_hints,
    check_packed,
    documents_of,
    host_int,
    options_of,
    refuse,
    refuse_chunks,
    renamed,
)
from attn_core.dropins.flash_attn.cache import Cached, attend
from attn_core.dropins.flash_attn.frontend import Frontend
from attn_core.errors import ShapeError, SpecError, shown


class FlashAttention3(Generic[Array]):
    """The functions of FlashAttention 3 on the arrays of a frontend, which a subclass names."""

    frontend: ClassVar[Frontend]

    @classmethod
    def flash_attn_func(
        cls,
        q: Array,
        k: Array,
        v: Array,
        softmax_scale: float | None = None,
        causal: bool = False,
        qv: None = None,
        q_descale: Array | None = None,
        k_descale: Array | None = None,
        v_descale: Array | None = None,
        window_size: tuple[int, int] = (-1, -1),
        attention_chunk: int = 0,
        softcap: float = 0.0,
        num_splits: int = 1,
        pack_gqa: bool | None = None,
        deterministic: bool = False,
        sm_margin: int = 0,
        return_attn_probs: bool = False,
    ) -> Array | tuple[Array, Array]:
        """Computes FlashAttention 3's ``flash_attn_func(...)``, with its gradients.

        Args:
            q: ``[batch, seqlen_q, heads, head_dim]``; k: ``[batch, seqlen_k, kv_heads, head_dim]``; v with value_dim.
            softmax_scale, causal, window_size, softcap, deterministic: as in flash-attn 2.8's ``flash_attn_func``.
            q_descale, k_descale, v_descale: float32 ``[batch, kv_heads]``, the factors of q, k and v in float8_e4m3fn;
                None for 1. The output is bfloat16, without gradients. Only FlashAttention 3 itself runs such calls, in
                torch and if its build has float8; elsewhere an error has the reason.
            qv, attention_chunk: raise an error that says what to do instead.
            num_splits, pack_gqa, sm_margin: hints about speed without effect.

        Returns:
            The output; with return_attn_probs ``(out, softmax_lse)``, float32 ``[batch, heads, seqlen_q]``, natural
            log.

        Raises:
            ShapeError, DTypeError, DeviceError, SpecError, TypeError: naming the argument.
            NoBackendError: if no backend can run the call; the message has every reason.
        """
        attend_scaled = cls.frontend.attend_scaled
        try:
            refuse(qv=qv)
            if attend_scaled is None:
                refuse(q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
            refuse_chunks(attention_chunk)
            check_hints(num_splits=num_splits, pack_gqa=pack_gqa, sm_margin=sm_margin)
            options = options_of(softmax_scale, causal, window_size, softcap, deterministic)
            if attend_scaled is not None:
                factors = (q_descale, k_descale, v_descale)
                results = attend_scaled((q, k, v), factors, options, return_attn_probs)
                if results is not None:
                    return results
            return cls.frontend.attention(q, k, v, return_lse=return_attn_probs, **options)
        except (SpecError, TypeError) as error:
            raise renamed(error, OPTIONS) from None

    @classmethod
    def flash_attn_qkvpacked_func(
        cls,
        qkv: Array,
        softmax_scale: float | None = None,
        causal: bool = False,
        q_descale: None = None,
        k_descale: None = None,
        v_descale: None = None,
        window_size: tuple[int, int] = (-1, -1),
        attention_chunk: int = 0,
        softcap: float = 0.0,
        deterministic: bool = False,
        num_heads_q: int | None = None,
        sm_margin: int = 0,
        return_attn_probs: bool = False,
    ) -> Array | tuple[Array, Array]:
        """Computes FlashAttention 3's ``flash_attn_qkvpacked_func(...)``.

        Args:
            qkv: ``[batch, seqlen, 3, heads, head_dim]``; or ``[batch, seqlen, num_heads_q + 2 * kv_heads, head_dim]``.
            num_heads_q: the query heads of the second form.

        The other arguments, the results and the errors are those of ``flash_attn_func``.
        """
        try:
            refuse(q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
            refuse_chunks(attention_chunk)
            check_hints(sm_margin=sm_margin)
            cls.frontend.check_array("qkv", qkv)
            options = options_of(softmax_scale, causal, window_size, softcap, deterministic)
            options["return_lse"] = return_attn_probs
            return _attend_as_one(cls.frontend, qkv, num_heads_q, options)
        except (SpecError, TypeError) as error:
            raise renamed(error, SELF_PACKED) from None

    @classmethod
    def flash_attn_varlen_func(
        cls,
        q: Array,
        k: Array,
        v: Array,
        cu_seqlens_q: Array,
        cu_seqlens_k: Array,
        max_seqlen_q: int,
        max_seqlen_k: int,
        seqused_q: None = None,
        seqused_k: None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        qv: None = None,
        q_descale: None = None,
        k_descale: None = None,
        v_descale: None = None,
        window_size: tuple[int, int] = (-1, -1),
        attention_chunk: int = 0,
        softcap: float = 0.0,
        num_splits: int = 1,
        pack_gqa: bool | None = None,
        deterministic: bool = False,
        sm_margin: int = 0,
        return_attn_probs: bool = False,
    ) -> Array | tuple[Array, Array]:
        """Computes FlashAttention 3's ``flash_attn_varlen_func(...)`` on packed documents, with its gradients.

        Args:
            q: ``[total_q, heads, head_dim]``; k: ``[total_k, kv_heads, head_dim]``; v: ``[total_k, kv_heads,
                value_dim]``.
            cu_seqlens_q, cu_seqlens_k: int32 ``[documents + 1]``. max_seqlen_q, max_seqlen_k: ints on the host.
            seqused_q, seqused_k: raise an error.

        The other arguments, the results and the errors are those of ``flash_attn_func``; softmax_lse is ``[heads,
        total_q]``.
        """
        try:
            refuse(seqused_q=seqused_q, seqused_k=seqused_k)
            refuse(qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
            refuse_chunks(attention_chunk, "documents")
            check_hints(num_splits=num_splits, pack_gqa=pack_gqa, sm_margin=sm_margin)
            options = options_of(softmax_scale, causal, window_size, softcap, deterministic)
            info = documents_of(cls.frontend, q, (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k))
            return cls.frontend.attention(q, k, v, seq_info=info, return_lse=return_attn_probs, **options)
        except (SpecError, TypeError) as error:
            raise renamed(error, OPTIONS) from None

    @classmethod
    def flash_attn_with_kvcache(
        cls,
        q: Array,
        k_cache: Array,
        v_cache: Array,
        k: Array | None = None,
        v: Array | None = None,
        qv: None = None,
        rotary_cos: Array | None = None,
        rotary_sin: Array | None = None,
        cache_seqlens: int | Array | None = None,
        cache_batch_idx: Array | None = None,
        cache_leftpad: Array | None = None,
        page_table: Array | None = None,
        cu_seqlens_q: Array | None = None,
        cu_seqlens_k_new: None = None,
        max_seqlen_q: int | None = None,
        rotary_seqlens: None = None,
        q_descale: None = None,
        k_descale: None = None,
        v_descale: None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        attention_chunk: int = 0,
        softcap: float = 0.0,
        rotary_interleaved: bool = True,
        scheduler_metadata: object = None,
        num_splits: int = 0,
        pack_gqa: bool | None = None,
        sm_margin: int = 0,
        return_softmax_lse: bool = False,
    ) -> Array | tuple[Array, ...]:
        """Computes FlashAttention 3's ``flash_attn_with_kvcache(...)``: appends in place, rotates, and attends.

        Args:
            q: ``[batch, seqlen_q, heads, head_dim]``, or ``[tokens, heads, head_dim]`` with cu_seqlens_q, int32
                ``[batch + 1]``, and max_seqlen_q, an int on the host, at least the most queries of a sequence.
            page_table: int32 ``[batch, width]``: each sequence's pages in order.
            qv, cu_seqlens_k_new, rotary_seqlens, q_descale, k_descale, v_descale, attention_chunk: raise an error.
            scheduler_metadata, num_splits, pack_gqa, sm_margin: hints about speed without effect.

        The other arguments and the errors are those of flash-attn 2.8's ``flash_attn_with_kvcache``.

        Returns:
            The output in the shape of q; with return_softmax_lse ``(out, softmax_lse, out_accum, softmax_lse_accum)``,
            of which the last two, the partial results of splits, are empty. In JAX ``(out, k_cache, v_cache)``, or
            these four with both caches behind them.
        """
        call = Cached(q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad)
        call = call._replace(block_table=page_table, cu_seqlens_q=cu_seqlens_q)
        try:
            refuse(qv=qv, cu_seqlens_k_new=cu_seqlens_k_new, rotary_seqlens=rotary_seqlens)
            refuse(q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
            refuse_chunks(attention_chunk, "cache")
            check_hints(num_splits=num_splits, pack_gqa=pack_gqa, sm_margin=sm_margin)
            options = options_of(softmax_scale, causal, window_size, softcap, False)
            options["return_lse"] = check_flag("return_softmax_lse", return_softmax_lse)
            if cu_seqlens_q is not None:
                max_seqlen_q = host_int("max_seqlen_q", max_seqlen_q)
            interleaved = check_flag("rotary_interleaved", rotary_interleaved)
            results, caches = attend(cls.frontend, call, interleaved, options, "page_table", max_seqlen_q)
        except (SpecError, TypeError) as error:
            raise renamed(error, CACHE | {"block_table": "page_table"}) from None
        if not return_softmax_lse:
            return cls.frontend.with_caches((results,), caches)
        partial_results = [cls.frontend.empty(q, cls.frontend.numpy.float32) for _ in range(2)]
        return cls.frontend.with_caches((*results, *partial_results), caches)


def _attend_as_one(frontend: Frontend, qkv: Any, num_heads_q: object, options: dict[str, Any]) -> Any:
    """Returns the results for q, k and v in one array, in either form of ``flash_attn_qkvpacked_func``."""
    if qkv.ndim != 4:
        check_packed("qkv", qkv, 3, packed=False)
        return frontend.attention_qkvpacked(qkv, **options)
    heads = qkv.shape[2]
    queries = num_heads_q if is_host_int(num_heads_q) else 0
    if not 0 < queries < heads or (heads - queries) % 2:
        raise ShapeError(
            f"num_heads_q={shown(num_heads_q)}: expected the query heads among the {heads} heads of qkv, which leave "
            "as many key heads as value heads"
        )
    kv_heads = (heads - queries) // 2
    q, k, v = frontend.split(qkv, [queries, kv_heads, kv_heads], 2)
    return frontend.attention(q, k, v, **options)
