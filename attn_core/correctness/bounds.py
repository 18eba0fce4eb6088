"""The error bound of every element of a result, computed with the float64 reference.

The bounds hold for a kernel that accumulates in float32, stores logits and log-sum-exp in float32, and rounds only
weights, logit gradients and results to the call's dtype. With u the dtype's roundoff, e = 2^-24 float32's, p the
softmax weights, A the magnitude of the terms of a logit, and Abar = sum_j p A:

    out     4 u (sum p |v| + |out|) + 8 e sum p (A + Abar) |v|
    lse     2e-5 (2e-4 in half precision) + 8 e (Abar + |lse|), and 2^-17 softcap in half precision
    dX      8 (u (cond + |dX|) + e condA): cond is dX's own sum taken over magnitudes, condA that sum with the logits'
            errors in it; and where weights or dS (scaled or not) may underflow in the dtype, its smallest step for
            each term of the sum, times what a weight is multiplied by

The first term of a bound is rounding, the second the effect of a relative error e in each logit's terms. An error in
a logit changes p by p (dlogit - mean dlogit), hence A + Abar. In a row whose logits are equal and large both are 0, and
|lse| counts in gradients up to LARGE_LSE: such a row is a mean of its values, and in both directions its weights sum
to 1. In other rows whose logits have lost all digits of the weights, 8 e A >= 1, each weight counts as 1 and errs by 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from attn_core.call.functions import DAUX, TANH_ERROR, lookup_slopes, slope
from attn_core.call.large_logits import LARGE_LSE
from attn_core.call.spec import AttentionSpec
from attn_core.correctness.magnitudes import ROUNDOFF, TINY, Magnitudes, float32_roundoff
from attn_core.correctness.reference import (
    Array,
    Softmax,
    from_heads_first,
    heads_first,
    per_row,
    sum_groups,
    sum_over,
    sum_to_bias,
)
from attn_core.expressions.on_numpy import block_indices, evaluate_numpy, sum_at_lookup
from attn_core.expressions.rounding import rounding

TANH = {"float64": 0.0, "float32": 0.0, "float16": 2.0**-17, "bfloat16": 2.0**-17}
"""The absolute error of tanh. Kernels in half precision use the GPU's ``tanh.approx``: 5.3e-6 was seen on an H100."""
_LSE_FLOOR = {"float64": 1e-13, "float32": 2e-5, "float16": 2e-4, "bfloat16": 2e-4}


def out_bound(spec: AttentionSpec, call: Softmax, sizes: Magnitudes, out: Array) -> Array:
    """Returns the error bound of out, in ``spec.out_shape``."""
    weights, values = sizes.weights * call.factors, abs(call.v)
    rounding = sum_over(weights, call.seen, values)
    logits = sum_over(weights * (sizes.logits + sizes.mean[..., None]), call.seen, values)
    u = ROUNDOFF[spec.dtype]
    bound = 4 * u * rounding + 8 * float32_roundoff(spec) * logits + 2 * TINY[spec.dtype]
    return from_heads_first(spec, bound) + 4 * u * abs(out)


def lse_bound(spec: AttentionSpec, sizes: Magnitudes) -> Array:
    """Returns the error bound of the log-sum-exp, in ``spec.lse_shape``: a floor, plus the rounding of large logits."""
    tanh = (spec.softcap or 0.0) * TANH[spec.dtype]
    bound = _LSE_FLOOR[spec.dtype] + tanh + 8 * float32_roundoff(spec) * (sizes.mean + sizes.lse)
    return bound.reshape(spec.lse_shape)


def gradient_bounds(
    spec: AttentionSpec,
    call: Softmax,
    sizes: Magnitudes,
    truth: dict[str, Array],
    dout: Any,
    dlse: Any,
    aux: Sequence[Any] = (),
) -> dict[str, Array]:
    """Returns the error bounds of the gradients that are in ``truth``, in their shapes.

    Args:
        aux: the arrays of the call's functions.
    """
    e = float32_roundoff(spec)
    sums = _sums(spec, call, sizes, abs(heads_first(spec, dout)), abs(per_row(spec, dlse)), aux)
    # The gradient of an array has the array's dtype, which may round more than that of the call.
    dtypes = {DAUX[number]: spec.aux[number].dtype for number in spec.aux_gradients}
    kinds = {name: (spec.dtype, dtypes.get(name, spec.dtype)) for name in sums}
    units = {name: (max(ROUNDOFF[k] for k in pair), max(TINY[k] for k in pair)) for name, pair in kinds.items()}
    return {
        name: 8 * (units[name][0] * (cond + abs(truth[name])) + e * logits) + units[name][1] * (terms + 2)
        for name, (cond, logits, terms) in sums.items()
        if name in truth
    }


class _Sum(NamedTuple):
    """One gradient's sum over magnitudes (cond), the same with the logits' errors (logits), and underflows (terms).

    The three names are those of the formula at the top of this file: cond, condA, and the count of smallest steps.
    """

    cond: Array
    logits: Array
    terms: Array

    def over_keys(self, spec: AttentionSpec, call: Softmax, values: Array) -> _Sum:
        return _Sum(*(from_heads_first(spec, sum_over(part, call.seen, values)) for part in self))

    def over_queries(self, spec: AttentionSpec, call: Softmax, values: Array) -> _Sum:
        seen = call.seen.swapaxes(-1, -2)
        sums = (sum_groups(spec, sum_over(part.swapaxes(-1, -2), seen, values)) for part in self)
        return _Sum(*(from_heads_first(spec, part) for part in sums))


def _sums(
    spec: AttentionSpec, call: Softmax, sizes: Magnitudes, dout: Array, dlse: Array, aux: Sequence[Any]
) -> dict[str, _Sum]:
    """Returns the sums of each gradient by name. dout and dlse are magnitudes, heads first."""
    weights, terms = sizes.weights * call.factors, np.where(call.seen, 1.0, 0.0)
    dweights = np.where(call.seen, dout @ abs(call.v).swapaxes(-1, -2), 0.0)
    # delta = dO . O comes from the rounded out and errs as out does: by its rounding and by its own logits' errors.
    delta = (weights * dweights).sum(-1) + dlse
    delta_logits = (weights * (sizes.logits + sizes.mean[..., None]) * dweights).sum(-1)
    # The backward recomputes p = exp(logit - lse) from an lse rounded to float32, so |lse| adds to the logits' errors.
    # Beyond LARGE_LSE it must divide p by its sum.
    reach = sizes.logits + (sizes.mean + np.minimum(sizes.lse, LARGE_LSE))[..., None]
    cond = np.where(call.seen, sizes.weights * (call.factors * dweights + delta[..., None]), 0.0)
    logits = np.where(call.seen, reach * cond + sizes.weights * delta_logits[..., None], 0.0)
    dlogits = _Sum(cond, logits, np.where(call.seen, 1.0 + call.factors * dweights + delta[..., None], 0.0))
    dscores = _dscores(spec, call, sizes, dlogits)
    sink, sink_reach = sizes.sink_weights, sizes.sink + sizes.mean + sizes.lse
    dsinks = _Sum(sink * delta, sink * (sink_reach * delta + delta_logits), np.zeros_like(delta))
    return {
        "dq": dscores.over_keys(spec, call, abs(call.k)),
        "dk": dscores.over_queries(spec, call, abs(call.q)),
        "dv": _Sum(weights, weights * reach, terms).over_queries(spec, call, dout),
        "dbias": _Sum(*(sum_to_bias(spec, part) for part in dlogits)),
        "dsinks": _Sum(*(part.sum((0, 2)) for part in dsinks)),
        **_aux_sums(spec, call, sizes, dlogits, aux),
    }


def _aux_sums(
    spec: AttentionSpec, call: Softmax, sizes: Magnitudes, dlogits: _Sum, aux: Sequence[Any]
) -> dict[str, _Sum]:
    """Carries sums for the logits over to the score function's arrays, as ``_dscores`` does to the scores."""
    zeros = {number: np.zeros(spec.aux[number].shape) for number in spec.aux_gradients}
    totals = {number: _Sum(zero, zero, zero) for number, zero in zeros.items()}
    indices = block_indices(spec.batch, spec.num_heads, spec.q_len, spec.kv_len)
    for node, tree in lookup_slopes(spec.score_mod, spec.aux_gradients) if totals else ():  # type: ignore[arg-type]
        trees = tree, slope(tree), rounding(tree, TANH_ERROR.get(spec.dtype, 0.0))
        size, bend, error = (abs(evaluate_numpy(each, indices, call.capped, aux)) for each in trees)
        moved = bend * (call.slope * sizes.scores + abs(call.capped)) + error
        logits = size * (dlogits.logits + dlogits.cond) + moved * dlogits.cond
        parts = (np.where(call.seen & ~np.isnan(x), x, 0.0) for x in (size * dlogits.cond, logits, dlogits.terms))
        number = int(node.value or 0)
        added = (sum_at_lookup(node, part, indices, call.capped, aux) for part in parts)
        totals[number] = _Sum(*(a + b for a, b in zip(totals[number], added, strict=True)))
    return {DAUX[number]: total for number, total in totals.items()}


def _dscores(spec: AttentionSpec, call: Softmax, sizes: Magnitudes, dlogits: _Sum) -> _Sum:
    """Carries sums for the logits over to the scores: through the slopes of the score function and of the softcap, 1 -
    tanh^2, then the scale.

    The slope has errors of its own: its operations round, and an error of the score moves the point at which the slope
    is taken.
    """
    cond, logits = dlogits.cond, dlogits.logits
    if spec.score_mod is not None:
        slope, moved = abs(call.mod_slope), abs(call.mod_bend) * (call.slope * sizes.scores + abs(call.capped))
        logits = np.where(call.seen, slope * (logits + cond) + (moved + call.mod_slope_rounding) * cond, 0.0)
        cond = np.where(call.seen, slope * cond, 0.0)
    dlogits = dlogits._replace(cond=cond, logits=logits)
    cond, logits = call.slope * cond, call.slope * logits
    if spec.softcap is not None:
        bent = abs(call.capped) / spec.softcap
        logits = logits + dlogits.cond * 2 * bent * (bent + call.slope * sizes.scores / spec.softcap)
    # dS may underflow before the scale multiplies it or after, so a term counts the larger of both steps.
    return _Sum(spec.scale * cond, spec.scale * logits, max(spec.scale or 1.0, 1.0) * dlogits.terms)
