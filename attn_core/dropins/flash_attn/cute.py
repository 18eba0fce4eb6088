"""The functions of FlashAttention-4 (``flash_attn.cute``)."""

from __future__ import annotations

from typing import Any, ClassVar, Generic

from attn_core.call.options import check_flag
from attn_core.call.tensors import A as Array
from attn_core.dropins.flash_attn.arguments import (
    CUTE,
    check_hints,
    documents_of,
    host_int,
    options_of,
    refuse,
    renamed,
)
from attn_core.dropins.flash_attn.cache import Cached, attend
from attn_core.dropins.flash_attn.frontend import Frontend
from attn_core.errors import SpecError

Window = tuple[int | None, int | None]


class FlashAttention4(Generic[Array]):
    """The functions of FlashAttention-4 on the arrays of a frontend, which a subclass names."""

    frontend: ClassVar[Frontend]

    @classmethod
    def flash_attn_func(
        cls,
        q: Array,
        k: Array,
        v: Array,
        qv: None = None,
        gather_kv_indices: None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: Window = (None, None),
        learnable_sink: Array | None = None,
        softcap: float = 0.0,
        num_splits: int = 1,
        pack_gqa: bool | None = None,
        deterministic: bool = False,
        score_mod: None = None,
        score_mod_bwd: None = None,
        mask_mod: None = None,
        aux_tensors: None = None,
        aux_scalars: None = None,
        block_sparse_tensors: None = None,
        block_sparse_tensors_bwd: None = None,
        return_lse: bool = False,
    ) -> tuple[Array, Array | None]:
        """Computes FlashAttention-4's ``flash_attn_func(...)``, with its gradients.

        Args:
            q: ``[batch, seqlen_q, heads, head_dim]``; k: ``[batch, seqlen_k, kv_heads, head_dim]``; v with value_dim.
            softmax_scale, causal, softcap, deterministic: as in flash-attn 2.8's ``flash_attn_func``.
            window_size: inclusive distances ``(left, right)``; None, or -1, is no limit.
            learnable_sink: ``[heads]``: one extra logit per head in every row's softmax, with its gradient.
            qv, gather_kv_indices, score_mod, score_mod_bwd, mask_mod, aux_tensors, aux_scalars, block_sparse_tensors,
                block_sparse_tensors_bwd: raise an error that says what to do instead.
            num_splits, pack_gqa: hints about speed without effect.

        Returns:
            ``(out, lse)``: lse is float32 ``[batch, heads, seqlen_q]``, natural log, sinks included; None without
            return_lse.

        Raises:
            ShapeError, DTypeError, DeviceError, SpecError, TypeError: naming the argument.
            NoBackendError: if no backend can run the call; the message has every reason.
        """
        try:
            refuse(qv=qv, gather_kv_indices=gather_kv_indices, score_mod=score_mod, score_mod_bwd=score_mod_bwd)
            refuse(mask_mod=mask_mod, aux_tensors=aux_tensors, aux_scalars=aux_scalars)
            refuse(block_sparse_tensors=block_sparse_tensors, block_sparse_tensors_bwd=block_sparse_tensors_bwd)
            check_hints(num_splits=num_splits, pack_gqa=pack_gqa)
            options = options_of(softmax_scale, causal, window_size, softcap, deterministic)
            results: Any = cls.frontend.attention(q, k, v, sinks=learnable_sink, return_lse=return_lse, **options)
        except (SpecError, TypeError) as error:
            raise renamed(error, CUTE) from None
        return results if return_lse else (results, None)

    @classmethod
    def flash_attn_varlen_func(
        cls,
        q: Array,
        k: Array,
        v: Array,
        qv: None = None,
        cu_seqlens_q: Array | None = None,
        cu_seqlens_k: Array | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
        min_seqlen_k: int | None = None,
        seqused_q: None = None,
        seqused_k: Array | None = None,
        gather_kv_indices: None = None,
        page_table: Array | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: Window = (None, None),
        learnable_sink: Array | None = None,
        softcap: float = 0.0,
        num_splits: int = 1,
        pack_gqa: bool | None = None,
        deterministic: bool = False,
        score_mod: None = None,
        score_mod_bwd: None = None,
        mask_mod: None = None,
        block_sparse_tensors: None = None,
        aux_tensors: None = None,
        aux_scalars: None = None,
        return_lse: bool = False,
        scheduler_metadata: object = None,
        seqlen_k_per_split: int | None = None,
        disable_scheduler_metadata: bool = False,
    ) -> tuple[Array, Array | None]:
        """Computes FlashAttention-4's ``flash_attn_varlen_func(...)``.

        Args:
            q: ``[total_q, heads, head_dim]`` with cu_seqlens_q, else ``[batch, seqlen_q, heads, head_dim]``.
            k, v: ``[total_k, kv_heads, dim]`` with cu_seqlens_k; pages ``[num_pages, page_size, kv_heads, dim]`` with
                page_table; else ``[batch, seqlen_k, kv_heads, dim]``. Only calls without page_table in which both or
                neither of q and k are packed have gradients.
            cu_seqlens_q, cu_seqlens_k: int32 ``[documents + 1]``. max_seqlen_q, max_seqlen_k: ints on the host.
            seqused_k: int32 ``[batch]``: the keys of each sequence in pages or in rows of k; all if None.
            page_table: int32 ``[batch, width]``: each sequence's pages in order.
            seqused_q: raises an error, as what ``flash_attn_func`` refuses.
            min_seqlen_k, scheduler_metadata, seqlen_k_per_split, disable_scheduler_metadata: hints without effect.

        The other arguments, the results and the errors are those of ``flash_attn_func``. lse is ``[heads, total_q]``
        for a packed q.
        """
        try:
            refuse(qv=qv, seqused_q=seqused_q, gather_kv_indices=gather_kv_indices, score_mod=score_mod)
            refuse(score_mod_bwd=score_mod_bwd, mask_mod=mask_mod, aux_tensors=aux_tensors, aux_scalars=aux_scalars)
            refuse(block_sparse_tensors=block_sparse_tensors)
            check_hints(num_splits=num_splits, pack_gqa=pack_gqa, min_seqlen_k=min_seqlen_k)
            check_hints(seqlen_k_per_split=seqlen_k_per_split, disable_scheduler_metadata=disable_scheduler_metadata)
            options = options_of(softmax_scale, causal, window_size, softcap, deterministic)
            options |= {"sinks": learnable_sink, "return_lse": check_flag("return_lse", return_lse)}
            if page_table is None and (cu_seqlens_q is None) == (cu_seqlens_k is None):
                offsets, longest = (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
                results: Any = _attend_outside_pages(cls.frontend, (q, k, v), offsets, longest, seqused_k, options)
            else:
                if cu_seqlens_k is not None:
                    other = "page_table, because seqused_k has the lengths" if page_table is not None else "a dense q"
                    raise SpecError(f"cu_seqlens_k: expected None with {other}")
                most = None if max_seqlen_q is None else host_int("max_seqlen_q", max_seqlen_q)
                call = Cached(q, k, v, cache_seqlens=seqused_k, block_table=page_table, cu_seqlens_q=cu_seqlens_q)
                results, _ = attend(cls.frontend, call, False, options, "page_table", most, CUTE)
        except (SpecError, TypeError) as error:
            raise renamed(error, CUTE) from None
        return results if return_lse else (results, None)


def _attend_outside_pages(
    frontend: Frontend,
    qkv: tuple[Array, Array, Array],
    offsets: tuple[Any, Any],
    longest: tuple[object, object],
    seqused_k: Array | None,
    options: dict[str, Any],
) -> Any:
    if offsets[0] is None:
        if seqused_k is None:
            return frontend.attention(*qkv, **options)
        return frontend.attention_to_rows(*qkv, seqused_k, **options)
    refuse(seqused_k=seqused_k)
    return frontend.attention(*qkv, seq_info=documents_of(frontend, qkv[0], offsets, longest), **options)
