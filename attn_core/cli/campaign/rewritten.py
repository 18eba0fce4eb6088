"""Rewritten: a call in another way, with the same result. Here are the rewritings of rows, heads and key ranges."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from attn_core.call.key_ranges import visible_in_ranges
from attn_core.cli.trial import Trial

Arrays = dict[str, np.ndarray]


class Rewritten(NamedTuple):
    """The trials to run instead, and the function that joins their results."""

    trials: tuple[Trial, ...]
    join: Callable[[list[Arrays]], Arrays]


AXES = {
    **{name: {"batch": 0, "heads": 2} for name in ("out", "dq")},
    **{name: {"batch": 0, "kv_heads": 2} for name in ("dk", "dv")},
    "lse": {"batch": 0, "heads": 1},
    "dbias": {"batch": 0, "heads": 1},
    "dsinks": {"heads": 0},
}
"""The axes of each result of a call without packed documents."""

INPUT_AXES = {
    "q": AXES["dq"],
    "k": AXES["dk"],
    "v": AXES["dv"],
    "mask": AXES["lse"],
    "bias": AXES["lse"],
    "sinks": AXES["dsinks"],
    "key_ranges": {"batch": 0, "kv_heads": 1},
}


def _permuted(trial: Trial, orders: dict[str, np.ndarray]) -> Rewritten:
    """Permutes the batch or the heads of everything."""

    def taken(array: Any, axes: dict[str, int], inverse: bool = False) -> Any:
        for name, order in orders.items():
            # An axis of 1 is shared by all rows or heads.
            if array is not None and name in axes and array.shape[axes[name]] == len(order):
                array = np.take(array, np.argsort(order) if inverse else order, axes[name])
        return array

    inputs = {name: taken(getattr(trial.inputs, name), axes) for name, axes in INPUT_AXES.items()}
    slopes = trial.inputs.alibi_slopes
    if slopes is not None:
        axes = {"heads": 0} if slopes.ndim == 1 else {"batch": 0, "heads": 1}
        inputs["alibi_slopes"] = taken(slopes, axes)
    dlse = taken(trial.dlse, AXES["lse"])
    other = trial._replace(inputs=trial.inputs._replace(**inputs), dout=taken(trial.dout, AXES["out"]), dlse=dlse)

    def join(results: list[Arrays]) -> Arrays:
        (arrays,) = results
        return {name: taken(array, AXES[name], inverse=True) for name, array in arrays.items()}

    return Rewritten((other,), join)


def rows_permuted(trial: Trial) -> Rewritten:
    """Moves every row of the batch."""
    return _permuted(trial, {"batch": _rotation(trial.spec.batch, trial.seed)})


def heads_permuted(trial: Trial) -> Rewritten:
    """Moves every head."""
    spec = trial.spec
    kv_order = _rotation(spec.num_kv_heads, trial.seed)
    # Query heads move with their kv head, and change places inside its group.
    order = [kv * spec.group_size + _rotation(spec.group_size, trial.seed) for kv in kv_order]
    return _permuted(trial, {"heads": np.concatenate(order), "kv_heads": kv_order})


def ranges_as_mask(trial: Trial) -> Rewritten:
    """Writes key ranges and mask as one mask."""
    spec, inputs = trial.spec, trial.inputs
    seen = visible_in_ranges(inputs.key_ranges, spec.q_len, spec.num_heads)
    mask = seen if inputs.mask is None else seen & inputs.mask
    plain = replace(spec, key_ranges_shape=None, mask_shape=mask.shape)
    return Rewritten((trial._replace(spec=plain, inputs=inputs._replace(key_ranges=None, mask=mask)),), itemgetter(0))


def _rotation(count: int, seed: int) -> np.ndarray:
    """Returns an order of ``count`` places that moves each of them, if there is more than one."""
    return np.roll(np.arange(count), 1 + seed % max(count - 1, 1))
