"""The float64 reference of the largest logits, and their error bounds.

A maximum errs by no more than the largest error of what it compares, so its bound is that of a logit, 8 e A, with the
error of a fast tanh in half precision; see ``bounds``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Inputs
from attn_core.correctness.accuracy import TANH, float32_roundoff, of_first_order
from attn_core.correctness.reference import Array, softmax

FLOOR = {"float64": 1e-13}
"""The smallest bound by dtype; 1e-6 for others."""


def row_maximum(spec: AttentionSpec, inputs: Inputs) -> tuple[Array, Array]:
    """Returns the largest logit of each row, and its error bound; float64, ``spec.lse_shape``. No visible key: -inf."""
    spec = replace(spec, sinks=False, dropout=0.0)
    with np.errstate(all="ignore"):
        call = softmax(spec, inputs)
        errors = of_first_order(spec, call).logits
    top = call.logits.max(-1, initial=-np.inf, where=call.seen)
    error = np.where(call.seen, errors, 0.0).max(-1, initial=0.0)
    tanh = (spec.softcap or 0.0) * TANH[spec.dtype]
    bound = FLOOR.get(spec.dtype, 1e-6) + tanh + 8 * float32_roundoff(spec) * error
    return top.reshape(spec.lse_shape), bound.reshape(spec.lse_shape)


def max_logit(spec: AttentionSpec, inputs: Inputs) -> tuple[Array, Array]:
    """Returns the largest logit of each query head, and its error bound: ``[batch, heads]``, packed ``[heads]``."""
    top, bound = row_maximum(spec, inputs)
    return top.max(-1, initial=-np.inf), bound.max(-1, initial=0.0)


def is_right(result: Any, truth: Array, bound: Array) -> bool:
    """Returns whether a result has the truth's shape, is -inf in the same places, and is within its bound elsewhere."""
    result = np.asarray(result, np.float64)
    if result.shape != truth.shape or not np.array_equal(np.isneginf(result), np.isneginf(truth)):
        return False
    finite = ~np.isneginf(truth)
    return bool((abs(result[finite] - truth[finite]) <= bound[finite]).all())
