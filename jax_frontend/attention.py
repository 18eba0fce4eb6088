"""attention: the public function for JAX arrays."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, Never, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np

from attn_core.call import cache_rows, checks
from attn_core.call.cache_rows import OPTIONS, CacheRows
from attn_core.call.functions import NO_FUNCTIONS, are_given, named, trace
from attn_core.call.hints import hide_unknown, refuse_unknown
from attn_core.call.keywords import AttentionKeywords, No, Yes
from attn_core.call.options import Layout, Options, Window, check_flag, check_layout, check_options, requested_names
from attn_core.call.segments import Scores, Segments, as_plain
from attn_core.call.seq_info import SeqInfo, SeqInfoLike
from attn_core.call.tensors import Inputs
from attn_core.errors import SpecError
from attn_core.expressions.properties import check_ints
from attn_core.expressions.tracing import TracedFunction
from attn_core.selection import NoBackendError, override
from jax_frontend.bridge.forked import check_process
from jax_frontend.dispatch import max_logit, offsets, plan, value_checks
from jax_frontend.dispatch.differentiable import differentiable_attention, varying_alike
from jax_frontend.paged import dense_caches

Array = jax.Array
Keywords = AttentionKeywords[Array, Array]


@overload
def attention(
    q: Array, k: Array, v: Array, *, return_lse: No = False, return_max_logit: No = False, **options: Unpack[Keywords]
) -> Array: ...
@overload
def attention(
    q: Array, k: Array, v: Array, *, return_lse: Yes, return_max_logit: No = False, **options: Unpack[Keywords]
) -> tuple[Array, Array]: ...
@overload
def attention(
    q: Array, k: Array, v: Array, *, return_lse: No = False, return_max_logit: Yes, **options: Unpack[Keywords]
) -> tuple[Array, Array]: ...
@overload
def attention(
    q: Array, k: Array, v: Array, *, return_lse: Yes, return_max_logit: Yes, **options: Unpack[Keywords]
) -> tuple[Array, Array, Array]: ...
@overload
def attention(
    q: Array, k: Array, v: Array, *, return_lse: bool, return_max_logit: No = False, **options: Unpack[Keywords]
) -> Array | tuple[Array, Array]: ...
@overload
def attention(
    q: Array, k: Array, v: Array, *, return_lse: bool = False, return_max_logit: bool, **options: Unpack[Keywords]
) -> Array | tuple[Array, ...]: ...
@hide_unknown
def attention(
    q: Array,
    k: Array,
    v: Array,
    *positional: Never,
    causal: bool = False,
    alignment: str = "bottom_right",
    window: Window = None,
    softcap: float | None = None,
    scale: float | None = None,
    mask: Array | None = None,
    key_ranges: Array | np.ndarray | None = None,
    mask_mod: Callable[..., object] | TracedFunction | None = None,
    score_mod: Callable[..., object] | TracedFunction | None = None,
    aux: Sequence[Array | np.ndarray] = (),
    q_segment_ids: Array | np.ndarray | None = None,
    kv_segment_ids: Array | np.ndarray | None = None,
    q_positions: Array | np.ndarray | None = None,
    kv_positions: Array | np.ndarray | None = None,
    bias: Array | None = None,
    alibi_slopes: Array | None = None,
    sinks: Array | None = None,
    seq_info: SeqInfoLike = None,
    layout: Layout | None = None,
    dropout: float = 0.0,
    deterministic: bool = False,
    backend: str | tuple[str, ...] | None = None,
    return_lse: bool = False,
    return_max_logit: bool = False,
    dropout_rng: Array | None = None,
    kv_lengths: Array | np.ndarray | None = None,
    kv_starts: Array | np.ndarray | None = None,
    cache_index: Array | np.ndarray | None = None,
    invariant: str | None = None,
    **unknown: Never,
) -> Array | tuple[Array, ...]:
    """Computes scaled dot-product attention on the best kernel that honours every argument, eagerly or transformed.

    Args:
        q: ``[batch, q_len, heads, head_dim]``; packed ``[tokens, heads, head_dim]``, alone or as one row ``[1, ...]``.
        k: ``[batch, kv_len, kv_heads, head_dim]``; query head h reads kv head ``h // (heads // kv_heads)``.
        v: ``[batch, kv_len, kv_heads, value_dim]``. q, k, v: all float64, float32, bfloat16 or float16.
        causal: query i sees key ``j <= i + offset``; ``alignment`` "bottom_right" means offset = kv_len - q_len,
            "top_left" 0. It also anchors ``window`` and ALiBi.
        window: ``W`` (needs causal): W keys, self included; or inclusive distances ``(left, right)``, None: unbounded.
        softcap: ``s = softcap * tanh(s / softcap)``, after scale, before bias and mask.
        scale: factor on ``q . k``; ``1 / sqrt(head_dim)`` if None.
        mask: bool, True = visible; bias: float, added. Broadcastable to ``[batch, heads, q_len, kv_len]``.
        key_ranges: int32 ``[batch or 1, kv_heads or 1, kv_len, 1 or 2, 2]``, numpy or JAX's: query i of the row sees
            key j only if ``start <= i < stop`` for a range (start, stop) of the key. ``attn_core.masks`` builds them.
        mask_mod: a function ``f(b, h, q, k, *aux)`` that says whether query q sees key k; b and h count rows and query
            heads, q and k tokens of the whole row. score_mod: ``g(score, b, h, q, k, *aux)``, applied after softcap;
            -inf hides the pair. aux: at most 4 arrays, traced or not, which the functions index; arrays of floats that
            score_mod reads have a gradient (docs/reference/expressions.md).
        q_segment_ids, kv_segment_ids: int32 ``[batch, q_len]`` and ``[batch, kv_len]``: a query sees a key only if
            their ids are equal. kv_segment_ids may be left out if it is the same. q_positions, kv_positions: int32 of
            the same shapes: causal and window compare them instead of places in the row. At most 4 arrays with aux.
        alibi_slopes: ``[heads]`` or ``[batch, heads]``: adds ``-slope * |i + offset - j|``. No gradient.
        sinks: ``[heads]``: one extra logit per head in every row's softmax; it has no value.
        seq_info: a ``SeqInfo`` or ``(seq_lens, cu_seqlens, max_seqlen)``: packed documents, which never see each other.
            A SeqInfo is a pytree: its offsets may be traced, its maximum lengths are static.
        layout: "bshd" as above, also None; or "bhsd": q, k, v and the output are ``[batch, heads, seq, head_dim]``,
            packed ``[heads, tokens, head_dim]``. Everything else keeps its shape.
        dropout: probability of dropping a softmax weight; needs ``dropout_rng``, a PRNG key. Which weights drop depends
            on the key and on their indices in the whole call, inside ``jax.shard_map`` on those in the device's shard.
        deterministic: use only kernels that give the same bits on every run.
        backend: a name, which runs or raises; names in order of preference; or None for automatic choice.
        return_lse: also return the log-sum-exp, ``[batch, heads, q_len]`` (packed ``[heads, tokens]``), natural log,
            float32 (float64 for float64 inputs). A row that sees no key has output 0 and its sink, or -inf, as lse.
        return_max_logit: also return the largest logit of each query head, for QK-clip: ``[batch, heads]`` (packed
            ``[heads]``), of lse's dtype, without a gradient; sinks do not count. -inf if the head sees no pair.
        kv_lengths, kv_starts, cache_index: int32 ``[batch]``, JAX arrays or numpy, traced or not: k and v are a cache,
            of which row b has the keys ``k[cache_index[b], kv_starts[b] : kv_lengths[b]]``. Bottom-right diagonals end
            at ``kv_lengths[b]``. They exclude seq_info, segment ids and positions (docs/reference/semantics.md).
        invariant: "batch": the bits of a row or document do not depend on what is beside it; "prefix": besides, out and
            lse of a causal query do not depend on how its tokens are cut into calls or pages.

    Returns:
        The output, with q's rank and dtype and value_dim channels; or a tuple of it, lse and max_logit, in this order.

    Raises:
        ShapeError, DTypeError, DeviceError, SpecError: for invalid arguments.
        NoBackendError: if no backend, or not the requested one, can run the call; the message has every reason.
    """
    if unknown or positional:
        refuse_unknown(attention, unknown, positional)
    check_flag("return_max_logit", return_max_logit)
    check_process()  # before the axes are exchanged, which runs JAX
    if layout is None and seq_info is None and checks.enabled():
        checks.warn_of_layout(q, k, sys._getframe(1))
    if check_layout(layout) == "bhsd":
        q, k, v = map(exchanged, (q, k, v))
    segments = Segments(q_segment_ids, kv_segment_ids, q_positions, kv_positions)
    if not (kv_lengths is None and kv_starts is None and cache_index is None):
        cache_rows.refuse(seq_info, *segments)
        rows, first = (kv_lengths, kv_starts, cache_index), (causal, alignment, window, softcap, scale)
        tables = (mask, key_ranges, mask_mod, score_mod, aux, bias, alibi_slopes, sinks, seq_info)
        others = (dropout, deterministic, backend, return_lse, return_max_logit, dropout_rng, invariant)
        keywords = dict(zip(OPTIONS, (*first, *tables, *others), strict=True))
        return in_layout(dense_caches.attend(attention, (q, k, v), CacheRows(*rows), keywords), layout)
    scores = Scores(causal, alignment, window, softcap, scale, mask_mod, score_mod, aux)
    plain = as_plain(scores, segments, (q, k), seq_info, alibi_slopes)
    causal, alignment, window, softcap, scale, mask_mod, score_mod, aux = plain
    inputs = Inputs(q, k, v, mask, bias, alibi_slopes, sinks, key_ranges=key_ranges)
    options = Options(causal, alignment, window, softcap, scale, None, None, dropout, deterministic, return_lse)
    options = options._replace(invariant=invariant)
    info, results = SeqInfo.coerce(seq_info), None
    requested, functions = requested_names(backend) or override.requested(), (mask_mod, score_mod, aux)
    if isinstance(key_ranges, np.ndarray):
        # The values are on the host, so that kernels without key ranges may compute the mask in parts.
        results = _attend_in_parts(inputs, seq_info, options, requested, functions)
        if results is not None and not return_max_logit:
            return in_layout(results, layout)
    checked, options = gather_arguments(inputs, info, options, dropout_rng, functions)
    if results is None:
        try:
            results = run(checked, info, options, requested, with_maximum=return_max_logit)
            return in_layout(results, layout)
        except NoBackendError:
            if not value_checks.ranges_here(key_ranges, named=requested is not None):
                raise
            here = inputs._replace(key_ranges=np.asarray(key_ranges))
            results = _attend_in_parts(here, seq_info, options, requested, functions)
            if results is None:
                raise
        if not return_max_logit:
            return in_layout(results, layout)
    results = results if return_lse else (results,)
    return in_layout((*results, max_logit.alone(varying_alike(checked), plan.device_name(q), options)), layout)


def _attend_in_parts(*call: Any) -> Any:
    """Runs a call with key ranges on the host as parts; None if one kernel should run it."""
    from jax_frontend.context_parallel import one_device  # a fifth of this package's modules, which few programs need

    return one_device.attend(*call)


def in_layout(results: Array | tuple[Array, ...], layout: Layout | None) -> Array | tuple[Array, ...]:
    """Returns the output, or a tuple that begins with it, with the output in a layout."""
    if layout != "bhsd":
        return results
    return (exchanged(results[0]), *results[1:]) if isinstance(results, tuple) else exchanged(results)


def exchanged(array: Any) -> Any:
    """Returns an array or its shape with the axes of the sequence and the heads exchanged; any other value as it is."""
    shape: Any = getattr(array, "shape", ())
    if len(shape) < 3:
        return array
    if isinstance(array, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct((*shape[:-3], shape[-2], shape[-3], shape[-1]), array.dtype)
    return array.swapaxes(-3, -2)


def run(
    inputs: Inputs,
    info: SeqInfo | None,
    options: Options,
    requested: tuple[str, ...] | None,
    *,
    with_maximum: bool = False,
) -> Any:
    """Plans a call, checks its values before JAX traces anything, and runs it.

    Args:
        inputs, options: from ``gather_arguments``.
        with_maximum: whether the results end with the largest logits.
    """
    call = plan.plan(plan.metadata(inputs), plan.device_name(inputs.q), options, requested)
    value_checks.check_tables(call.spec, info, inputs.key_ranges)
    checked = checks.enabled()
    if checked:
        value_checks.check(call.spec, inputs, info)
    # The inputs have further documents for trailing tokens, whose rows must not get a sink as log-sum-exp.
    documents = None if inputs.sinks is None or info is None else len(info.cu_seqlens_q) - 1
    call = call._replace(as_one=inputs.k is None, checked=checked, documents=documents, with_maximum=with_maximum)
    results = differentiable_attention(call, varying_alike(inputs))
    if checked and not value_checks.are_traced(inputs):
        jax.effects_barrier()  # so that an eager call has warned of its results when it returns
    return results


def gather_arguments(
    inputs: Inputs,
    info: SeqInfo | None,
    options: Options,
    key: Array | None,
    functions: tuple[Any, Any, Any] = NO_FUNCTIONS,
    *,
    shapes_only: bool = False,
    token_axis: int = -3,
) -> tuple[Inputs, Options]:
    """Returns a call's arguments, each checked by itself. With ``shapes_only`` they need no values.

    Args:
        inputs: q, k, v, mask, bias, alibi_slopes, sinks and key_ranges as the caller passed them.
        functions: mask_mod, score_mod and aux.
    """
    plan.check_arrays(inputs, shapes_only=shapes_only)
    options = check_options(options)
    if inputs.key_ranges is not None:
        inputs = inputs._replace(key_ranges=plan.ranges_as_array(inputs.key_ranges, shapes_only=shapes_only))
    if are_given(functions):
        mask_mod, score_mod, aux = trace(*functions)
        for number, array in enumerate(aux):
            check_ints(number, array)  # before JAX drops what exceeds 32 bits
        moved = [plan.moved_array(f"aux[{at}]", array, shapes_only=shapes_only) for at, array in enumerate(aux)]
        inputs, options = inputs._replace(**named(moved)), options._replace(mask_mod=mask_mod, score_mod=score_mod)
    if info is not None:
        inputs, options = offsets.attach_complete(info, inputs, options, token_axis)
    if options.dropout:
        if shapes_only:
            # explain needs no key, because only the shape of the words counts.
            return inputs._replace(rng=jax.ShapeDtypeStruct((2,), jnp.uint32)), options
        if key is None:
            raise SpecError(f"dropout={options.dropout}: expected dropout_rng, a PRNG key such as jax.random.key(0)")
        plan.check_key(key)
        # Two words instead of the key: they are a residual, so the backward drops the same weights.
        inputs = inputs._replace(rng=jax.random.bits(key, (2,), jnp.uint32))
    return inputs, options


jax.tree_util.register_pytree_node(
    SeqInfo,
    lambda info: ((info.cu_seqlens_q, info.cu_seqlens_k), (info.max_len_q, info.max_len_k)),
    # Unchecked, because JAX also rebuilds pytrees with leaves that are no arrays.
    lambda lengths, offsets: SeqInfo.unchecked(*offsets, *lengths),
)
