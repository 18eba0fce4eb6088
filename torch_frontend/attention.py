"""attention: the public function for torch tensors."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, Never, Unpack, overload

import numpy as np
import torch

from attn_core.call import cache_rows, checks
from attn_core.call.cache_rows import CacheRows
from attn_core.call.hints import hide_unknown, refuse_unknown
from attn_core.call.keywords import AttentionKeywords, No, Yes
from attn_core.call.options import Layout, Window, check_layout, is_plain_window
from attn_core.call.segments import Segments, Visible
from attn_core.call.seq_info import SeqInfoLike
from attn_core.expressions.tracing import TracedFunction
from torch_frontend.dispatch import eager_calls, functions, general_calls, layouts
from torch_frontend.dispatch.prepared import find
from torch_frontend.paged import dense_caches

Tensor = torch.Tensor
Keywords = AttentionKeywords[Tensor, torch.Generator]


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: No = False,
    return_max_logit: No = False,
    **options: Unpack[Keywords],
) -> Tensor: ...
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Yes, return_max_logit: No = False, **options: Unpack[Keywords]
) -> tuple[Tensor, Tensor]: ...
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: No = False, return_max_logit: Yes, **options: Unpack[Keywords]
) -> tuple[Tensor, Tensor]: ...
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Yes, return_max_logit: Yes, **options: Unpack[Keywords]
) -> tuple[Tensor, Tensor, Tensor]: ...
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool, return_max_logit: No = False, **options: Unpack[Keywords]
) -> Tensor | tuple[Tensor, Tensor]: ...
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool = False, return_max_logit: bool, **options: Unpack[Keywords]
) -> Tensor | tuple[Tensor, ...]: ...
@hide_unknown
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *positional: Never,
    causal: bool = False,
    alignment: str = "bottom_right",
    window: Window = None,
    softcap: float | None = None,
    scale: float | None = None,
    mask: Tensor | None = None,
    key_ranges: Tensor | np.ndarray | None = None,
    mask_mod: Callable[..., object] | TracedFunction | None = None,
    score_mod: Callable[..., object] | TracedFunction | None = None,
    aux: Sequence[Tensor | np.ndarray] = (),
    q_segment_ids: Tensor | np.ndarray | None = None,
    kv_segment_ids: Tensor | np.ndarray | None = None,
    q_positions: Tensor | np.ndarray | None = None,
    kv_positions: Tensor | np.ndarray | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    seq_info: SeqInfoLike = None,
    layout: Layout | None = None,
    dropout: float = 0.0,
    deterministic: bool = False,
    backend: str | tuple[str, ...] | None = None,
    return_lse: bool = False,
    return_max_logit: bool = False,
    dropout_rng: torch.Generator | None = None,
    kv_lengths: Tensor | np.ndarray | None = None,
    kv_starts: Tensor | np.ndarray | None = None,
    cache_index: Tensor | np.ndarray | None = None,
    invariant: str | None = None,
    **unknown: Never,
) -> Tensor | tuple[Tensor, ...]:
    """Computes scaled dot-product attention on the best kernel that honours every argument.

    Args:
        q: ``[batch, q_len, heads, head_dim]``; packed ``[tokens, heads, head_dim]``, alone or as one row ``[1, ...]``.
            If q, k and v are NestedTensors ``[batch, ragged, heads, head_dim]`` of the layout torch.jagged, each row is
            a document, and the output is one, too.
        k: ``[batch, kv_len, kv_heads, head_dim]``; query head h reads kv head ``h // (heads // kv_heads)``.
        v: ``[batch, kv_len, kv_heads, value_dim]``. q, k, v: all float64, float32, bfloat16 or float16; any strides.
        causal: query i sees key ``j <= i + offset``; ``alignment`` "bottom_right" means offset = kv_len - q_len,
            "top_left" 0. It also anchors ``window`` and ALiBi.
        window: ``W`` (needs causal): W keys, self included; or inclusive distances ``(left, right)``, None: unbounded.
        softcap: ``s = softcap * tanh(s / softcap)``, after scale, before bias and mask.
        scale: factor on ``q . k``; ``1 / sqrt(head_dim)`` if None.
        mask: bool, True = visible; bias: float, added. Broadcastable to ``[batch, heads, q_len, kv_len]``. One of the
            two may be an object of xformers or torch's ``CausalBias``, in the place of the options that it means.
        key_ranges: int32 ``[batch or 1, kv_heads or 1, kv_len, 1 or 2, 2]``, numpy or a tensor: query i of the row sees
            key j only if ``start <= i < stop`` for a range (start, stop) of the key. ``attn_core.masks`` builds them.
        mask_mod: a function ``f(b, h, q, k, *aux)`` that says whether query q sees key k; b and h count rows and query
            heads, q and k tokens of the whole row. score_mod: ``g(score, b, h, q, k, *aux)``, applied after softcap;
            -inf hides the pair. FlexAttention's functions are such, and mask_mod may be a ``BlockMask`` that has one.
            aux: at most 4 tensors, which they index (docs/reference/expressions.md); floats may have a gradient.
        q_segment_ids, kv_segment_ids: int32 ``[batch, q_len]`` and ``[batch, kv_len]``: a query sees a key only if
            their ids are equal. kv_segment_ids may be left out if it is the same. q_positions, kv_positions: int32 of
            the same shapes: causal and window compare them instead of places in the row. At most 4 tensors with aux.
        alibi_slopes: ``[heads]`` or ``[batch, heads]``: adds ``-slope * |i + offset - j|``. No gradient.
        sinks: ``[heads]``: one extra logit per head in every row's softmax; it has no value.
        seq_info: a ``SeqInfo`` or ``(seq_lens, cu_seqlens, max_seqlen)``: packed documents, which never see each other.
        layout: "bshd" as above, also None; or "bhsd": q, k, v and the output are ``[batch, heads, seq, head_dim]``,
            packed ``[heads, tokens, head_dim]``. Everything else keeps its shape.
        dropout: probability of dropping a softmax weight. dropout_rng: the generator, best on the CPU; None: torch's.
        deterministic: use only kernels that give the same bits on every run.
        backend: a name, which runs or raises; names in order of preference; or None for automatic choice.
        return_lse: also return the log-sum-exp, ``[batch, heads, q_len]`` (packed ``[heads, tokens]``), natural log,
            float32 (float64 for float64 inputs). A row that sees no key has output 0 and its sink, or -inf, as lse.
        return_max_logit: also return the largest logit of each query head, for QK-clip: ``[batch, heads]`` (packed
            ``[heads]``), of lse's dtype, without a gradient; sinks do not count. -inf if the head sees no pair.
        kv_lengths, kv_starts, cache_index: int32 ``[batch]``, tensors on q's device or numpy: k and v are a cache, of
            which row b has the keys ``k[cache_index[b], kv_starts[b] : kv_lengths[b]]``. Bottom-right diagonals end at
            ``kv_lengths[b]``. They exclude seq_info, segment ids and positions (docs/reference/semantics.md).
        invariant: "batch": the bits of a row or document do not depend on what is beside it; "prefix": besides, out and
            lse of a causal query do not depend on how its tokens are cut into calls or pages
            (docs/explanation/reproducibility.md).

    Returns:
        The output, with q's rank and dtype and value_dim channels; or a tuple of it, lse and max_logit, in this order.
        ``torch.autocast`` casts q, k, v and bias to its dtype unless they are float64; the output then has that dtype.

    Raises:
        ShapeError, DTypeError, DeviceError, SpecError: for invalid arguments.
        NoBackendError: if no backend, or not the requested one, can run the call; the message has every reason.
            ``torch.nn.attention.sdpa_kernel`` around the call allows only torch's kernels that it lists.
    """
    if unknown or positional:
        refuse_unknown(attention, unknown, positional)
    in_cache = not (kv_lengths is kv_starts is cache_index is None)
    if not (q_segment_ids is kv_segment_ids is q_positions is kv_positions is None):
        tokens = Segments(q_segment_ids, kv_segment_ids, q_positions, kv_positions)
        if in_cache:
            cache_rows.refuse(seq_info, *tokens)
        visible = Visible(causal, window, mask_mod, aux)
        visible = functions.without_segments(tokens, visible, (q, k), layout, seq_info, alibi_slopes)
        causal, window, mask_mod, aux = visible
    # A call like an earlier one, which nothing observes, runs what the earlier one prepared.
    options = causal, alignment, window, softcap, scale, dropout, deterministic, return_lse, invariant, layout
    is_usual = mask_mod is score_mod is dropout_rng is None and return_max_logit is False
    is_usual = is_usual and type(aux) is tuple and not aux and (type(window) is not tuple or is_plain_window(window))
    if is_usual:
        if in_cache:
            others = kv_lengths, kv_starts, cache_index, sinks, alibi_slopes
            is_alone = mask is bias is seq_info is key_ranges is None
            run = find(dense_caches.prepare, q, k, v, others, options, backend) if is_alone else None
            results = None if run is None else run(q, k, v, *others)
        elif mask is bias is alibi_slopes is sinks is seq_info is key_ranges is None:
            run = find(eager_calls.prepare, q, k, v, (), options, backend)
            results = None if run is None else run(q, k, v)
        elif alibi_slopes is sinks is seq_info is key_ranges is None:
            run = find(eager_calls.prepare, q, k, v, (mask, bias), options, backend)
            results = None if run is None else run(q, k, v, mask, bias)
        else:
            tables = mask, bias, alibi_slopes, sinks
            results = eager_calls.attend(q, k, v, tables, seq_info, key_ranges, options, backend)
        if results is not None:
            return results
    # Any other call is checked as a whole.
    given: dict[str, Any] = {
        "causal": causal,
        "alignment": alignment,
        "window": window,
        "softcap": softcap,
        "scale": scale,
        "mask": mask,
        "key_ranges": key_ranges,
        "mask_mod": mask_mod,
        "score_mod": score_mod,
        "aux": aux,
        "bias": bias,
        "alibi_slopes": alibi_slopes,
        "sinks": sinks,
        "seq_info": seq_info,
        "dropout": dropout,
        "deterministic": deterministic,
        "backend": backend,
        "return_lse": return_lse,
        "return_max_logit": return_max_logit,
        "dropout_rng": dropout_rng,
        "invariant": invariant,
    }
    return _attend_by_steps(q, k, v, layout, CacheRows(kv_lengths, kv_starts, cache_index) if in_cache else None, given)


def _attend_by_steps(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout | None, rows: CacheRows | None, given: dict[str, Any]
) -> Tensor | tuple[Tensor, ...]:
    """Runs a call with any property, and under any observer: a cache, a layout and nested tensors each become a call
    of ``attention`` without it, and then every argument is checked.
    """
    if layout is None and given["seq_info"] is None and not torch.compiler.is_compiling() and checks.enabled():
        checks.warn_of_layout(q, k, sys._getframe(2))
    if rows is not None:
        return dense_caches.attend(attention, (q, k, v), rows, {**given, "layout": layout})
    if check_layout(layout) == "bhsd":
        return layouts.first_exchanged(attention(*layouts.all_exchanged((q, k, v)), **given))
    if layouts.has_jagged(q, k, v):
        return layouts.attend_jagged(attention, (q, k, v), given)
    return general_calls.run(q, k, v, given)
