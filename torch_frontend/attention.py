"""attention: the public function for torch tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Never, Unpack, overload

import torch
from torch.autograd import forward_ad, profiler

from attn_core.call import cache_rows, checks, ranges
from attn_core.call.hints import hide_unknown, refuse_keywords
from attn_core.call.keywords import AttentionKeywords, No, Yes
from attn_core.call.layouts import Layout
from attn_core.call.mask_objects import is_object
from attn_core.call.options import Options, Window, is_plain_window
from attn_core.call.tensors import Inputs
from attn_core.errors import SpecError
from attn_core.expressions.tracing import TracedFunction
from attn_core.selection import NoBackendError, override
from torch_frontend.dispatch import (
    autocast,
    autograd,
    fast_calls,
    general_calls,
    nested,
    plan,
    run_plan,
    sdpa_flags,
    segments,
    transforms,
)
from torch_frontend.dispatch.plan_cache import dense_plan
from torch_frontend.dispatch.ranges import in_ranges
from torch_frontend.dispatch.tensor_kinds import are_modes_active
from torch_frontend.paged import other_calls

Tensor = torch.Tensor
# Aliases save the fast path an attribute lookup for each.
_is_compiling, _is_grad_enabled, _requested = torch.compiler.is_compiling, torch.is_grad_enabled, override.requested
_is_autocast_on, _is_transformed, _modes, _checks, _ranges = (
    *(autocast.is_on, transforms.are_active, are_modes_active, checks.enabled, ranges.enabled),
)
_flash_on, _efficient_on, _cudnn_on = sdpa_flags.is_flash_on, sdpa_flags.is_efficient_on, sdpa_flags.is_cudnn_on
_math_on, _others_on = sdpa_flags.is_math_on, sdpa_flags.are_others_on
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
def attention(  # noqa: C901
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    alignment: str = "bottom_right",
    window: Window = None,
    softcap: float | None = None,
    scale: float | None = None,
    mask: Tensor | None = None,
    key_ranges: Any = None,
    mask_mod: Callable[..., Any] | TracedFunction | None = None,
    score_mod: Callable[..., Any] | TracedFunction | None = None,
    aux: Sequence[Any] = (),
    q_segment_ids: Any = None,
    kv_segment_ids: Any = None,
    q_positions: Any = None,
    kv_positions: Any = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    seq_info: Any = None,
    layout: Layout = "bshd",
    dropout: float = 0.0,
    deterministic: bool = False,
    backend: str | tuple[str, ...] | None = None,
    return_lse: bool = False,
    return_max_logit: bool = False,
    dropout_rng: torch.Generator | None = None,
    kv_lengths: Any = None,
    kv_starts: Any = None,
    cache_index: Any = None,
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
        layout: "bshd" as above; or "bhsd": q, k, v and the output are ``[batch, heads, seq, head_dim]``, packed
            ``[heads, tokens, head_dim]``. Everything else keeps its shape.
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
    if unknown:
        refuse_keywords(attention, unknown)
    plain = type(q) is type(k) is type(v) is Tensor
    jagged = not plain and nested.has_jagged(q, k, v)
    in_cache = not (kv_lengths is None and kv_starts is None and cache_index is None)
    if not (q_segment_ids is None and kv_segment_ids is None and q_positions is None and kv_positions is None):
        said = q_segment_ids, kv_segment_ids, q_positions, kv_positions
        if in_cache:
            cache_rows.refuse(seq_info, *said)
        seen = causal, window, mask_mod, aux
        causal, window, mask_mod, aux = segments.without_segments(said, seen, (q, k), layout, (seq_info, alibi_slopes))
    usual_layout = isinstance(layout, str) and layout == "bshd"  # an array would compare element by element
    if jagged or not usual_layout or in_cache:
        rows, first = (kv_lengths, kv_starts, cache_index), (causal, alignment, window, softcap, scale)
        tables = (mask, key_ranges, mask_mod, score_mod, aux, bias, alibi_slopes, sinks, seq_info)
        others = (dropout, deterministic, backend, return_lse, return_max_logit, dropout_rng, invariant)
        return other_calls.attend(attention, (q, k, v), layout, rows, (*first, *tables, *others))
    plain_options = (causal, alignment, window, softcap, scale, dropout, deterministic, return_lse, invariant)
    no_extras = mask is bias is alibi_slopes is sinks is seq_info is None
    # The fast path: plain tensors, no dropout, nothing that observes the call. It costs one cached lookup.
    observed = _is_compiling() or _is_autocast_on() or _is_transformed() or _modes() or forward_ad._current_level >= 0
    observed = observed or _checks() or not (_flash_on() and _efficient_on() and _cudnn_on() and _math_on())
    observed = observed or not _others_on()  # sdpa_kernel(...) around the call
    unusual_window = window is not None and type(window) is not int and not is_plain_window(window)
    drops = type(dropout) is not float or dropout
    usual = plain and not (observed or drops or unusual_window or dropout_rng is not None)
    usual = usual and mask_mod is score_mod is None and type(aux) is tuple and not aux and return_max_logit is False
    if key_ranges is not None:
        if usual and no_extras:
            results = fast_calls.attend_with_ranges(q, k, v, key_ranges, backend, plain_options)
            if results is not None:
                return results
        usual = False
    if usual and not no_extras:
        if alibi_slopes is None and sinks is None and seq_info is None:
            results = fast_calls.attend_with_tables(q, k, v, mask, bias, backend, plain_options)
        else:
            results = fast_calls.attend(q, k, v, (mask, bias, alibi_slopes, sinks), seq_info, backend, plain_options)
        if results is not None:
            return results
    if not (usual and no_extras):
        if is_object(mask, bias):
            visible = causal, alignment, window, mask, bias, seq_info
            causal, alignment, window, mask, bias, seq_info = plan.read_mask_object(q, k, visible)
        tensors = (q, k, v, mask, bias, alibi_slopes, sinks)
        options = Options(causal, alignment, window, softcap, scale, None, None, dropout, deterministic, return_lse)
        options = options._replace(invariant=invariant)
        rest = key_ranges, (mask_mod, score_mod, aux), return_max_logit
        return general_calls.run(tensors, seq_info, options, dropout_rng, backend, *rest)
    try:
        needs_backward = _is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
        call_plan = dense_plan(
            q.shape,
            k.shape,
            v.shape,
            q.dtype,
            k.dtype,
            v.dtype,
            q.device,
            k.device,
            v.device,
            needs_backward,
            _requested() if backend is None else backend,
            *plain_options,
        )
    # AttributeError: no tensor, so no shape. TypeError: an option cannot be hashed. RuntimeError: a nested tensor has
    # no shape. NoBackendError is a RuntimeError too.
    except (AttributeError, TypeError, RuntimeError) as error:
        if isinstance(error, (SpecError, NoBackendError)):
            raise
        # An argument cannot be a cache key. The general path accepts it (a list of names) or names it in an error.
        options = Options(causal, alignment, window, softcap, scale, None, None, dropout, deterministic, return_lse)
        options = options._replace(invariant=invariant)
        return general_calls.run((q, k, v, None, None, None, None), None, options, None, backend)
    if profiler._is_profiler_enabled or _ranges():
        call_plan = in_ranges(call_plan)
    try:
        shortcut = call_plan.shortcut
        results = shortcut(q, k, v) if shortcut else None
        if results is None:
            # autograd can differentiate a shortcut, so only a call without one needs our autograd function.
            if needs_backward:
                return autograd.AttentionFunction.apply(call_plan, q, k, v)
            results = call_plan.forward(call_plan.spec, Inputs(q, k, v))
    except Exception as error:
        run_plan.note_failure(error, call_plan, q, k, v)
        raise
    return results if return_lse else results[0]
