"""Attention on keys and values in pages of a pool, for torch tensors: decoding, chunked prefill, and appending."""

from __future__ import annotations

from typing import Any, Literal, Never, Unpack, overload

import torch

from attn_core.call.hints import hide_unknown, refuse_keywords
from attn_core.call.keywords import PagedKeywords
from attn_core.call.options import is_plain_window, requested_names
from attn_core.call.tensors import PagedInputs
from attn_core.paged.arguments import check_choice
from attn_core.paged.rotary import COS, SIN, pair_of
from torch_frontend.dispatch.backend_names import join_names
from torch_frontend.dispatch.plan import check_tensor
from torch_frontend.dispatch.tensor_kinds import is_watched
from torch_frontend.paged import (
    ops,  # noqa: F401  registers the ops that compilers trace
    paged_calls,
)
from torch_frontend.paged.append import append, check_appended
from torch_frontend.paged.outputs import check_out, copied
from torch_frontend.paged.places import Places, op_places
from torch_frontend.paged.plan import check_no_gradient, check_numbers, check_op, gather_arguments, options_of, run

Tensor = torch.Tensor


class Keywords(PagedKeywords[Tensor], total=False):
    """The keywords of ``paged_attention``, without return_lse."""

    out: Tensor | None


@overload
def paged_attention(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, *, return_lse: Literal[False] = False, **options: Unpack[Keywords]
) -> Tensor: ...
@overload
def paged_attention(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, *, return_lse: Literal[True], **options: Unpack[Keywords]
) -> tuple[Tensor, Tensor]: ...
@overload
def paged_attention(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, *, return_lse: bool, **options: Unpack[Keywords]
) -> Tensor | tuple[Tensor, Tensor]: ...
@hide_unknown
def paged_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    *,
    block_table: Any,
    seq_lens: Any,
    cu_seqlens_q: Any = None,
    max_len_q: int | None = None,
    causal: bool = True,
    window: int | tuple[int | None, int | None] | None = None,
    key_ranges: Any = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    deterministic: bool = False,
    backend: str | tuple[str, ...] | None = None,
    return_lse: bool = False,
    alibi_slopes: Tensor | None = None,
    kv_starts: Any = None,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
    out: Tensor | None = None,
    invariant: str | None = None,
    **unknown: Never,
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes attention of each sequence's new tokens to its keys and values in pages: decoding or chunked prefill.

    Query i of a sequence with n new tokens out of N sees key ``j <= i + N - n``; windows align to the same diagonal.
    The pages must already hold the new tokens' own keys and values: call ``append_kv`` first. Inference only.

    Args:
        q: ``[tokens, heads, head_dim]``, the new tokens of all sequences end to end.
        k_pages: ``[num_pages, page_size, kv_heads, head_dim]``, the pool; any strides with dense channels. In q's
            dtype, or quantised: float8_e4m3fn, int8, or uint8 with two int4 numbers a byte, ``head_dim / 2`` wide.
        v_pages: ``[num_pages, page_size, kv_heads, value_dim]``, in the dtype of k_pages.
        block_table: int32 ``[batch, width]``: each sequence's pages in order, -1 behind them. A tensor on q's device,
            or a numpy array, which is checked and copied there.
        seq_lens: int32 ``[batch]``: the length of each sequence, its new tokens included.
        cu_seqlens_q: int32 ``[batch + 1]``, the offsets of the sequences in q; None if each has one new token.
        max_len_q: an int on the host, at least the most new tokens of a sequence; the tokens of q if None.
        causal, window, softcap, scale, sinks, deterministic, invariant: as in ``attention``.
        key_ranges: int32 ``[1, kv_heads or 1, tokens, 1 or 2, 2]``, a mask among the new tokens: token i of q sees the
            key of token j if ``start <= i < stop`` for a range of row j. Every query sees the keys before the new
            tokens. Causal and window hide further keys. ``attn_core.masks.tree`` builds the mask of a tree of drafts.
        backend: a name, which runs or raises; names in order of preference; or None for automatic choice.
        return_lse: also return the log-sum-exp, ``[heads, tokens]``, natural log, float32.
        alibi_slopes: float ``[heads]`` or ``[sequences, heads]``: adds ``-slope * |i + N - n - j|``.
        kv_starts: int32 ``[sequences]``: no query sees a key of its sequence before this one (padding on the left).
        k_scales, v_scales: the scales of quantised pages, float32 ``[num_pages, page_size, kv_heads]`` or ``[num_pages,
            kv_heads]``: a number of the pool is ``stored * scale``. On the CPU the scales in use must be positive and
            finite; on a GPU they are not checked, and a NaN reaches the result.
        out: a buffer for the output, of q's dtype and device, with dense channels, apart from the memory of q and the
            pages. A kernel that can writes into it; other results are copied there. It is the output.

    Returns:
        The output ``[tokens, heads, value_dim]``; or ``(output, lse)``. A query that sees no key has output 0 and its
        sink, or -inf, as lse. A query behind the last offset has output 0 and lse -inf.

    Raises:
        ShapeError, DTypeError, DeviceError, SpecError: for invalid arguments. The values of tables on the CPU are
            checked. The values of tables on a GPU are not: kernels clamp them into range.
        NoBackendError: if no backend, or not the requested one, can run the call; the message has every reason.
    """
    if unknown:
        refuse_keywords(paged_attention, unknown)
    # A call like an earlier one runs what that one prepared.
    if key_ranges is alibi_slopes is kv_starts is out is None and (
        type(window) is not tuple or is_plain_window(window)
    ):
        plain = causal, window, softcap, scale, deterministic, return_lse, max_len_q, invariant
        beside = sinks, cu_seqlens_q, k_scales, v_scales
        results = paged_calls.attend(q, k_pages, v_pages, block_table, seq_lens, *beside, plain, backend)
        if results is not None:
            return results if return_lse else results[0]
    options = options_of(causal, window, softcap, scale, deterministic, return_lse, max_len_q, invariant)
    tables, scales = (block_table, seq_lens, cu_seqlens_q), (k_scales, v_scales)
    given = PagedInputs(q, k_pages, v_pages, *tables, sinks, key_ranges, alibi_slopes, kv_starts, *scales)
    if torch.compiler.is_compiling() or is_watched(q):
        # While compiling, sizes are symbols; the op checks the other arguments when it runs.
        if torch.compiler.is_compiling():
            check_numbers(given)
        else:
            given = check_op(given, options)
        left, right = options.window  # type: ignore[misc]
        result, lse = torch.ops.attn.paged_forward(
            *(q, k_pages, v_pages, given.block_table, given.seq_lens, given.cu_seqlens_q, sinks, max_len_q),
            *(causal, left, right, softcap, scale, deterministic, return_lse, join_names(requested_names(backend))),
            *(given.key_ranges, alibi_slopes, given.kv_starts, k_scales, v_scales, invariant),
        )
        if out is not None:
            check_out(out, q, k_pages, v_pages)
            result = copied(result, out)
        return (result, lse) if return_lse else result
    inputs = gather_arguments(given, max_len_q)
    result, lse = run(inputs, options, requested_names(backend), out)
    return (result, lse) if return_lse else result


@hide_unknown
def append_kv(
    k_pages: Tensor,
    v_pages: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    block_table: Any = None,
    seq_lens: Any = None,
    cu_seqlens_q: Any = None,
    slot_mapping: Any = None,
    rotary: tuple[Tensor, Tensor] | None = None,
    rotary_interleaved: bool = False,
    positions: Any = None,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
    **unknown: Never,
) -> tuple[Tensor, ...]:
    """Writes the keys and values of new tokens into their sequences' pages, in place.

    Args:
        k_pages, v_pages: the pool, as in ``paged_attention``; modified in place.
        k, v: ``[tokens, kv_heads, dim]``, in the pool's dtype: the new tokens of each sequence, end to end. For
            quantised pages in bfloat16, float16 or float32.
        block_table, seq_lens, cu_seqlens_q: as in ``paged_attention``; ``seq_lens`` count the new tokens.
        slot_mapping: in place of these tables, int32 or int64 ``[tokens]``: the slot of each token, which is ``page *
            page_size + offset``; -1 for a token that is not written. A tensor or a numpy array.
        rotary: (cos, sin), each ``[max_positions, rotary_dim / 2]``: the keys are rotated as by ``apply_rotary``.
        rotary_interleaved: as ``interleaved`` there.
        positions: with rotary, int32 or int64 ``[tokens]``: each token's position in its sequence. The tables say it,
            too; slot_mapping does not.
        k_scales, v_scales: the scales of quantised pages, as in ``paged_attention``. Scales by token are written, too:
            each becomes the largest magnitude of its token and head, divided by the largest stored number, and NaN for
            a token with NaN or Inf. Scales by page are read: numbers beyond them saturate.

    Returns:
        ``(k_pages, v_pages)``, the same tensors; with scales also ``k_scales, v_scales``.

    Raises:
        ShapeError, DTypeError, DeviceError, SpecError: for invalid arguments, and for tables on the CPU that point
            outside the pool or send two tokens to one slot, or positions behind the rows of cos. On a GPU a token
            without a valid slot is skipped, and positions are clamped.
    """
    if unknown:
        refuse_keywords(append_kv, unknown)
    cos, sin = (None, None) if rotary is None else pair_of(rotary)
    if slot_mapping is not None or rotary_interleaved is not False or positions is not None:
        tables = {"block_table": block_table, "seq_lens": seq_lens, "cu_seqlens_q": cu_seqlens_q}
        check_choice(tables, slot_mapping, cos, rotary_interleaved, positions)
    # In the order of Places, as the op has them.
    where = (block_table, seq_lens, cu_seqlens_q, slot_mapping, cos, sin, positions, rotary_interleaved)
    scales = k_scales, v_scales
    if torch.compiler.is_compiling():
        named: dict[str, Any] = {"k_pages": k_pages, "v_pages": v_pages, "k": k, "v": v, COS: cos, SIN: sin}
        for name, tensor in (named | {"k_scales": k_scales, "v_scales": v_scales}).items():
            if tensor is not None or name in ("k_pages", "v_pages"):
                check_tensor(name, tensor)
                check_no_gradient(name, tensor)
        torch.ops.attn.append_kv(k_pages, v_pages, k, v, *where, *scales)
    elif is_watched(k):
        check_tensor("k", k)
        places = op_places(k, Places(*where))
        check_appended(k_pages, v_pages, k, v, places, scales)
        torch.ops.attn.append_kv(k_pages, v_pages, k, v, *places, *scales)
    else:
        append(k_pages, v_pages, k, v, *where, *scales)
    if k_scales is v_scales is None:
        return k_pages, v_pages
    return (k_pages, v_pages, *[each for each in scales if each is not None])
