"""Forward mode: tangents for a drawn call, and in numpy float64 those of out and lse with the bound of every element.

With w the softmax weights, f dropout's factors, b the slope of softcap and score function, and m the tangent of lse:

    dt      b scale (dq.k + q.dk) + dbias
    dlse    m = sum w dt, with the sink's tangent as one more term
    dout    sum w f ((dt - m) v + dv)

The bounds hold for a kernel as in ``bounds``, in one pass: it rounds ``w dt`` and ``w`` to the call's dtype, and
subtracts ``m out`` at the end. With the names of ``bounds``, E the error of dt in units of e, and M that of m:

    dout    4 u (sum w f ((|dt| + |m|) |v| + |dv|) + |dout|)
            + 8 e sum w f ((A + Abar) ((|dt| + |m|) |v| + |dv|) + (E + M) |v|), and the smallest steps of the dtype
    dlse    8 e (M + |m|)
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from oracle_cases import rounded
from spec_strategies import Call

from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Inputs, Tangents
from attn_core.correctness import accuracy, reference
from attn_core.correctness.accuracy import ROUNDOFF, TINY, Expected, float32_roundoff, lse_bound, magnitudes, out_bound
from attn_core.correctness.reference import Array, Softmax, from_heads_first, heads_first, sum_over

LARGEST_MOVE = 2.0**14
"""A kernel in float16 divides larger tangents of logits, and so loses the last digits of small weights."""


NAMES = ("q", "k", "v", "bias", "sinks")
"""The inputs that may have tangents."""


def in_forward_mode(call: Call) -> Call:
    """The call without gradients in reverse mode, and with the log-sum-exp.

    torch itself gives no tangent to a tensor whose elements share memory.
    """
    layout = "contiguous" if call.layout == "one_head_expanded" else call.layout
    return replace(call, spec=replace(call.inference.spec, return_lse=True), layout=layout)


def tangents_of(call: Call, names: tuple[str, ...] = NAMES) -> Tangents:
    """Tangents for some of the call's inputs: float64 numbers that the inputs' dtypes represent."""
    random = np.random.default_rng(call.seed + 7)
    moved = {}
    for name in NAMES:
        primal = getattr(call.inputs, name)
        if primal is not None:
            values = rounded(random.standard_normal(primal.shape), call.dtype_of(name))
            moved[f"d{name}"] = values if name in names else None
    return Tangents(**moved)


def judge(call: Call, tangents: Tangents, results: dict[str, Any], inputs: Inputs | None = None) -> accuracy.Accuracy:
    """The verdict on out, lse, dout and dlse as a caller gets them."""
    return expect(call.spec, inputs or call.inputs, tangents).compare(results)


class Moves(NamedTuple):
    """The tangents behind a call's results; ``[batch, heads, q_len, kv_len]`` unless noted.

    Attributes:
        scores: the tangent of ``scale * q.k``; scores_size: its terms' magnitudes.
        logits: the tangent of the logits, 0 where hidden; bias: the bias's part of it.
        values: ``[batch, heads, kv_len, value_dim]``, the tangent of v.
        mean: ``[batch, heads, q_len]``, the tangent of lse.
    """

    scores: Array
    scores_size: Array
    logits: Array
    bias: Array
    values: Array
    mean: Array


def jvp(spec: AttentionSpec, inputs: Inputs, tangents: Tangents) -> tuple[Array, Array]:
    """Returns the tangents of the output and the log-sum-exp, float64, in ``spec.out_shape`` and ``spec.lse_shape``.

    The log-sum-exp is the caller's: a row that sees no key has its sink, and so the sink's tangent, or 0.
    """
    with np.errstate(all="ignore"):
        call = reference.softmax(spec, inputs)
        return _results(spec, call, _moves(spec, call, tangents))


def expect(spec: AttentionSpec, inputs: Inputs, tangents: Tangents) -> Expected:
    """Returns the reference's out, lse, dout and dlse of one call, and their bounds. dout and dlse are tangents."""
    out, lse = reference.forward(spec, inputs)
    with np.errstate(all="ignore"):
        call = reference.softmax(spec, inputs)
        sizes, moves = magnitudes(spec, call), _moves(spec, call, tangents)
        dout, dlse = _results(spec, call, moves)
        bounds = {"out": out_bound(spec, call, sizes, out), "lse": lse_bound(spec, sizes)}
        call = call._replace(weights=sizes.weights, sink_weights=sizes.sink_weights)
        reach = sizes.logits + sizes.mean[..., None]
        error = _logit_errors(spec, call, sizes.scores, moves)
        sinks = (1.0 + sizes.sink + sizes.mean) * abs(_sink_moves(spec, tangents))
        mean_error = (call.weights * (error + reach * abs(moves.logits))).sum(-1) + call.sink_weights * sinks
        bounds["dlse"] = (8 * float32_roundoff(spec) * (mean_error + abs(moves.mean))).reshape(spec.lse_shape)
        bounds["dout"] = _dout_bound(spec, call, moves, reach, error + mean_error[..., None], dout)
    return Expected({"out": out, "lse": lse, "dout": dout, "dlse": dlse}, bounds)


def _moves(spec: AttentionSpec, call: Softmax, tangents: Tangents) -> Moves:
    kv_head = np.arange(spec.num_heads) // spec.group_size
    dq = np.zeros_like(call.q) if tangents.dq is None else heads_first(spec, tangents.dq)
    dk, dv = (
        np.zeros_like(primal) if moved is None else heads_first(spec, moved)[:, kv_head]
        for primal, moved in ((call.k, tangents.dk), (call.v, tangents.dv))
    )
    k, keys = call.k.swapaxes(-1, -2), dk.swapaxes(-1, -2)
    scores = spec.scale * (dq @ k + call.q @ keys)
    size = spec.scale * (abs(dq) @ abs(k) + abs(call.q) @ abs(keys))
    shape = (1, 1, 1, 1) if tangents.dbias is None else spec.bias_shape
    bias = np.zeros((1, 1, 1, 1)) if tangents.dbias is None else np.asarray(tangents.dbias, np.float64).reshape(shape)
    # A hidden pair's tangent may be NaN, and its slope infinite.
    logits = np.where(call.seen, call.slope * call.mod_slope * scores + bias, 0.0)
    mean = (call.weights * logits).sum(-1) + call.sink_weights * _sink_moves(spec, tangents)
    return Moves(scores, size, logits, bias, dv, mean)


def _sink_moves(spec: AttentionSpec, tangents: Tangents) -> Array:
    """Returns the tangents of the sinks, ``[1, heads, 1]``; 0 without."""
    if tangents.dsinks is None:
        return np.zeros((1, spec.num_heads, 1))
    return np.asarray(tangents.dsinks, np.float64).reshape(1, spec.num_heads, 1)


def _results(spec: AttentionSpec, call: Softmax, moves: Moves) -> tuple[Array, Array]:
    weights = call.weights * call.factors
    centred = np.where(call.seen, moves.logits - moves.mean[..., None], 0.0)
    dout = sum_over(weights * centred, call.seen, call.v) + sum_over(weights, call.seen, moves.values)
    return from_heads_first(spec, dout), moves.mean.reshape(spec.lse_shape)


def _logit_errors(spec: AttentionSpec, call: Softmax, scores: Array, moves: Moves) -> Array:
    """Returns E: the errors of the products, then those of the slopes, which move with their scores and round."""
    bend, size = abs(call.mod_slope), abs(moves.scores)
    error = call.slope * bend * moves.scores_size
    if spec.softcap is not None:
        bent = abs(call.capped) / spec.softcap
        error = error + bend * 2 * bent * (bent + call.slope * scores / spec.softcap) * size
    if spec.score_mod is not None:
        moved = abs(call.mod_bend) * (call.slope * scores + abs(call.capped))
        error = error + (moved + call.mod_slope_rounding) * call.slope * size
    return np.where(call.seen, error + abs(moves.bias) + abs(moves.logits), 0.0)


def _dout_bound(spec: AttentionSpec, call: Softmax, moves: Moves, reach: Array, error: Array, dout: Array) -> Array:
    """Returns the bound of dout. reach: A + Abar; error: E + M."""
    weights, size = call.weights * call.factors, abs(moves.logits) + abs(moves.mean)[..., None]
    values, moved = abs(call.v), abs(moves.values)

    def over(each: Array, of: Array) -> Array:
        return sum_over(np.where(call.seen, each, 0.0), call.seen, of)

    rounding = over(weights * size, values) + over(weights, moved)
    logits = over(weights * (reach * size + error), values) + over(weights * reach, moved)
    largest = 1.0 + abs(moves.logits).max(-1, initial=0.0)[..., None] / LARGEST_MOVE
    steps = largest * (over(np.ones_like(weights), values) + over(np.ones_like(weights), moved)) + 2
    bound = 4 * ROUNDOFF[spec.dtype] * rounding + 8 * float32_roundoff(spec) * logits + TINY[spec.dtype] * steps
    return from_heads_first(spec, bound) + 4 * ROUNDOFF[spec.dtype] * abs(dout)
