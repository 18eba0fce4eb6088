"""Attention on keys and values in pages of a pool, for torch tensors: paged_attention, explain_paged, and their op.

Compilers trace the op ``attn::paged_forward``. Inside it everything is as in an eager call: shapes are ints, and
``use_backend`` has its value of that moment.
"""

from __future__ import annotations

from typing import Any, Literal, Never, Unpack, overload

import numpy as np
import torch

from attn_core.call.hints import SharedOptions, hide_unknown, refuse_keywords
from attn_core.call.keywords import ExplainPagedKeywords, PagedKeywords
from attn_core.call.options import PAGED, is_plain_window, requested_names
from attn_core.call.tensors import PagedInputs
from attn_core.selection import Selection, explain, override
from torch_frontend.dispatch.op_arguments import OPTIONS_SCHEMA, OpOptions, join_names
from torch_frontend.dispatch.plan import lse_dtype
from torch_frontend.dispatch.prepared import find
from torch_frontend.dispatch.tensor_kinds import is_watched
from torch_frontend.paged import paged_calls
from torch_frontend.paged.plan import (
    check_numbers,
    check_op,
    check_out,
    copied,
    gather_arguments,
    metadata,
    options_of,
    request,
    run,
)

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
    block_table: Tensor | np.ndarray,
    seq_lens: Tensor | np.ndarray,
    cu_seqlens_q: Tensor | np.ndarray | None = None,
    max_len_q: int | None = None,
    causal: bool = True,
    window: int | tuple[int | None, int | None] | None = None,
    key_ranges: Tensor | np.ndarray | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    deterministic: bool = False,
    backend: str | tuple[str, ...] | None = None,
    return_lse: bool = False,
    alibi_slopes: Tensor | None = None,
    kv_starts: Tensor | np.ndarray | None = None,
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
        others: tuple[Any, ...] = (block_table, seq_lens, sinks)
        if not (cu_seqlens_q is k_scales is v_scales is None):
            others = (*others, cu_seqlens_q, k_scales, v_scales)
        repeated = find(paged_calls.prepare_call, q, k_pages, v_pages, others, plain, backend)
        results = None if repeated is None else repeated(q, k_pages, v_pages, *others)
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
        how = OpOptions(options, False, False, join_names(requested_names(backend)))
        result, lse = torch.ops.attn.paged_forward(*given, *how.arguments)
        if out is not None:
            check_out(out, q, k_pages, v_pages)
            result = copied(result, out)
        return (result, lse) if return_lse else result
    inputs = gather_arguments(given, max_len_q)
    result, lse = run(inputs, options, requested_names(backend), out)
    return (result, lse) if return_lse else result


_shared = SharedOptions(paged_attention, ExplainPagedKeywords.__optional_keys__)


@_shared
def explain_paged(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    *,
    block_table: Tensor | np.ndarray,
    seq_lens: Tensor | np.ndarray,
    **options: Unpack[ExplainPagedKeywords[Tensor]],
) -> Selection:
    """Returns the backend that ``paged_attention`` chooses for these arguments and why the others cannot run."""
    said = _shared.complete(explain_paged, {**options}) | {"block_table": block_table, "seq_lens": seq_lens}
    call = options_of(*[said[name] for name in PAGED])
    given = PagedInputs(q, k_pages, v_pages, **{name: said[name] for name in PagedInputs._fields if name not in "qkv"})
    inputs = gather_arguments(given, call.max_len_q)
    return explain(*request(metadata(inputs), call, requested_names(said["backend"]) or override.requested()))


# FRAGMENT, because dispatch.ops defines the namespace.
_library = torch.library.Library("attn", "FRAGMENT")
_OPTIONAL = PagedInputs._fields[5:]
_TENSORS = ", ".join(f"Tensor{'?' if name in _OPTIONAL else ''} {name}" for name in PagedInputs._fields)
_library.define(f"paged_forward({_TENSORS}, {OPTIONS_SCHEMA}) -> (Tensor, Tensor)", tags=(torch.Tag.pt2_compliant_tag,))


def _forward_op(*arguments: Any) -> tuple[Tensor, Tensor]:
    count = len(PagedInputs._fields)
    given, how = PagedInputs(*arguments[:count]), OpOptions.of(arguments[count:])
    options = options_of(*[getattr(how.options, name) for name in PAGED])
    inputs = gather_arguments(given, options.max_len_q)
    out, lse = run(inputs, options, None if how.backend is None else tuple(how.backend.split("\n")))
    # Compilers plan memory with the strides that _forward_fake promises.
    return out.contiguous(), lse.contiguous()


def _forward_fake(q: Tensor, k_pages: Tensor, v_pages: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    channels = v_pages.shape[3] * (2 if v_pages.dtype == torch.uint8 else 1)  # two int4 numbers a byte
    return q.new_empty((*q.shape[:2], channels)), q.new_empty((q.shape[1], q.shape[0]), dtype=lse_dtype(q))


_library.impl("paged_forward", _forward_op, "CompositeExplicitAutograd")
torch.library.register_fake("attn::paged_forward", _forward_fake, lib=_library)
