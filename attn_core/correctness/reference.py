"""The reference: attention in numpy float64, forward and analytic backward. Short and slow, so that it can be read.

Every array is ``[batch, heads, q_len, kv_len]`` or ``[batch, heads, length, dim]`` inside; packed documents are one
batch row whose visible set separates them, and sequences in pages are copied out of the pages to packed documents. A
hidden key or value is part of no sum, so its NaN or Inf has no effect.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from attn_core.call.arithmetic import dropout_keeps
from attn_core.call.functions import DAUX, Scored, aux_of, lookup_slopes, scored
from attn_core.call.masks import document_of, positions, visible
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Gradients, Inputs
from attn_core.expressions.on_numpy import block_indices, evaluate_numpy, sum_at_lookup
from attn_core.paged.quantised import dequantised
from attn_core.paged.tables import slots_of

if TYPE_CHECKING:
    from numpy.typing import ArrayLike


Array = np.ndarray


class Softmax(NamedTuple):
    """The intermediate results of one call; float64, ``[batch, heads, q_len, kv_len]`` unless noted.

    Attributes:
        q, k, v: ``[batch, heads, length, dim]``, key/value heads repeated for every query head that reads them.
        seen: bool, the visible pairs. A bias or a modded score of -inf hides its pair as the mask does.
        capped, slope: ``softcap * tanh(scale * q.k / softcap)`` and its derivative by ``scale * q.k``; without softcap
            ``scale * q.k`` and 1.
        modded, mod_slope, mod_bend: the score function of ``capped``, and its first two derivatives there; without one
            ``capped``, 1 and 0.
        mod_rounding, mod_slope_rounding: the rounding errors of ``modded`` and ``mod_slope``, in units of the roundoff;
            0 without a score function.
        added: bias plus ALiBi, 0 without.
        lse: ``[batch, heads, q_len]``, the natural log-sum-exp with the sink: the sink for a row that sees no key, and
            -inf if there is no sink either, as in rows outside all documents.
        sink: ``[1, heads, 1]`` or ``[1, heads, q_len]``, the sinks' logits; -inf without sinks, and for rows outside
            all documents.
        weights: the softmax weights before dropout, 0 where hidden; sink_weights: ``[batch, heads, q_len]``, the
            sink's: 1 in rows that see no key, 0 without a sink.
        factors: the factors of dropout: 0 or ``1 / (1 - dropout)``; 1 without dropout.
    """

    q: Array
    k: Array
    v: Array
    seen: Array
    capped: Array
    slope: Array
    modded: Array
    mod_slope: Array
    mod_bend: Array
    mod_rounding: Array
    mod_slope_rounding: Array
    added: Array
    lse: Array
    sink: Array
    weights: Array
    sink_weights: Array
    factors: Array

    @property
    def logits(self) -> Array:
        """The logits of the softmax: ``modded + added``."""
        return self.modded + self.added


def forward(spec: AttentionSpec, inputs: Inputs) -> tuple[Array, Array]:
    """Returns the output and the log-sum-exp of a call, float64, in ``spec.out_shape`` and ``spec.lse_shape``.

    The inputs are anything that numpy casts to float64 (bool, int for mask, cu_seqlens and rng), in Inputs' layouts.
    """
    if spec.paged is not None:
        return forward(*gather_pages(spec, inputs))
    with np.errstate(all="ignore"):
        call = softmax(spec, inputs)
        out = sum_over(call.weights * call.factors, call.seen, call.v)
    return from_heads_first(spec, out), call.lse.reshape(spec.lse_shape)


def backward(
    spec: AttentionSpec, inputs: Inputs, out: ArrayLike, lse: ArrayLike, dout: ArrayLike, dlse: ArrayLike | None = None
) -> Gradients:
    """Returns the gradients of a call from its forward's ``out`` and ``lse``, float64, each in its input's shape.

    ``dout`` is the gradient of ``out``; ``dlse`` is the gradient of ``lse``, or None if nothing depends on ``lse``. The
    result has dbias, dsinks and daux as ``Gradients`` says. With P the softmax weights, K the dropout
    factors and S the logits: dV = (P K)' dO, dP = K (dO V'), dS = P (dP - delta + dlse), delta = sum(dO O) over
    channels (Dao et al., FlashAttention, 2022, appendix B.2). A sink is one more column of S, without a value. dlse
    enters dS because the derivative of the log-sum-exp by S is P.
    """
    with np.errstate(all="ignore"):
        call = softmax(spec, inputs)
        dout = heads_first(spec, dout)
        # [batch, heads, q_len]. A row without keys has out = 0, but dout may be NaN or Inf there: keep it out.
        delta = np.where(call.seen.any(-1), (dout * heads_first(spec, out)).sum(-1), 0.0)
        slope_of_row = per_row(spec, dlse) - delta
        weights = call.weights
        if spec.partial:  # its lse belongs to the whole row
            weights = np.where(call.seen, np.exp(call.logits - per_row(spec, lse)[..., None]), 0.0)
        dweights = call.factors * (dout @ call.v.swapaxes(-1, -2))
        # dweights is NaN where a hidden value is NaN, and 0 * NaN is NaN: set hidden pairs to 0.
        dlogits = np.where(call.seen, weights * (dweights + slope_of_row[..., None]), 0.0)
        # An infinite slope of a hidden pair would make its 0 a NaN.
        dscores = np.where(call.seen, spec.scale * call.slope * call.mod_slope * dlogits, 0.0)
        by_key = call.seen.swapaxes(-1, -2)
        dq = sum_over(dscores, call.seen, call.k)
        dk = sum_over(dscores.swapaxes(-1, -2), by_key, call.q)
        dv = sum_over((weights * call.factors).swapaxes(-1, -2), by_key, dout)
        dsinks = np.where(call.sink == -np.inf, 0.0, call.sink_weights * slope_of_row).sum((0, 2))
    return Gradients(
        from_heads_first(spec, dq),
        from_heads_first(spec, sum_groups(spec, dk)),
        from_heads_first(spec, sum_groups(spec, dv)),
        sum_to_bias(spec, dlogits) if spec.bias_gradient else None,
        dsinks if spec.sinks else None,
        **_daux(spec, call, inputs, dlogits),
    )


def _daux(spec: AttentionSpec, call: Softmax, inputs: Inputs, dlogits: Array) -> dict[str, Array]:
    """Returns the gradients of the score function's arrays, as fields of Gradients."""
    result = {DAUX[number]: np.zeros(spec.aux[number].shape) for number in spec.aux_gradients}
    aux, indices = aux_of(inputs), block_indices(spec.batch, spec.num_heads, spec.q_len, spec.kv_len)
    for node, tree in lookup_slopes(spec.score_mod, spec.aux_gradients) if result else ():  # type: ignore[arg-type]
        # An infinite slope of a hidden pair would make its 0 a NaN.
        summand = np.where(call.seen, evaluate_numpy(tree, indices, call.capped, aux) * dlogits, 0.0)
        result[DAUX[int(node.value or 0)]] += sum_at_lookup(node, summand, indices, call.capped, aux)
    return result


def softmax(spec: AttentionSpec, inputs: Inputs) -> Softmax:
    """Computes everything up to the softmax weights: scale, softcap, score function, bias, ALiBi, mask, dropout."""
    q, k, v = (heads_first(spec, tensor) for tensor in (inputs.q, inputs.k, inputs.v))
    kv_head = np.arange(spec.num_heads) // spec.group_size
    k, v = k[:, kv_head], v[:, kv_head]
    scores = spec.scale * (q @ k.swapaxes(-1, -2))
    capped, slope = scores, np.ones_like(scores)
    if spec.softcap is not None:
        bent = np.tanh(scores / spec.softcap)
        capped, slope = spec.softcap * bent, 1.0 - bent**2
    added = np.broadcast_to(_added(spec, inputs), scores.shape)
    aux = aux_of(inputs)
    seen = visible(spec, inputs.mask, inputs.cu_seqlens_q, inputs.cu_seqlens_k, inputs.key_ranges, aux)
    one, zero = np.ones((1, 1, 1, 1)), np.zeros((1, 1, 1, 1))
    modded = Scored(capped, one, zero, zero, zero) if spec.score_mod is None else scored(spec, capped, aux)
    seen = seen & (added != -np.inf) & (modded.values != -np.inf)
    logits = modded.values + added
    sink = np.full((1, spec.num_heads, 1), -np.inf)
    if spec.sinks:  # rows after the last document have no sink: their output is 0 and their lse -inf
        sink = np.where(_in_document(spec, inputs), np.asarray(inputs.sinks, np.float64).reshape(sink.shape), -np.inf)
    # Subtract the largest logit before exp, so that no exp overflows.
    top = np.maximum(logits.max(-1, initial=-np.inf, where=seen), sink)
    total = np.where(seen, np.exp(logits - top[..., None]), 0.0).sum(-1) + np.exp(sink - top)
    # A row with neither keys nor a sink has top = -inf, so total is exp(-inf + inf) = NaN: replace it by -inf.
    lse = np.where(seen.any(-1) | (sink != -np.inf), np.log(total) + top, -np.inf)
    # Not exp(logits - lse): the log of the total is lost in a large lse.
    weights = np.where(seen, np.exp(logits - top[..., None]) / total[..., None], 0.0)
    return Softmax(
        q,
        k,
        v,
        seen,
        capped,
        slope,
        *modded,
        added,
        lse,
        sink,
        weights=weights,
        sink_weights=np.where(sink == -np.inf, 0.0, np.exp(sink - top) / total),
        factors=_dropout_factors(spec, inputs.rng),
    )


def sum_over(weights: Array, seen: Array, values: Array) -> Array:
    """Returns ``sum_j weights[.., i, j] * values[.., j, :]`` over visible j; NaN if a visible value is NaN or Inf.

    A plain product would spread the NaN of a hidden value, because 0 * NaN is NaN.
    """
    finite = np.isfinite(values)
    total = weights @ np.where(finite, values, 0.0)
    return total if finite.all() else np.where(seen.astype(np.float64) @ ~finite > 0, np.nan, total)


def heads_first(spec: AttentionSpec, tensor: ArrayLike) -> Array:
    """Returns ``[batch, length, heads, dim]`` or packed ``[tokens, heads, dim]`` as ``[batch, heads, length, dim]``."""
    array = np.asarray(tensor, np.float64)
    return (array[None] if spec.packed else array).swapaxes(1, 2)


def from_heads_first(spec: AttentionSpec, array: Array) -> Array:
    """Inverts ``heads_first``."""
    array = array.swapaxes(1, 2)
    return array[0] if spec.packed else array


def per_row(spec: AttentionSpec, lse: ArrayLike | None) -> Array:
    """Returns a log-sum-exp or its gradient as float64 ``[batch, heads, q_len]``; zeros for None."""
    shape = (spec.batch, spec.num_heads, spec.q_len)
    return np.zeros(shape) if lse is None else np.asarray(lse, np.float64).reshape(shape)


def sum_groups(spec: AttentionSpec, array: Array) -> Array:
    """Sums ``[batch, heads, length, dim]`` over the query heads of a group: ``[batch, kv_heads, length, dim]``."""
    batch, _, length, dim = array.shape
    return array.reshape(batch, spec.num_kv_heads, spec.group_size, length, dim).sum(2)


def sum_to_bias(spec: AttentionSpec, dlogits: Array) -> Array:
    """Sums a gradient of the logits over the axes along which the bias was broadcast."""
    axes = tuple(axis for axis, size in enumerate(spec.bias_shape or ()) if size == 1)
    return dlogits.sum(axes, keepdims=True)


def _in_document(spec: AttentionSpec, inputs: Inputs) -> Array:
    """Returns which rows belong to a document: bool ``[q_len]``, or ``[1]`` with True for all."""
    if not spec.packed:
        return np.ones(1, bool)
    return document_of(inputs.cu_seqlens_q, spec.q_len) < len(inputs.cu_seqlens_q) - 1


def _added(spec: AttentionSpec, inputs: Inputs) -> Array:
    """Returns bias plus ALiBi, broadcastable to the logits."""
    added = np.zeros((1, 1, 1, 1))
    if spec.bias_shape is not None:
        added = added + np.asarray(inputs.bias, np.float64).reshape(spec.bias_shape)
    if spec.alibi_shape is not None:
        rows, columns = positions(spec, inputs.cu_seqlens_q, inputs.cu_seqlens_k)
        slopes = np.asarray(inputs.alibi_slopes, np.float64).reshape(*spec.alibi_shape, 1, 1)
        added = added - slopes * abs(rows[:, None] - columns[None, :])
    return added


def _dropout_factors(spec: AttentionSpec, rng: Any) -> Array:
    """Returns 0 for a dropped weight and ``1 / (1 - dropout)`` for any other."""
    if not spec.dropout:
        return np.ones((1, 1, 1, 1))
    indices = np.ogrid[: spec.batch, : spec.num_heads, : spec.q_len, : spec.kv_len]
    seed, offset = (int(word) for word in rng)
    return dropout_keeps((seed, offset), tuple(indices), spec.dropout) / (1.0 - spec.dropout)


def gather_pages(spec: AttentionSpec, inputs: Any) -> tuple[AttentionSpec, Inputs]:
    """Returns the same call on packed documents, as a spec and inputs without pages.

    Keys and values are copied from the pages of each sequence, up to its length. Nothing else of the pool is read, so
    that NaN in unused slots cannot reach the reference.
    """
    page_size, lengths = spec.paged.page_size, np.asarray(inputs.seq_lens, np.int64)  # type: ignore[union-attr]
    starts = lengths * 0 if inputs.kv_starts is None else np.minimum(inputs.kv_starts, lengths)
    cu_k = np.concatenate([[0], np.cumsum(lengths - starts)]).astype(np.int32)
    cu_q = np.arange(len(lengths) + 1, dtype=np.int32) if inputs.cu_seqlens_q is None else inputs.cu_seqlens_q
    table = np.asarray(inputs.block_table)
    # Token i of a sequence is at place i % page_size of page row[i // page_size].
    slots = np.concatenate(
        [
            row[np.arange(first, n) // page_size] * page_size + np.arange(first, n) % page_size
            for row, first, n in zip(table, starts, lengths)
        ]
        or [np.zeros(0, np.int64)]  # np.concatenate refuses an empty list
    )
    # [num_pages, page_size, kv_heads, dim] -> [tokens, kv_heads, dim]
    k, v = (np.asarray(pool).reshape(-1, *pool.shape[2:])[slots] for pool in numbers_of(spec, inputs))
    longest = int((lengths - starts).max(initial=0))
    ranges = inputs.key_ranges
    if ranges is not None:
        ranges = np.asarray(ranges)
        wide = np.zeros((1, ranges.shape[1], len(slots), *ranges.shape[3:]), np.int32)
        wide[..., 0, 1] = spec.q_len  # every query sees a key that was there before
        for at, end in enumerate(cu_k[1:]):
            # The new tokens are the last ones. There may be more of them than the sequence has tokens.
            count = min(cu_q[at + 1] - cu_q[at], lengths[at] - starts[at])
            wide[:, :, end - count : end] = ranges[:, :, cu_q[at + 1] - count : cu_q[at + 1]]
        ranges = wide
    shape = None if ranges is None else ranges.shape
    of_sequences = len(spec.alibi_shape or ()) == 2
    changes: dict[str, Any] = {"key_ranges_shape": shape, "alibi_shape": None if of_sequences else spec.alibi_shape}
    packed = replace(spec, paged=None, kv_len=len(slots), max_len_k=longest, **changes)
    tables = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "key_ranges": ranges, "alibi_slopes": inputs.alibi_slopes}
    if of_sequences:
        # Packed documents have one slope per head, so slopes of each sequence are a bias of all tokens.
        bias = _slopes_as_bias(packed, inputs.alibi_slopes, cu_q, cu_k)
        packed = replace(packed, bias_shape=bias.shape, bias_dtype=spec.lse_dtype)
        tables |= {"alibi_slopes": None, "bias": bias}
    return packed, Inputs(inputs.q, k, v, sinks=inputs.sinks, **tables)


def _slopes_as_bias(spec: AttentionSpec, slopes: Array, cu_q: Array, cu_k: Array) -> Array:
    """Returns ``-slope * |i + N - n - j|`` within each sequence, ``[1, heads, tokens, kv_tokens]``; 0 elsewhere."""
    bias = np.zeros((1, spec.num_heads, spec.q_len, spec.kv_len))
    for of_sequence, (q0, q1), (k0, k1) in zip(slopes, pairwise(cu_q), pairwise(cu_k)):
        distance = np.arange(q1 - q0)[:, None] + (k1 - k0) - (q1 - q0) - np.arange(k1 - k0)
        bias[0, :, q0:q1, k0:k1] = -np.asarray(of_sequence, np.float64)[:, None, None] * abs(distance)
    return bias


def numbers_of(spec: AttentionSpec, inputs: Any) -> tuple[Any, Any]:
    """Returns the numbers of both pools; those of quantised pages as float64, without any rounding."""
    if spec.paged is None or spec.paged.dtype is None:
        return inputs.k, inputs.v
    dtype = spec.paged.dtype
    return dequantised(inputs.k, inputs.k_scales, dtype), dequantised(inputs.v, inputs.v_scales, dtype)


def append(pages: Array, new: Array, block_table: Array, seq_lens: Array, cu_seqlens_q: Array) -> Array:
    """Returns a copy of a pool with new tokens written to the last slots of each sequence.

    Args:
        pages: the pool, ``[num_pages, page_size, kv_heads, dim]``.
        new: the new tokens of all sequences, ``[tokens, kv_heads, dim]``.
        block_table, seq_lens, cu_seqlens_q: as PagedInputs has them; ``seq_lens`` counts the new tokens.
    """
    slots = slots_of(block_table, seq_lens, cu_seqlens_q, pages.shape[1])
    result = np.array(pages)
    result.reshape(-1, *pages.shape[2:])[slots] = new
    return result
