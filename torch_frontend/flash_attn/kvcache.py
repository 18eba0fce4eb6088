"""flash_attn_with_kvcache with the arguments of flash-attn 2.8, for torch tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from attn_core.call.options import check_flag
from attn_core.call.seq_info import is_host_int
from attn_core.dropins.flash_attn import CACHE, check_hints, options_of, renamed
from attn_core.dropins.flash_attn_cache import (
    Cached,
    check_combination,
    check_facts,
    whole_length,
)
from attn_core.errors import SpecError
from attn_core.paged.options import check_paged_options
from torch_frontend.attention import attention
from torch_frontend.dispatch import plan, tensor_kinds
from torch_frontend.flash_attn import seen_kvcache
from torch_frontend.flash_attn.cache_steps import (
    append,
    check_host_values,
    planned,
    positions_by_offsets,
    positions_of,
)
from torch_frontend.flash_attn.inference import without_gradient
from torch_frontend.flash_attn.probabilities import lse_of_flash_attn
from torch_frontend.paged import constant_tables
from torch_frontend.paged.attention import paged_attention
from torch_frontend.paged.dense_caches import in_rows
from torch_frontend.paged.plan import run
from torch_frontend.paged.rotary import apply_rotary

Tensor = torch.Tensor


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes ``flash_attn.flash_attn_with_kvcache(...)``: appends in place, rotates, and attends.

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
        return_softmax_lse: return ``(out, softmax_lse)``.

    The other arguments are those of ``flash_attn_func``. Diagonals end at the last key, new tokens included.

    Returns:
        ``[batch, seqlen_q, heads, head_dim]``, and softmax_lse, float32 ``[batch, heads, seqlen_q]``, natural log, +inf
        for a query that sees no key.

    Raises:
        ShapeError, DTypeError, DeviceError, SpecError, TypeError: naming the argument. The values of tables on the CPU
            are checked. On a GPU they are not read: they are clamped, and a token without a place is not written.
        NoBackendError: if no backend can run the call; the message has every reason.
    """
    call = Cached(
        *(q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad),
        *(block_table, None, alibi_slopes),
    )
    try:
        check_hints(num_splits=num_splits)
        options = options_of(softmax_scale, causal, window_size, softcap, False)
        options["return_lse"] = check_flag("return_softmax_lse", return_softmax_lse)
        results = attend(call, check_flag("rotary_interleaved", rotary_interleaved), options)
    except (SpecError, TypeError) as error:
        raise renamed(error, CACHE) from None
    if not return_softmax_lse:
        return results  # type: ignore[no-any-return]
    out, lse = results
    return out, lse_of_flash_attn(lse)


def attend(
    call: Cached,
    interleaved: bool,
    options: dict[str, Any],
    table: str = "block_table",
    longest: int | None = None,
    names: Mapping[str, str] = CACHE,
) -> Any:
    """Appends, rotates and attends. Returns the output, or (output, log-sum-exp), in the shape of q.

    A backward through the results is refused, except for a whole cache.

    Args:
        names: the caller's names of arguments. The others are those of ``_attend``.
    """
    results = seen_kvcache.attend(call, interleaved, options, table, longest)
    if results is not None:
        return results
    if _is_whole(call):
        return _attend(call, interleaved, options, table, longest)
    tensors = call._asdict() | {"sinks": options.get("sinks")}
    named = {names.get(name, name): tensor for name, tensor in tensors.items() if tensor is not None}
    with tensor_kinds.mode_around(call.q):
        return without_gradient(lambda: _attend(call, interleaved, options, table, longest), **named)


def _is_whole(call: Cached) -> bool:
    """Returns whether every sequence has all keys of its own row."""
    places = (call.cache_seqlens, call.block_table, call.cache_batch_idx, call.cache_leftpad, call.cu_seqlens_q)
    return all([each is None for each in places])


def _attend(  # noqa: C901
    call: Cached, interleaved: bool, options: dict[str, Any], table: str = "block_table", longest: int | None = None
) -> Any:
    """``attend`` without gradients.

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
    new = 0 if call.k is None else call.k.shape[1]
    if _is_whole(call) and before is None and call.k_cache.shape[0] == call.q.shape[0]:
        return attention(call.q, call.k_cache, call.v_cache, alibi_slopes=call.alibi_slopes, **options)
    device = call.q.device
    batch = len(call.q) if call.cu_seqlens_q is None else call.cu_seqlens_q.shape[0] - 1
    pages = call.block_table
    if pages is None:
        index = call.cache_batch_idx
        pages = constant_tables.rows_as_table(batch, device) if index is None else index[:, None]
    if before is None:
        before = torch.full((batch,), pages.shape[1] * call.k_cache.shape[1], dtype=torch.int32, device=device)
    seq_lens = before + new if new else before
    # In a trace sizes are tensors, which options do not take.
    q, shape = call.q, [int(size) if isinstance(size, Tensor) else size for size in call.q.shape[:-2]]
    if call.rotary_cos is not None:  # before anything is written, because it may find a position that the tables lack
        banded = options["causal"] or options["window"] is not None
        offsets = call.cu_seqlens_q
        if offsets is None:
            positions = positions_of(before, shape[1], banded)
        else:
            positions = positions_by_offsets(before, len(call.q), offsets, banded)
        q = apply_rotary(q, call.rotary_cos, call.rotary_sin, positions=positions, interleaved=interleaved)
    how = {**options, "block_table": pages, "seq_lens": seq_lens}
    if call.cu_seqlens_q is not None:
        how |= {"cu_seqlens_q": call.cu_seqlens_q, "max_len_q": longest}
    elif shape[1] != 1:
        how |= {"cu_seqlens_q": constant_tables.equal_offsets(batch, shape[1], device), "max_len_q": shape[1]}
    if call.alibi_slopes is not None:
        how["alibi_slopes"] = call.alibi_slopes
    if call.cache_leftpad is not None:
        how["kv_starts"] = call.cache_leftpad
    tensors = q.flatten(0, -3), call.k_cache, call.v_cache
    if new and not (torch.compiler.is_compiling() or tensor_kinds.is_watched(q)):
        arguments = planned(tensors, how)  # before anything is written, because it may find no backend
        append(call, pages, seq_lens, interleaved)
        pair = run(*arguments, None)
        results: Any = pair if options["return_lse"] else pair[0]
    else:
        if new:
            append(call, pages, seq_lens, interleaved)
        results = paged_attention(*tensors, **how)
    if call.cu_seqlens_q is not None:
        return results
    both = results if options["return_lse"] else (results, None)
    return in_rows(both, call.q, options["return_lse"])


def _checked(call: Cached, table: str) -> tuple[Cached, Tensor | None]:
    """Returns the call, checked, and its cache_seqlens as a tensor, or None for the whole length."""
    seqlens = call.cache_seqlens
    single = is_host_int(seqlens)
    call = call._replace(cache_seqlens=None) if single else call
    for name, tensor in call._asdict().items():
        if tensor is not None:
            plan.check_tensor(table if name == "block_table" else name, tensor)
    check_facts(Cached(*[None if t is None else plan.facts(t.shape, t.dtype, t.device) for t in call]), table)
    new = 0 if call.k is None else call.k.shape[1]
    width = 1 if call.block_table is None else call.block_table.shape[1]
    capacity = width * call.k_cache.shape[1]
    if single:
        batch = len(call.q) if call.cu_seqlens_q is None else call.cu_seqlens_q.shape[0] - 1
        length = whole_length(seqlens, capacity, new)
        seqlens = torch.full((batch,), length, dtype=torch.int32, device=call.q.device)
    if call.q.is_cpu and not torch.compiler.is_compiling() and not tensor_kinds.is_watched(call.q):
        check_host_values(call, seqlens, capacity, new)
    return call, seqlens
