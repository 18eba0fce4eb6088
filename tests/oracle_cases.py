"""Calls for the tests of the oracle: the features one by one, inputs for any spec, and an honest float32 kernel."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from attn_core import AttentionSpec, SeqInfo
from attn_core.backends import Gradients, Inputs
from attn_core.dropout import keep
from attn_core.masks import positions, visible

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
    "everything": {
        **{"causal": True, "window": (3, 0), "softcap": 1.5, "mask_shape": (2, 1, 5, 7), "bias_shape": (1, 9, 5, 7)},
        **{"bias_gradient": True, "alibi_shape": (2, 9), "sinks": True, "dropout": 0.2, "scale": 0.4},
    },
}


class Case(NamedTuple):
    """A spec with inputs and output gradients, float64 but of values that ``spec.dtype`` holds."""

    spec: AttentionSpec
    inputs: Inputs
    dout: np.ndarray
    dlse: np.ndarray


def make(features: dict[str, Any], dtype: str = "float64", seed: int = 0) -> Case:
    """The case of some of the FEATURES' fields (or any other fields of a spec)."""
    spec = AttentionSpec(**{**SIZES, "dtype": dtype, **features})
    return fill(spec, seed, LENGTHS_Q if spec.packed else None, LENGTHS_K if spec.packed else None)


def fill(spec: AttentionSpec, seed: int, lengths_q: Any = None, lengths_k: Any = None) -> Case:
    """Random inputs for a spec; the lengths of its documents when it is packed."""
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
        rng=np.array([seed + 17, 3], np.int64) if spec.dropout else None,
    )
    return Case(spec, inputs, normal(*spec.out_shape), random.normal(size=spec.lse_shape))


def rounded(array: Any, dtype: str) -> np.ndarray:
    """float64 array of the nearest values of a dtype."""
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    return np.asarray(array, np.float64).astype(kind).astype(np.float64)


def result_of(spec: AttentionSpec, results: Any) -> Any:
    """Gradients or an output, rounded to the dtype of the call as a kernel returns them."""
    if isinstance(results, Gradients):
        return Gradients(*(None if part is None else rounded(part, spec.dtype) for part in results))
    return rounded(results, spec.dtype)


def honest(case: Case, *, key_block: int = 5) -> tuple[np.ndarray, np.ndarray, Gradients]:
    """(out, lse, gradients) as an honest kernel computes them: float32 sums, an online softmax over blocks of keys, and
    weights, logit gradients and results rounded to the call's dtype."""
    spec, inputs, f32 = case.spec, case.inputs, np.float32

    def heads(array: Any) -> np.ndarray:  # [batch, heads, length, dim], key/value heads repeated
        array = np.asarray(array, f32).reshape(spec.batch, -1, *np.shape(array)[-2:]).swapaxes(1, 2)
        return np.repeat(array, spec.num_heads // array.shape[1], axis=1)

    def low(array: np.ndarray) -> np.ndarray:
        return rounded(array, spec.dtype).astype(f32)

    q, k, v, dout = (heads(array) for array in (inputs.q, inputs.k, inputs.v, case.dout))
    score = (q @ k.swapaxes(-1, -2)) * f32(spec.scale)
    cap = None if spec.softcap is None else f32(spec.softcap)
    logit = score if cap is None else cap * np.tanh(score / cap)
    logit = logit + (f32(0) if inputs.bias is None else np.asarray(inputs.bias, f32))
    if inputs.alibi_slopes is not None:
        rows, columns = positions(spec, inputs.cu_seqlens_q, inputs.cu_seqlens_k)
        logit = logit - np.asarray(inputs.alibi_slopes, f32)[..., None, None] * abs(rows[:, None] - columns).astype(f32)
    seen = visible(spec, inputs.mask, inputs.cu_seqlens_q, inputs.cu_seqlens_k)
    seen = np.broadcast_to(seen, score.shape)
    logit = np.where(seen, logit, f32(-np.inf))
    kept = np.ones(score.shape, f32)
    if spec.dropout:
        kept = keep(inputs.rng.tolist(), tuple(np.ogrid[tuple(map(slice, score.shape))]), spec.dropout).astype(f32)
        kept /= f32(1 - spec.dropout)

    sink = np.full(spec.num_heads, -np.inf) if inputs.sinks is None else inputs.sinks
    top = np.broadcast_to(np.asarray(sink, f32)[None, :, None], score.shape[:3])
    total, out = np.where(np.isinf(top), f32(0), f32(1)), np.zeros((*score.shape[:3], spec.value_dim), f32)
    for start in range(0, spec.kv_len, key_block):
        block = np.s_[..., start : start + key_block]
        new = np.maximum(top, logit[block].max(-1))
        base = np.where(np.isinf(new), f32(0), new)
        shrink, weights = np.exp(top - base), np.exp(logit[block] - base[..., None])
        total = total * shrink + weights.sum(-1)
        out = out * shrink[..., None] + low(weights * kept[block]) @ v[:, :, start : start + key_block]
        top = new
    alive = seen.any(-1)
    out = low(np.where(alive[..., None], out / np.where(alive, total, f32(1))[..., None], f32(0)))
    lse = np.where(alive, top + np.log(np.where(alive, total, f32(1))), f32(-np.inf))

    weights = np.where(seen, np.exp(logit - np.where(alive, lse, f32(0))[..., None]), f32(0))
    row = case.dlse.astype(f32).reshape(lse.shape) - (dout * out).sum(-1)
    dlogit = weights * (kept * (dout @ v.swapaxes(-1, -2)) + row[..., None])
    dscore = low(dlogit if cap is None else dlogit * (1 - np.tanh(score / cap) ** 2)) * f32(spec.scale)
    by_key = dscore.swapaxes(-1, -2) @ q, low(weights * kept).swapaxes(-1, -2) @ dout
    dk, dv = (
        part.reshape(spec.batch, spec.num_kv_heads, spec.group_size, *part.shape[2:]).sum(2, dtype=f32)
        for part in by_key
    )
    dsinks = np.where(alive, np.exp(np.asarray(sink, f32)[None, :, None] - np.where(alive, lse, f32(0))), f32(0)) * row
    shaped = [
        part.swapaxes(1, 2).reshape(np.shape(like))
        for part, like in zip((dscore @ k, dk, dv), (inputs.q, inputs.k, inputs.v), strict=True)
    ]
    axes = tuple(axis for axis, size in enumerate(spec.bias_shape or ()) if size == 1)
    gradients = Gradients(
        *shaped,
        dlogit.sum(axes, keepdims=True) if spec.bias_gradient else None,
        dsinks.sum((0, 2)) if spec.sinks else None,
    )
    out = out.swapaxes(1, 2).reshape(spec.out_shape)
    return out, lse.reshape(spec.lse_shape), result_of(spec, gradients)


def altered(case: Case, **fields: Any) -> Case:
    """The case with other fields in its spec and the same inputs: what a kernel that misread the spec would compute."""
    return case._replace(spec=replace(case.spec, **fields))
