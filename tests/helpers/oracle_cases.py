"""Calls for the tests of the oracle: single features, inputs for any spec, and an honest float32 kernel."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from attn_core import AttentionSpec, SeqInfo
from attn_core.call.arithmetic import dropout_keeps
from attn_core.call.functions import aux_of, named, scored
from attn_core.call.masks import positions, visible
from attn_core.call.tensors import Gradients, Inputs
from attn_core.cli.trial import aux_arrays
from tests.campaign.functions import fields_of

SIZES = {"batch": 2, "q_len": 5, "kv_len": 7, "num_heads": 9, "num_kv_heads": 3, "head_dim": 11, "value_dim": 13}
LENGTHS_Q, LENGTHS_K = (3, 0, 2, 6, 0, 1), (5, 2, 0, 4, 0, 3)
PACKED = {"batch": 1, "q_len": sum(LENGTHS_Q), "kv_len": sum(LENGTHS_K), "documents": len(LENGTHS_Q)}

FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale": {"scale": 0.7},
    "causal": {"causal": True},
    "causal with empty rows": {"causal": True, "q_len": 7, "kv_len": 5},
    "causal top_left": {"causal": True, "alignment": "top_left"},
    "window": {"window": (2, 1)},
    "window top_left with empty rows": {"window": (1, 0), "alignment": "top_left", "q_len": 11, "kv_len": 7},
    "left window, causal": {"window": (2, None), "causal": True},
    "right window": {"window": (None, 1)},
    "softcap": {"softcap": 0.9},
    "mask": {"mask_shape": (2, 9, 5, 7)},
    "key ranges": {"key_ranges_shape": (2, 3, 7, 2, 2)},
    "key ranges of all rows, causal": {"key_ranges_shape": (1, 1, 7, 1, 2), "causal": True},
    "mask by key": {"mask_shape": (2, 1, 1, 7)},
    "bias": {"bias_shape": (2, 9, 5, 7), "bias_gradient": True},
    "bias by head": {"bias_shape": (1, 9, 1, 7), "bias_gradient": True},
    "bias by batch": {"bias_shape": (2, 1, 5, 1), "bias_gradient": True},
    "alibi": {"alibi_shape": (9,), "causal": True},
    "alibi by batch": {"alibi_shape": (2, 9)},
    "sinks": {"sinks": True},
    "sinks with empty rows": {"sinks": True, "causal": True, "q_len": 7, "kv_len": 5},
    "dropout": {"dropout": 0.3},
    "packed": PACKED,
    "packed, causal": {**PACKED, "causal": True},
    "packed, causal top_left": {**PACKED, "causal": True, "alignment": "top_left"},
    "packed, window, alibi, dropout": {**PACKED, "window": (2, 1), "alibi_shape": (9,), "dropout": 0.3},
    "packed, bias, mask, sinks": {
        **PACKED,
        **{"bias_shape": (1, 9, 12, 14), "mask_shape": (1, 1, 12, 14), "bias_gradient": True, "sinks": True},
    },
    "mask function": fields_of("by row and head", None, (2, 9, 5, 7)),
    "mask function with an array": fields_of("keys of heads", None, (2, 9, 5, 7)),
    "score function": fields_of(None, "bent", (2, 9, 5, 7)),
    "both functions": {
        **fields_of("first key of each query", "per row", (2, 9, 5, 7)),
        **{"causal": True, "softcap": 1.5, "bias_shape": (2, 9, 5, 7), "bias_gradient": True, "sinks": True},
    },
    "packed, functions": {**PACKED, **fields_of("documents", "hides", (1, 9, 12, 14))},
    "packed, key ranges, sinks": {**PACKED, "key_ranges_shape": (1, 3, 14, 2, 2), "sinks": True},
    "everything": {
        **{"causal": True, "window": (3, 0), "softcap": 1.5, "mask_shape": (2, 1, 5, 7), "bias_shape": (1, 9, 5, 7)},
        **{"bias_gradient": True, "alibi_shape": (2, 9), "sinks": True, "dropout": 0.2, "scale": 0.4},
    },
}


class Case(NamedTuple):
    """A spec with inputs and output gradients: float64 numbers that ``spec.dtype`` represents."""

    spec: AttentionSpec
    inputs: Inputs
    dout: np.ndarray
    dlse: np.ndarray


def make(features: dict[str, Any], dtype: str = "float64", seed: int = 0) -> Case:
    """The case of some of the FEATURES' fields (or other fields of a spec)."""
    spec = AttentionSpec(**{**SIZES, "dtype": dtype, **features})
    return fill(spec, seed, LENGTHS_Q if spec.packed else None, LENGTHS_K if spec.packed else None)


def fill(spec: AttentionSpec, seed: int, lengths_q: Any = None, lengths_k: Any = None) -> Case:
    """Random inputs for a spec; for a packed one with the lengths of its documents."""
    random = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return rounded(random.normal(size=shape), spec.dtype)

    rows = () if spec.packed else (spec.batch,)
    info = SeqInfo.from_lengths(lengths_q, lengths_k) if spec.packed else None
    inputs = Inputs(
        q=normal(*rows, spec.q_len, spec.num_heads, spec.head_dim),
        k=normal(*rows, spec.kv_len, spec.num_kv_heads, spec.head_dim),
        v=normal(*rows, spec.kv_len, spec.num_kv_heads, spec.value_dim),
        mask=None if spec.mask_shape is None else random.random(spec.mask_shape) < 0.6,
        bias=None if spec.bias_shape is None else normal(*spec.bias_shape),
        alibi_slopes=None if spec.alibi_shape is None else abs(normal(*spec.alibi_shape)),
        sinks=normal(spec.num_heads) if spec.sinks else None,
        cu_seqlens_q=None if info is None else info.cu_seqlens_q,
        cu_seqlens_k=None if info is None else info.cu_seqlens_k,
        key_ranges=None if spec.key_ranges_shape is None else random_ranges(spec, seed),
        rng=np.array([seed + 17, 3], np.int64) if spec.dropout else None,
        **named(aux_arrays(spec.aux, seed)),
    )
    return Case(spec, inputs, normal(*spec.out_shape), random.normal(size=spec.lse_shape))


def random_ranges(spec: AttentionSpec, seed: int) -> np.ndarray:
    """Random key ranges of a spec: a quarter of them empty, the rest of any length up to all queries."""
    random = np.random.default_rng(seed + 29)
    ranges = np.sort(random.integers(0, spec.q_len + 1, spec.key_ranges_shape, np.int32), -1)
    empty = random.random(ranges.shape[:-1]) < 0.25
    return np.where(empty[..., None], ranges[..., :1], ranges)


def rounded(array: Any, dtype: str) -> np.ndarray:
    """A float64 array rounded to the nearest values of a dtype."""
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    return np.asarray(array, np.float64).astype(kind).astype(np.float64)


def result_of(spec: AttentionSpec, results: Any) -> Any:
    """Gradients or an output, rounded to the dtype of the call as a kernel returns them."""
    if isinstance(results, Gradients):
        return Gradients(*(None if part is None else rounded(part, spec.dtype) for part in results))
    return rounded(results, spec.dtype)


F32 = np.float32


def honest(case: Case, *, key_block: int = 5) -> tuple[np.ndarray, np.ndarray, Gradients]:
    """(out, lse, gradients) of an honest kernel: float32 sums, an online softmax over blocks of keys, and weights,
    logit gradients and results rounded to the call's dtype.
    """
    spec = case.spec
    score, logit, seen = _scores(case)
    kept = np.ones(score.shape, F32)
    if spec.dropout:
        kept = dropout_keeps(case.inputs.rng.tolist(), tuple(np.ogrid[tuple(map(slice, score.shape))]), spec.dropout)
        kept = kept.astype(F32) / F32(1 - spec.dropout)
    sink = np.full((1, spec.num_heads, 1), -np.inf, F32)
    if spec.sinks:
        sink = case.inputs.sinks.astype(F32).reshape(sink.shape)
    out, lse = _online_softmax(case, logit, seen, kept, sink, key_block)
    gradients = _gradients(case, score, logit, seen, kept, sink, out, lse)
    return out.swapaxes(1, 2).reshape(spec.out_shape), lse.reshape(spec.lse_shape), result_of(spec, gradients)


def _heads(spec: AttentionSpec, array: Any) -> np.ndarray:
    """float32 ``[batch, heads, length, dim]`` with repeated key/value heads."""
    array = np.asarray(array, F32).reshape(spec.batch, -1, *np.shape(array)[-2:]).swapaxes(1, 2)
    return np.repeat(array, spec.num_heads // array.shape[1], axis=1)


def _low(spec: AttentionSpec, array: np.ndarray) -> np.ndarray:
    return rounded(array, spec.dtype).astype(F32)


def _scores(case: Case) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(scale q.k, logits, visible), ``[batch, heads, q_len, kv_len]``; hidden logits are -inf."""
    spec, inputs = case.spec, case.inputs
    score = (_heads(spec, inputs.q) @ _heads(spec, inputs.k).swapaxes(-1, -2)) * F32(spec.scale)
    logit = score if spec.softcap is None else F32(spec.softcap) * np.tanh(score / F32(spec.softcap))
    if spec.score_mod is not None:
        logit = scored(spec, logit, aux_of(inputs))[0].astype(F32)
    if inputs.bias is not None:
        logit = logit + inputs.bias.astype(F32)
    if inputs.alibi_slopes is not None:
        rows, columns = positions(spec, inputs.cu_seqlens_q, inputs.cu_seqlens_k)
        logit = logit - inputs.alibi_slopes.astype(F32)[..., None, None] * abs(rows[:, None] - columns).astype(F32)
    seen = np.broadcast_to(visible(spec, *_hiding(inputs)), score.shape) & (logit != -np.inf)
    return score, np.where(seen, logit, F32(-np.inf)), seen


def _hiding(inputs: Inputs) -> tuple[Any, ...]:
    return inputs.mask, inputs.cu_seqlens_q, inputs.cu_seqlens_k, inputs.key_ranges, aux_of(inputs)


def _online_softmax(
    case: Case, logit: np.ndarray, seen: np.ndarray, kept: np.ndarray, sink: np.ndarray, key_block: int
) -> tuple[np.ndarray, np.ndarray]:
    """(out, lse), heads first."""
    spec, v = case.spec, _heads(case.spec, case.inputs.v)
    top = np.broadcast_to(sink, logit.shape[:3])
    total, out = np.where(np.isinf(top), F32(0), F32(1)), np.zeros((*logit.shape[:3], spec.value_dim), F32)
    for start in range(0, spec.kv_len, key_block):
        block = np.s_[..., start : start + key_block]
        new = np.maximum(top, logit[block].max(-1))
        base = np.where(np.isinf(new), F32(0), new)
        shrink, weights = np.exp(top - base), np.exp(logit[block] - base[..., None])
        total = total * shrink + weights.sum(-1)
        out = out * shrink[..., None] + _low(spec, weights * kept[block]) @ v[:, :, start : start + key_block]
        top = new
    alive = seen.any(-1)
    total = np.where(total > 0, total, F32(1))  # no key and no sink
    out = np.where(alive[..., None], out / total[..., None], F32(0))
    return _low(spec, out), top + np.log(total)


def _gradients(case: Case, score: np.ndarray, logit: np.ndarray, seen: np.ndarray, kept, sink, out, lse) -> Gradients:
    spec, inputs, alive = case.spec, case.inputs, np.isfinite(lse)
    q, k, v, dout = (_heads(spec, array) for array in (inputs.q, inputs.k, inputs.v, case.dout))
    base = np.where(alive, lse, F32(0))
    weights = np.where(seen, np.exp(logit - base[..., None]), F32(0))
    row = case.dlse.astype(F32).reshape(lse.shape) - (dout * out).sum(-1)
    dlogit = weights * (kept * (dout @ v.swapaxes(-1, -2)) + row[..., None])
    slope = F32(1) if spec.softcap is None else 1 - np.tanh(score / F32(spec.softcap)) ** 2
    if spec.score_mod is not None:
        capped = score if spec.softcap is None else F32(spec.softcap) * np.tanh(score / F32(spec.softcap))
        slope = slope * scored(spec, capped, aux_of(inputs))[1].astype(F32)
    dscore = _low(spec, np.where(seen, dlogit * slope, F32(0))) * F32(spec.scale)
    by_head = dscore.swapaxes(-1, -2) @ q, _low(spec, weights * kept).swapaxes(-1, -2) @ dout
    groups = (spec.batch, spec.num_kv_heads, spec.group_size)
    dk, dv = (part.reshape(*groups, *part.shape[2:]).sum(2, dtype=F32) for part in by_head)
    dq, dk, dv = (
        part.swapaxes(1, 2).reshape(like.shape)
        for part, like in zip((dscore @ k, dk, dv), (inputs.q, inputs.k, inputs.v), strict=True)
    )
    axes = tuple(axis for axis, size in enumerate(spec.bias_shape or ()) if size == 1)
    dbias = dlogit.sum(axes, keepdims=True) if spec.bias_gradient else None
    dsinks = (np.where(alive, np.exp(sink - base), F32(0)) * row).sum((0, 2)) if spec.sinks else None
    return Gradients(dq, dk, dv, dbias, dsinks)


def altered(case: Case, **fields: Any) -> Case:
    """The case with other fields in its spec and the same inputs: the call as a kernel computes it that misreads the
    spec."""
    return case._replace(spec=replace(case.spec, **fields))
