"""The magnitudes that the error bounds of a call are made of; ``bounds.py`` has the formulas."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from attn_core.call.large_logits import LARGE_LSE
from attn_core.call.spec import AttentionSpec
from attn_core.correctness.reference import Array, Softmax

# Half of the unit roundoff for float16 and bfloat16: the scale that the constants 4 and 8 were measured on. Twice it
# for float64, since the reference rounds as well.
ROUNDOFF = {"float64": 2.0**-52, "float32": 2.0**-24, "float16": 2.0**-12, "bfloat16": 2.0**-9}
TINY = {"float64": 2.0**-1022, "float32": 2.0**-126, "float16": 2.0**-24, "bfloat16": 2.0**-126}


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
