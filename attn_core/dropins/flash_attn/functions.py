"""The functions of flash-attn 2.8."""

from __future__ import annotations

from typing import Any, ClassVar, Generic

from attn_core.call.keywords import Random
from attn_core.call.options import check_flag, check_number
from attn_core.call.seq_info import SeqInfo
from attn_core.call.tensors import A as Array
from attn_core.dropins.flash_attn.arguments import (
    CACHE,
    KEYS_PACKED,
    OPTIONS,
    SELF_PACKED,
    VARLEN_PAGES,
    check_hints,
    check_packed,
    documents_of,
    options_of,
    places_in_documents,
    renamed,
    with_slopes,
)
from attn_core.dropins.flash_attn.cache import Cached, attend
from attn_core.dropins.flash_attn.frontend import Frontend
from attn_core.errors import DTypeError, SpecError


class FlashAttention2(Generic[Array, Random]):
    """The functions of flash-attn 2.8 on the arrays of a frontend, which a subclass names."""

    frontend: ClassVar[Frontend]

    @classmethod
    def flash_attn_func(
        cls,
        q: Array,
        k: Array,
        v: Array,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: Array | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        *,
        dropout_rng: Random | None = None,
    ) -> Array | tuple[Array, Array, Array]:
        """Computes ``flash_attn.flash_attn_func(...)`` on the kernel that selection picks, with its gradients.

        Args:
            q: ``[batch, seqlen_q, heads, head_dim]``; k, v: ``[batch, seqlen_k, kv_heads, head_dim]``. Query head h
                reads kv head ``h // (heads // kv_heads)``.
            dropout_p: probability of dropping a softmax weight; other ones are dropped than there.
            softmax_scale: factor on ``q . k``; ``1 / sqrt(head_dim)`` if None.
            causal: query i sees key ``j <= i + seqlen_k - seqlen_q``.
            window_size: inclusive distances ``(left, right)`` from that diagonal; -1 is no limit.
            softcap: ``softcap * tanh(s / softcap)``; 0 or less switches it off.
            alibi_slopes: ``[heads]`` or ``[batch, heads]``: adds ``-slope * |i + seqlen_k - seqlen_q - j|``. No
                gradient.
            deterministic: use only kernels that give the same bits on every run.
            return_attn_probs: return ``(out, softmax_lse, S_dmask)``.
            dropout_rng: the generator of dropout, in JAX its PRNG key; flash-attn has no such argument.

        Returns:
            ``[batch, seqlen_q, heads, head_dim]``, 0 for a query that sees no key. softmax_lse is float32 ``[batch,
            heads, seqlen_q]``, natural log, +inf for such a query. S_dmask is empty without dropout. With dropout it is
            ``exp(s - row's largest s)``, ``[batch, heads, seqlen_q, seqlen_k]``, negative where dropped, and the
            backend is ``math``, in JAX ``math`` or ``jax_xla``.

        Raises:
            ShapeError, DTypeError, DeviceError, SpecError, TypeError: naming the argument.
            NoBackendError: if no backend can run the call; the message has every reason.
        """
        try:
            options = options_of(softmax_scale, causal, window_size, softcap, deterministic)
            options["alibi_slopes"] = alibi_slopes
            return cls._attend((q, k, v), dropout_p, dropout_rng, return_attn_probs, options)
        except (SpecError, TypeError) as error:
            raise renamed(error, OPTIONS) from None

    @classmethod
    def flash_attn_qkvpacked_func(
        cls,
        qkv: Array,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: Array | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        *,
        dropout_rng: Random | None = None,
    ) -> Array | tuple[Array, Array, Array]:
        """Computes ``flash_attn.flash_attn_qkvpacked_func(...)``; torch's kernels read qkv in place.

        Args:
            qkv: ``[batch, seqlen, 3, heads, head_dim]``. In torch the backward writes its gradient without a
                concatenation.

        The other arguments, the results and the errors are those of ``flash_attn_func``.
        """
        try:
            cls.frontend.check_array("qkv", qkv)
            check_packed("qkv", qkv, 3, packed=False)
            options = options_of(softmax_scale, causal, window_size, softcap, deterministic)
            options["alibi_slopes"] = alibi_slopes
            return cls._attend((qkv,), dropout_p, dropout_rng, return_attn_probs, options)
        except (SpecError, TypeError) as error:
            raise renamed(error, SELF_PACKED) from None

    @classmethod
    def flash_attn_kvpacked_func(
        cls,
        q: Array,
        kv: Array,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: Array | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        *,
        dropout_rng: Random | None = None,
    ) -> Array | tuple[Array, Array, Array]:
        """Computes ``flash_attn.flash_attn_kvpacked_func(...)``.

        Args:
            q: ``[batch, seqlen_q, heads, head_dim]``.
            kv: ``[batch, seqlen_k, 2, kv_heads, head_dim]``.

        The other arguments, the results and the errors are those of ``flash_attn_func``.
        """
        try:
            k, v = cls._unpacked(kv, packed=False)
            options = options_of(softmax_scale, causal, window_size, softcap, deterministic)
            options["alibi_slopes"] = alibi_slopes
            return cls._attend((q, k, v), dropout_p, dropout_rng, return_attn_probs, options)
        except (SpecError, TypeError) as error:
            raise renamed(error, KEYS_PACKED) from None

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
        dropout_rng: Random | None = None,
    ) -> Array | tuple[Array, Array, Array]:
        """Computes ``flash_attn.flash_attn_varlen_func(...)`` on packed documents, with its gradients.

        Args:
            q: ``[total_q, heads, head_dim]``; k, v: ``[total_k, kv_heads, head_dim]``. With block_table they are a pool
                ``[num_pages, page_size, kv_heads, head_dim]`` of any page size, without gradients and dropout.
            cu_seqlens_q, cu_seqlens_k: int32 ``[documents + 1]``, the offsets of the documents.
            max_seqlen_q, max_seqlen_k: ints on the host, at least the longest document.
            alibi_slopes: ``[heads]``, or ``[documents, heads]``: outside of pages on backends with score functions.
            block_table: int32 ``[documents, width]``: each document's pages in order. cu_seqlens_k then counts its
                keys.

        The other arguments and the errors are those of ``flash_attn_func``; the diagonals lie in each document.

        Returns:
            ``[total_q, heads, head_dim]``; with return_attn_probs also softmax_lse, float32 ``[heads, total_q]``, and
            S_dmask, empty without dropout, else ``[documents, heads, max_seqlen_q, max_seqlen_k]``.
        """
        names = OPTIONS if block_table is None else VARLEN_PAGES
        try:
            info = documents_of(cls.frontend, q, (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k))
            options = options_of(softmax_scale, causal, window_size, softcap, deterministic)
            if block_table is not None:
                if check_number("dropout_p", dropout_p):
                    raise SpecError(
                        f"dropout_p={dropout_p}: expected 0 with block_table, because pages are for inference"
                    )
                options |= {"alibi_slopes": alibi_slopes, "block_table": block_table}
                return cls._attend_in_pages(q, (k, v), info, return_attn_probs, options)
            options |= {"seq_info": info, **with_slopes(cls.frontend, q, k, info, alibi_slopes)}
            return cls._attend((q, k, v), dropout_p, dropout_rng, return_attn_probs, options)
        except (SpecError, TypeError) as error:
            raise renamed(error, names) from None

    @classmethod
    def flash_attn_varlen_qkvpacked_func(
        cls,
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
        dropout_rng: Random | None = None,
    ) -> Array | tuple[Array, Array, Array]:
        """Computes ``flash_attn.flash_attn_varlen_qkvpacked_func(...)``.

        Args:
            qkv: ``[total, 3, heads, head_dim]``.
            cu_seqlens: int32 ``[documents + 1]``. max_seqlen: an int on the host, at least the longest document.

        The other arguments, the results and the errors are those of ``flash_attn_varlen_func``.
        """
        try:
            cls.frontend.check_array("qkv", qkv)
            check_packed("qkv", qkv, 3, packed=True)
            info = documents_of(cls.frontend, qkv, (cu_seqlens, cu_seqlens), (max_seqlen, max_seqlen), ("", ""))
            options = options_of(softmax_scale, causal, window_size, softcap, deterministic)
            parts: Any = qkv  # [total, q or k or v, heads, head_dim]
            options |= {"seq_info": info, **with_slopes(cls.frontend, parts[:, 0], parts[:, 1], info, alibi_slopes)}
            return cls._attend((qkv,), dropout_p, dropout_rng, return_attn_probs, options)
        except (SpecError, TypeError) as error:
            raise renamed(error, SELF_PACKED) from None

    @classmethod
    def flash_attn_varlen_kvpacked_func(
        cls,
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
        dropout_rng: Random | None = None,
    ) -> Array | tuple[Array, Array, Array]:
        """Computes ``flash_attn.flash_attn_varlen_kvpacked_func(...)``.

        Args:
            q: ``[total_q, heads, head_dim]``. kv: ``[total_k, 2, kv_heads, head_dim]``.

        The other arguments, the results and the errors are those of ``flash_attn_varlen_func``.
        """
        try:
            k, v = cls._unpacked(kv, packed=True)
            info = documents_of(cls.frontend, q, (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k))
            options = options_of(softmax_scale, causal, window_size, softcap, deterministic)
            options |= {"seq_info": info, **with_slopes(cls.frontend, q, k, info, alibi_slopes)}
            return cls._attend((q, k, v), dropout_p, dropout_rng, return_attn_probs, options)
        except (SpecError, TypeError) as error:
            raise renamed(error, KEYS_PACKED) from None

    @classmethod
    def flash_attn_with_kvcache(
        cls,
        q: Array,
        k_cache: Array,
        v_cache: Array,
        k: Array | None = None,
        v: Array | None = None,
        rotary_cos: Array | None = None,
        rotary_sin: Array | None = None,
        cache_seqlens: int | Array | None = None,
        cache_batch_idx: Array | None = None,
        cache_leftpad: Array | None = None,
        block_table: Array | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        rotary_interleaved: bool = True,
        alibi_slopes: Array | None = None,
        num_splits: int = 0,
        return_softmax_lse: bool = False,
    ) -> Array | tuple[Array, ...]:
        """Computes ``flash_attn.flash_attn_with_kvcache(...)``: appends in place, rotates, and attends.

        JAX's arrays are immutable, so there it returns the caches, too. Outside of jit a call with k donates k_cache
        and v_cache: JAX reuses their memory and deletes the arrays that you passed. Inside your own jit, donate them
        there.

        Args:
            q: ``[batch, seqlen_q, heads, head_dim]``.
            k_cache, v_cache: ``[rows, length, kv_heads, head_dim]``; with block_table pages ``[num_pages, page_size,
                kv_heads, head_dim]`` of any page size. Without gradients.
            k, v: ``[batch, seqlen_new, kv_heads, head_dim]``: written to the cache behind its cache_seqlens tokens.
            rotary_cos, rotary_sin: ``[max_positions, rotary_dim / 2]``: rotate k and q, and need k. Token i stands at
                position ``cache_seqlens + i``. Without causal and window, every query stands at ``cache_seqlens``.
            cache_seqlens: the tokens in the cache before the call, an int or int32 ``[batch]``; all of it if None.
            cache_batch_idx: int32 ``[batch]``: the row of the cache of each sequence; row i for sequence i if None.
            cache_leftpad: int32 ``[batch]``: the first key of each sequence; the keys before it are hidden.
            block_table: int32 ``[batch, width]``: each sequence's pages in order. It excludes the two arguments before.
            rotary_interleaved: pairs of channels are ``(2i, 2i + 1)``, else ``(i, i + rotary_dim / 2)``.
            num_splits: a hint about speed without effect: kernels split the keys as they like.
            return_softmax_lse: return ``(out, softmax_lse)``.

        The other arguments are those of ``flash_attn_func``. Diagonals end at the last key, new tokens included.

        Returns:
            ``[batch, seqlen_q, heads, head_dim]``, and softmax_lse, float32 ``[batch, heads, seqlen_q]``, natural log,
            +inf for a query that sees no key. In JAX ``(out, k_cache, v_cache)`` or ``(out, softmax_lse, k_cache,
            v_cache)``.

        Raises:
            ShapeError, DTypeError, DeviceError, SpecError, TypeError: naming the argument. The values of tables on the
                host are checked. Those on a GPU are not read: they are clamped, and a token without a place is not
                written.
            NoBackendError: if no backend can run the call; the message has every reason.
        """
        call = Cached(q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad)
        call = call._replace(block_table=block_table, alibi_slopes=alibi_slopes)
        try:
            check_hints(num_splits=num_splits)
            options = options_of(softmax_scale, causal, window_size, softcap, False)
            options["return_lse"] = check_flag("return_softmax_lse", return_softmax_lse)
            interleaved = check_flag("rotary_interleaved", rotary_interleaved)
            results, caches = attend(cls.frontend, call, interleaved, options)
        except (SpecError, TypeError) as error:
            raise renamed(error, CACHE) from None
        if not return_softmax_lse:
            return cls.frontend.with_caches((results,), caches)
        out, lse = results
        return cls.frontend.with_caches((out, lse_of_flash_attn(cls.frontend, lse)), caches)

    @classmethod
    def _unpacked(cls, kv: Array, packed: bool) -> tuple[Array, Array]:
        cls.frontend.check_array("kv", kv)
        check_packed("kv", kv, 2, packed)
        k, v = cls.frontend.unstack(kv, 1 if packed else 2)
        return k, v

    @classmethod
    def _attend(
        cls, arrays: tuple[Array, ...], dropout: Any, rng: Any, with_weights: Any, options: dict[str, Any]
    ) -> Array | tuple[Array, Array, Array]:
        """Returns the results for q, k and v, or for qkv alone. with_weights: return_attn_probs. options: keywords of
        ``attention``."""
        frontend, as_one = cls.frontend, len(arrays) == 1
        if check_flag("return_attn_probs", with_weights):
            # [tokens, 3, heads, dim], or with a batch axis in front
            qkv = frontend.unstack(arrays[0], 1 if "seq_info" in options else 2) if as_one else arrays
            return _with_weights(frontend, qkv, check_number("dropout_p", dropout), rng, options)
        attention = frontend.attention_qkvpacked if as_one else frontend.attention
        return attention(*arrays, dropout=dropout, dropout_rng=rng, **options)  # type: ignore[no-any-return]

    @classmethod
    def _attend_in_pages(
        cls, q: Array, pools: tuple[Array, Array], info: SeqInfo, with_lse: bool, options: dict[str, Any]
    ) -> Array | tuple[Array, Array, Array]:
        """Returns the results for keys in pages. options: keywords of ``paged_attention``."""
        frontend = cls.frontend
        with_lse = check_flag("return_attn_probs", with_lse)
        k, v = pools
        for name, pool in (("k", k), ("v", v)):
            frontend.check_array(name, pool)
            if pool.dtype != q.dtype:  # these functions have no scales for quantised pages
                raise DTypeError(f"{name}: expected the dtype of q, {q.dtype}, got {pool.dtype}; cast it")
        options |= {"max_len_q": info.max_len_q, "return_lse": with_lse, "cu_seqlens_q": info.cu_seqlens_q}
        options["seq_lens"] = frontend.numpy.diff(info.cu_seqlens_k)
        results, _ = frontend.without_gradient(
            lambda: (frontend.paged_attention(q, k, v, **options), pools),
            **{"q": q, "k": k, "v": v, "alibi_slopes": options["alibi_slopes"]},
        )
        if not with_lse:
            return results
        out, lse = results
        return out, lse_of_flash_attn(frontend, lse), frontend.empty(q, q.dtype)


def lse_of_flash_attn(frontend: Frontend, lse: Array) -> Array:
    """Returns a log-sum-exp in flash-attn 2's convention: +inf, not -inf, for a query that sees no key."""
    infinity = frontend.numpy.inf
    return frontend.numpy.where(lse == -infinity, infinity, lse)


def _with_weights(
    frontend: Frontend, qkv: tuple[Array, ...], dropout: float | None, rng: Any, options: dict[str, Any]
) -> tuple[Any, Any, Any]:
    """Returns (out, softmax_lse, S_dmask).

    Args:
        qkv: q, k and v of ``attention``.
        options: its other keywords, among them seq_info, a SeqInfo with offsets on q's device, for packed arrays.
    """
    q, k, v = qkv
    if not dropout:
        out, lse = frontend.attention(q, k, v, return_lse=True, dropout_rng=rng, **options)
        return out, lse_of_flash_attn(frontend, lse), frontend.empty(q, q.dtype)
    for name, array in (("q", q), ("k", k), ("v", v)):
        frontend.check_array(name, array)
    drops = {"dropout": dropout, **options, "backend": frontend.portable()}
    again = frontend.repeated(rng)
    out, lse = frontend.attention(q, k, v, return_lse=True, dropout_rng=rng, **drops)
    # The weights are the output for values that are rows of an identity, which these backends alone take so wide.
    q, k = (frontend.cast(frontend.stop_gradient(array), frontend.numpy.float32) for array in (q, k))
    values = _identity(frontend, k, options.get("seq_info"))
    weights = frontend.attention(q, k, values, **options, backend=frontend.portable())
    after_dropout = frontend.attention(q, k, values, dropout_rng=again, **drops)
    is_dropped = (after_dropout == 0) & (weights > 0)
    weights = _by_largest(frontend, weights)
    signed = frontend.cast(frontend.numpy.where(is_dropped, -weights, weights), out.dtype)
    return out, lse_of_flash_attn(frontend, lse), _by_document(frontend, signed, options.get("seq_info"))


def _identity(frontend: Frontend, k: Array, info: SeqInfo | None) -> Any:
    """Returns float32 values ``[..., kv_len, kv_heads, width]``, 1 at the place of their key in its row or document."""
    numpy, device, (length, heads) = frontend.numpy, frontend.device(k), k.shape[-3:-1]
    places, width = numpy.arange(length, device=device), length
    if info is not None:
        _, places = places_in_documents(frontend, info.cu_seqlens_k, length)
        width = info.max_len_k
    rows = frontend.cast(places[:, None] == numpy.arange(width, device=device), numpy.float32)
    return numpy.broadcast_to(rows[:, None], (*k.shape[:-3], length, heads, width))


def _by_largest(frontend: Frontend, weights: Any) -> Any:
    """Returns the weights of each row divided by its largest."""
    if not weights.shape[-1]:
        return weights
    largest = frontend.numpy.amax(weights, -1)[..., None]
    return weights / frontend.numpy.where(largest > 0, largest, 1.0)


def _by_document(frontend: Frontend, weights: Any, info: SeqInfo | None) -> Any:
    """Returns weights ``[batch, heads, q_len, kv_len]`` of ``[batch, q_len, heads, kv_len]`` or packed ones."""
    if info is None:
        return weights.swapaxes(1, 2)
    numpy, device = frontend.numpy, frontend.device(weights)
    tokens, offsets = weights.shape[0], info.cu_seqlens_q
    at = offsets[:-1, None] + numpy.arange(info.max_len_q, dtype=numpy.int32, device=device)
    at = numpy.where(at < offsets[1:, None], at, tokens).clip(0, tokens)  # [documents, max_len_q]
    no_token = numpy.zeros((1, *weights.shape[1:]), dtype=weights.dtype, device=device)
    return numpy.concatenate((weights, no_token))[at].swapaxes(1, 2)
