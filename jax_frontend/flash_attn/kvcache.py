"""flash_attn_with_kvcache with the arguments of flash-attn 2.8, for JAX arrays."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from attn_core.call.arguments import ArrayFacts
from attn_core.call.options import check_flag
from attn_core.call.seq_info import is_host_int
from attn_core.dropins.flash_attn import CACHE, check_hints, options_of, renamed
from attn_core.dropins.flash_attn_cache import (
    Cached,
    check_combination,
    check_facts,
    check_positions,
    check_values,
    whole_length,
)
from attn_core.errors import SpecError
from attn_core.paged.options import check_paged_options
from jax_frontend.attention import attention
from jax_frontend.dispatch import explicit_axes, plan
from jax_frontend.flash_attn.probabilities import lse_of_flash_attn, places_in_documents
from jax_frontend.paged.append import append_kv
from jax_frontend.paged.attention import paged_attention
from jax_frontend.paged.rotary import apply_rotary
from jax_frontend.paged.tables import is_on_host

Array = jax.Array


def flash_attn_with_kvcache(
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
) -> tuple[Array, ...]:
    """Computes ``flash_attn.flash_attn_with_kvcache(...)``: appends, rotates, and attends.

    Arrays are immutable, so it returns the caches, too. Outside of jit a call with k donates k_cache and v_cache: JAX
    reuses their memory and deletes the arrays that you passed. Inside your own jit, donate them there.

    Args:
        q: ``[batch, seqlen_q, heads, head_dim]``.
        k_cache, v_cache: ``[rows, length, kv_heads, head_dim]``; with block_table pages ``[num_pages, page_size,
            kv_heads, head_dim]`` of any page size. Without gradients.
        k, v: ``[batch, seqlen_new, kv_heads, head_dim]``: written to the cache behind its cache_seqlens tokens.
        rotary_cos, rotary_sin: ``[positions, rotary_dim / 2]``: rotate k and q, and need k. Token i stands at position
            ``cache_seqlens + i``. Without causal and window, every query stands at ``cache_seqlens``.
        cache_seqlens: the tokens in the cache before the call, an int or int32 ``[batch]``; all of it if None.
        cache_batch_idx: int32 ``[batch]``: the row of the cache of each sequence; row i for sequence i if None.
        cache_leftpad: int32 ``[batch]``: the first key of each sequence; the keys before it are hidden.
        block_table: int32 ``[batch, width]``: each sequence's pages in order. It excludes the two arguments before.
        rotary_interleaved: pairs of channels are ``(2i, 2i + 1)``, else ``(i, i + rotary_dim / 2)``.
        num_splits: a hint about speed without effect: kernels split the keys as they like.
        return_softmax_lse: return the log-sum-exp behind out.

    The other arguments are those of ``flash_attn_func``. Diagonals end at the last key, new tokens included.

    Returns:
        ``(out, k_cache, v_cache)``, out ``[batch, seqlen_q, heads, head_dim]``; with return_softmax_lse ``(out,
        softmax_lse, k_cache, v_cache)``, float32 ``[batch, heads, seqlen_q]``, natural log, +inf for a query that sees
        no key.

    Raises:
        ShapeError, DTypeError, DeviceError, SpecError, TypeError: naming the argument. The values of tables on the host
            are checked. Others are clamped, and a token without a place is not written.
        NoBackendError: if no backend can run the call; the message has every reason.
    """
    call = Cached(q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad)
    call = call._replace(block_table=block_table, alibi_slopes=alibi_slopes)
    try:
        check_hints(num_splits=num_splits)
        options = options_of(softmax_scale, causal, window_size, softcap, False)
        options["return_lse"] = check_flag("return_softmax_lse", return_softmax_lse)
        results, caches = attend(call, check_flag("rotary_interleaved", rotary_interleaved), options)
    except (SpecError, TypeError) as error:
        raise renamed(error, CACHE) from None
    if not return_softmax_lse:
        return results, *caches
    out, lse = results
    return out, lse_of_flash_attn(lse), *caches


def attend(
    call: Cached, interleaved: bool, options: dict[str, Any], table: str = "block_table", longest: int | None = None
) -> Any:
    """Appends, rotates and attends. Returns the output, or (output, log-sum-exp), in the shape of q; and both caches.

    Args:
        options: keywords of ``paged_attention``.
        table: the caller's name of ``block_table``.
        longest: with cu_seqlens_q, a host int, at least the most queries of a sequence.
    """
    check_combination(call, table)
    names = ("causal", "window", "softcap", "scale", "deterministic", "return_lse")
    check_paged_options(
        **{name: options[name] for name in names}, max_len_q=longest
    )  # all checks come before the first write
    call, before = _checked(call, table)
    whole = call.block_table is call.cache_batch_idx is call.cache_leftpad is call.cu_seqlens_q is before is None
    if whole and call.k_cache.shape[0] == call.q.shape[0]:
        results = attention(call.q, call.k_cache, call.v_cache, alibi_slopes=call.alibi_slopes, **options)
        return results, (call.k_cache, call.v_cache)
    arrays = {name: array for name, array in call._replace(cache_seqlens=before)._asdict().items() if array is not None}
    run, mesh = partial(_in_pages, interleaved, options, longest), explicit_axes.explicit_mesh(arrays)
    if mesh is None:
        return run(arrays)
    *rows, heads, _ = (*explicit_axes.spec_of(call.q), *(None,) * 4)[: call.q.ndim]
    rows = rows[:-1]  # the batch, unless q is packed: tokens are whole
    out = (P(*rows, None, heads), P(*rows, heads)) if options["return_lse"] else P(*rows, None, heads)
    specs = out, tuple(map(explicit_axes.spec_of, (call.k_cache, call.v_cache)))
    return explicit_axes.as_auto(run, mesh, specs)(arrays)


def _in_pages(interleaved: bool, options: dict[str, Any], longest: int | None, arrays: dict[str, Array]) -> Any:
    """Appends, rotates and attends on pages. arrays: the fields of ``Cached`` that the call has."""
    call = Cached(*map(arrays.get, Cached._fields))
    before, new = call.cache_seqlens, 0 if call.k is None else call.k.shape[1]
    batch = len(call.q) if call.cu_seqlens_q is None else call.cu_seqlens_q.shape[0] - 1
    pages = call.block_table
    if pages is None:
        index = call.cache_batch_idx
        pages = (jnp.arange(batch, dtype=jnp.int32) if index is None else index)[:, None]
    if before is None:
        before = jnp.full(batch, pages.shape[1] * call.k_cache.shape[1], jnp.int32)
    seq_lens = before + new if new else before
    q, shape = call.q, call.q.shape[:-2]
    if call.rotary_cos is not None:  # before anything is written, because it may find a position that the tables lack
        banded = options["causal"] or options["window"] is not None
        positions = _positions(before, call.q, call.cu_seqlens_q, banded)
        q = apply_rotary(q, call.rotary_cos, call.rotary_sin, positions=positions, interleaved=interleaved)
    caches = _append(call, pages, seq_lens, interleaved) if new else (call.k_cache, call.v_cache)
    how = {**options, "block_table": pages, "seq_lens": seq_lens}
    if call.cu_seqlens_q is not None:
        how |= {"cu_seqlens_q": call.cu_seqlens_q, "max_len_q": longest}
    elif shape[1] != 1:
        how |= {"cu_seqlens_q": _offsets(batch, shape[1]), "max_len_q": shape[1]}
    if call.alibi_slopes is not None:
        how["alibi_slopes"] = call.alibi_slopes
    if call.cache_leftpad is not None:
        how["kv_starts"] = call.cache_leftpad
    results = paged_attention(q.reshape(-1, *q.shape[-2:]), *caches, **how)
    if call.cu_seqlens_q is not None:
        return results, caches
    out, lse = results if options["return_lse"] else (results, None)
    out = out.reshape(*shape, *out.shape[1:])  # [batch * seqlen_q, heads, dim] -> [batch, seqlen_q, heads, dim]
    if lse is None:
        return out, caches
    # [heads, batch * seqlen_q] -> [batch, heads, seqlen_q]
    return (out, lse.reshape(-1, *shape).swapaxes(0, 1)), caches


def _checked(call: Cached, table: str) -> tuple[Cached, Array | None]:
    """Returns the call, checked, and its cache_seqlens as an array, or None for the whole length."""
    seqlens = call.cache_seqlens
    single = is_host_int(seqlens)
    call = call._replace(cache_seqlens=None) if single else call
    for name, array in call._asdict().items():
        if array is not None:
            plan.check_array(table if name == "block_table" else name, array)
    check_facts(Cached(*[None if a is None else ArrayFacts(a.shape, str(a.dtype), "") for a in call]), table)
    new = 0 if call.k is None else call.k.shape[1]
    width = 1 if call.block_table is None else call.block_table.shape[1]
    capacity, rows = width * call.k_cache.shape[1], call.k_cache.shape[0]
    if single:
        batch = len(call.q) if call.cu_seqlens_q is None else call.cu_seqlens_q.shape[0] - 1
        length = whole_length(seqlens, capacity, new)
        seqlens = jnp.full(batch, length, jnp.int32)
    tables = (seqlens, call.cache_batch_idx, call.cache_leftpad)
    if all([each is None or is_on_host(each) for each in tables]):
        on_host = [None if each is None else np.asarray(each) for each in tables]
        check_values((on_host[0], on_host[1], on_host[2]), capacity, rows, new)
        if call.rotary_cos is not None:
            check_positions(on_host[0], new, call.rotary_cos.shape[0])
    return call, seqlens


def _append(call: Cached, pages: Array, seq_lens: Array, interleaved: bool) -> tuple[Array, Array]:
    batch, new = call.k.shape[:2]
    tables: dict[str, Any] = {"block_table": pages, "seq_lens": seq_lens}
    if new != 1:
        tables["cu_seqlens_q"] = _offsets(batch, new)
    if call.rotary_cos is not None:
        tables |= {"rotary": (call.rotary_cos, call.rotary_sin), "rotary_interleaved": interleaved}
    k, v = (array.reshape(-1, *array.shape[2:]) for array in (call.k, call.v))
    k_cache, v_cache = append_kv(call.k_cache, call.v_cache, k, v, **tables)
    return k_cache, v_cache


def _positions(before: Array, q: Array, offsets: Array | None, banded: bool) -> Array:
    """Returns the rotary position of each query, int32 ``[batch, seqlen_q]`` or, with offsets, ``[tokens]``."""
    if offsets is not None:
        documents, places = places_in_documents(offsets, q.shape[0])
        first = before[jnp.minimum(documents, before.shape[0] - 1)]
        return first + places if banded else first
    if not banded or q.shape[1] == 1:
        return jnp.broadcast_to(before[:, None], q.shape[:2])
    return before[:, None] + jnp.arange(q.shape[1], dtype=jnp.int32)


def _offsets(batch: int, tokens: int) -> Array:
    return jnp.arange(0, batch * tokens + 1, tokens, dtype=jnp.int32)
