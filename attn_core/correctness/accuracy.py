"""Judges results: every element must lie within its own bound around the float64 reference.

No tolerance can detect one key more or less among thousands; ``mask_probe`` detects it exactly. The tests, ``attn
doctor`` and ``attn compare`` use both.

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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from attn_core.call.arithmetic import LARGE_LSE
from attn_core.call.functions import DAUX, TANH_ERROR, aux_of, lookup_slopes, slope
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Gradients, Inputs
from attn_core.correctness import reference
from attn_core.correctness.probe import MaskProbe, mask_probe
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
from attn_core.errors import ShapeError, SpecError
from attn_core.expressions.derivatives import rounding
from attn_core.expressions.on_numpy import block_indices, evaluate_numpy, sum_at_lookup

if TYPE_CHECKING:
    from numpy.typing import ArrayLike


__all__ = ["Accuracy", "Expected", "MaskProbe", "Quantity", "check", "expect", "mask_probe"]

ROUNDOFF = {"float64": 2.0**-52, "float32": 2.0**-24, "float16": 2.0**-12, "bfloat16": 2.0**-9}
TINY = {"float64": 2.0**-1022, "float32": 2.0**-126, "float16": 2.0**-24, "bfloat16": 2.0**-126}
TANH = {"float64": 0.0, "float32": 0.0, "float16": 2.0**-17, "bfloat16": 2.0**-17}
"""The absolute error of tanh. Kernels in half precision use the GPU's ``tanh.approx``: 5.3e-6 was seen on an H100."""
_LSE_FLOOR = {"float64": 1e-13, "float32": 2e-5, "float16": 2e-4, "bfloat16": 2e-4}


@dataclass(frozen=True)
class Quantity:
    """One result compared with the reference: the largest ``error / bound`` of its elements, and the largest error."""

    name: str
    use: float
    error: float

    def __str__(self) -> str:
        verdict = "" if self.use <= 1 else " WRONG"
        return f"{self.name}: {self.use:.3g} of the bound, error {self.error:.2e}{verdict}"


@dataclass(frozen=True)
class Accuracy:
    """The comparison of one call's results with the reference, one Quantity per result."""

    quantities: tuple[Quantity, ...]

    @property
    def ok(self) -> bool:
        """Whether every element of every quantity is within its bound."""
        return self.worst <= 1

    @property
    def worst(self) -> float:
        """The largest ``error / bound``. Above 1 is wrong; infinity means a NaN or Inf that the reference lacks."""
        return max((quantity.use for quantity in self.quantities), default=0.0)

    def __getitem__(self, name: str) -> Quantity:
        return next(quantity for quantity in self.quantities if quantity.name == name)

    def __str__(self) -> str:
        return "\n".join(map(str, self.quantities))


@dataclass(frozen=True, eq=False)
class Expected:
    """The reference's results for one call, and the error bound of each element.

    Attributes:
        truth, bound: arrays of the same shapes, by the names out, lse, dq, dk, dv, dbias, dsinks, daux0 to daux3; in
            forward mode out, lse, dout, dlse.
    """

    truth: dict[str, Array]
    bound: dict[str, Array]

    def judge(self, *, out: ArrayLike, lse: ArrayLike | None = None, gradients: Gradients | None = None) -> Accuracy:
        """Compares results with the expected ones. Arrays are anything that numpy casts to float64.

        Args:
            lse, gradients: compared unless None.

        Raises:
            ShapeError: if a result has the wrong shape, or a gradient of the call is None.
            SpecError: if there are gradients, but ``expect`` was called without dout.
        """
        results = {"out": out} | ({} if lse is None else {"lse": lse})
        if gradients is not None:
            if "dq" not in self.truth:
                raise SpecError("dout=None: expected the gradient of out with which the gradients were computed")
            results |= {name: result for name, result in gradients._asdict().items() if name in self.truth}
        return self.compare(results)

    def compare(self, results: Mapping[str, ArrayLike]) -> Accuracy:
        """Compares results, by their names in ``truth``, with the expected ones.

        Raises:
            ShapeError: if a result has the wrong shape.
        """
        return Accuracy(tuple(self._compare(name, result) for name, result in results.items()))

    def _compare(self, name: str, result: ArrayLike | None) -> Quantity:
        """Returns the largest error of a result, and the largest share of its bound that an error uses."""
        truth, bound = self.truth[name], self.bound[name]
        if result is None or np.shape(result) != truth.shape:
            shape = None if result is None else list(np.shape(result))
            raise ShapeError(f"{name}: expected shape {list(truth.shape)}, got {shape}")
        result = np.asarray(result, np.float64)
        with np.errstate(all="ignore"):
            # Equal values have error 0 even if both are infinite, where the difference would be NaN (lse = -inf).
            error = np.where(result == truth, 0.0, abs(result - truth))
            # A NaN error compares as neither larger nor smaller, so max() could miss it: count it as infinite.
            error = np.where(np.isfinite(result) | (error == 0.0), error, np.inf)
            use = np.where(error == 0.0, 0.0, np.where(np.isfinite(truth), error / bound, np.inf))
        judged = ~np.isnan(truth)  # a NaN of the reference comes from NaN inputs, for which any result is allowed
        return Quantity(name, *(float(array.max(initial=0.0, where=judged)) for array in (use, error)))


def check(
    spec: AttentionSpec,
    inputs: Inputs,
    *,
    out: ArrayLike,
    lse: ArrayLike | None = None,
    gradients: Gradients | None = None,
    dout: ArrayLike | None = None,
    dlse: ArrayLike | None = None,
) -> Accuracy:
    """Compares one call's results with the reference on the same inputs. All arrays are cast to float64 by numpy.

    To compare several backends on the same inputs, call ``expect`` once: it computes the reference.
    """
    return expect(spec, inputs, dout=dout, dlse=dlse).judge(out=out, lse=lse, gradients=gradients)


def expect(
    spec: AttentionSpec, inputs: Inputs, *, dout: ArrayLike | None = None, dlse: ArrayLike | None = None
) -> Expected:
    """Returns the reference's results and bounds for one call, with gradients if dout is not None."""
    out, lse = reference.forward(spec, inputs)
    with np.errstate(all="ignore"):
        call = reference.softmax(spec, inputs)
        sizes = magnitudes(spec, call)
        truth: dict[str, Array] = {"out": out, "lse": lse}
        bound = {"out": out_bound(spec, call, sizes, out), "lse": lse_bound(spec, sizes)}
    if dout is not None:
        gradients = reference.backward(spec, inputs, out, lse, dout, dlse)._asdict()
        truth |= {name: gradient for name, gradient in gradients.items() if gradient is not None}
        with np.errstate(all="ignore"):
            bound |= gradient_bounds(spec, call, sizes, truth, dout, dlse, aux_of(inputs))
    return Expected(truth, bound)


# Half of the unit roundoff for float16 and bfloat16: the scale that the constants 4 and 8 were measured on. Twice it
# for float64, since the reference rounds as well.


class Magnitudes(NamedTuple):
    """The scales of rounding errors; ``[batch, heads, q_len, kv_len]``, or ``[batch, heads, q_len]`` by row.

    Attributes:
        scores: scale |q|.|k|, the scale of a float32 dot product's error.
        logits: A. Softcap shrinks the score's error by its slope and rounds its own result, so does a score function,
            whose every operation rounds, and adding bias or ALiBi rounds at their magnitude.
        mean: Abar by row, the scale of the log-sum-exp's error; the sink counts as one more logit.
        sink: |sink| by row, 0 without a sink.
        lse: |lse| by row, 0 if it is -inf; in lost rows plus the largest A.
        weights, sink_weights: the softmax weights, in lost rows the largest that they may be; see ``_unless_lost``.
    """

    scores: Array
    logits: Array
    mean: Array
    sink: Array
    lse: Array
    weights: Array
    sink_weights: Array


def magnitudes(spec: AttentionSpec, call: Softmax) -> Magnitudes:
    """Computes the magnitudes of a call, those of lost rows included."""
    return _unless_lost(spec, call, of_first_order(spec, call))


def of_first_order(spec: AttentionSpec, call: Softmax) -> Magnitudes:
    """Computes the magnitudes of a call as if it had no lost rows."""
    scores = spec.scale * (abs(call.q) @ abs(call.k).swapaxes(-1, -2))
    capped = 0.0 if spec.softcap is None else abs(call.capped)
    logits = call.slope * scores + capped
    if spec.score_mod is not None:  # it carries the error of its score, and rounds by itself
        logits = abs(call.mod_slope) * (logits + abs(call.capped))
    flat = _flat_rows(spec, call, logits)
    logits = logits + (0.0 if spec.score_mod is None else call.mod_rounding) + abs(call.added)
    logits = np.where(call.seen & ~flat[..., None], logits, 0.0)
    sink = np.where(call.sink_weights > 0, abs(call.sink), 0.0)
    mean = (call.weights * logits).sum(-1) + call.sink_weights * sink
    lse = np.where(np.isinf(call.lse), 0.0, abs(call.lse))
    return Magnitudes(scores, logits, mean, sink, lse, call.weights, call.sink_weights)


def _unless_lost(spec: AttentionSpec, call: Softmax, sizes: Magnitudes) -> Magnitudes:
    """Returns the magnitudes with those of lost rows: rows in which an error 8 e A is 1 or more.

    The other bounds are of first order: an error d changes p by p d. That holds for small d only. A large one can make
    a weight of 1e-6 a weight of 1. So all that is known of a lost row is that its weights are between 0 and 1, and that
    a logit has no weight if it stays below another by more than the exponential's range, whatever their errors. Here
    each of the other weights counts as 1 with an A of 1 / (8 e), an error of 1. The log-sum-exp errs at most as the
    logit that errs most.
    """
    unit = 8 * float32_roundoff(spec)
    sink_error = unit * abs(np.where(call.sink == -np.inf, 0.0, call.sink))
    error, logits = unit * sizes.logits, np.where(call.seen, call.logits, -np.inf)
    least = np.maximum((logits - error).max(-1, initial=-np.inf), call.sink - sink_error)
    least = least + np.log(TINY["float64" if spec.dtype == "float64" else "float32"])
    counts = call.seen & (logits + error >= least[..., None])
    sink_counts = (call.sink > -np.inf) & (call.sink + sink_error >= least)
    worst = np.maximum(error.max(-1, initial=0.0, where=counts), np.where(sink_counts, sink_error, 0.0))
    lost = worst >= 1.0
    ones, sink_ones = counts & lost[..., None], sink_counts & lost
    return sizes._replace(
        logits=np.where(lost[..., None], ones / unit, sizes.logits),
        mean=np.where(lost, 0.0, sizes.mean),
        sink=np.where(lost, sink_ones / unit, sizes.sink),
        lse=sizes.lse + np.where(lost, worst / unit, 0.0),
        weights=np.where(ones, 1.0, sizes.weights),
        sink_weights=np.where(sink_ones, 1.0, sizes.sink_weights),
    )


def _flat_rows(spec: AttentionSpec, call: Softmax, scores: Array) -> Array:
    """Returns the rows of equal large logits, in which any score is lost: bool ``[batch, heads, q_len]``.

    In float32, too, these logits are equal, so their errors cancel: the weights are those of equal logits.

    Args:
        scores: the magnitudes of what the logits have of their scores.
    """
    largest = call.logits.max(-1, initial=-np.inf, where=call.seen)
    equal = largest == call.logits.min(-1, initial=np.inf, where=call.seen)
    lost = ~call.seen | (scores <= float32_roundoff(spec) / 4 * abs(call.logits))
    return equal & lost.all(-1) & (abs(call.lse) >= LARGE_LSE) & (call.sink_weights == 0.0)


def float32_roundoff(spec: AttentionSpec) -> float:
    """Returns e: the roundoff of float32, or of float64 for float64 inputs."""
    return ROUNDOFF["float64" if spec.dtype == "float64" else "float32"]


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
    dout: ArrayLike,
    dlse: ArrayLike | None,
    aux: Sequence[ArrayLike] = (),
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
    spec: AttentionSpec, call: Softmax, sizes: Magnitudes, dout: Array, dlse: Array, aux: Sequence[ArrayLike]
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
    spec: AttentionSpec, call: Softmax, sizes: Magnitudes, dlogits: _Sum, aux: Sequence[ArrayLike]
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
