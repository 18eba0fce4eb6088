"""Estimates how busy the host was while a call was measured, so that a fit does not take it for the call's own time.

The backends of a record take turns, so a busy host slows all of them. What the hosts of a record have in common, beyond
what the kinds of calls explain, is its slowness.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from attn_core.selection.cost_model import EFFECTS, LEAST_HOST
from attn_core.selection.features import Kind

FEWEST_HOSTS = 12
"""A backend with fewer measured hosts says nothing about slowness."""

PASSES = 8
"""How often slowness and the effects of kinds are estimated in turns."""

ERROR, EFFECT_WEIGHT = 0.15, 0.05
"""The error of a host's log time, and how strongly effects stay near 0, in medians of the time."""


def slowness(kinds: Sequence[Kind], hosts: Sequence[Mapping[str, float]]) -> list[float]:
    """Returns the logarithm of each record's slowness, about 0 on average.

    Args:
        kinds: of the records' calls, all of one direction.
        hosts: for each record the host's microseconds by backend, where they are known.
    """
    effects = np.array([[1.0, *(float(applies(kind)) for applies in EFFECTS.values())] for kind in kinds])
    result = np.zeros(len(kinds))
    places = {name: [at for at, known in enumerate(hosts) if name in known] for names in hosts for name in names}
    for _ in range(PASSES):
        residuals: list[list[float]] = [[] for _ in kinds]
        for name, at in places.items():
            if len(at) >= FEWEST_HOSTS:
                times = np.log([hosts[place][name] for place in at])
                for place, residual in zip(at, times - _explained(effects[at], times - result[at]), strict=True):
                    residuals[place].append(float(residual))
        # Shrunk, because the median of few residuals says little.
        result = np.array([np.median(each) * len(each) / (len(each) + 1) if each else 0.0 for each in residuals])
    return [float(value) for value in result]


def _explained(effects: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Returns the log times that a robust fit predicts in which the effects of a kind add to the time."""
    weights, penalty = np.ones(len(times)), np.diag([1e-6] + [EFFECT_WEIGHT] * (effects.shape[1] - 1))
    level = np.median(times)
    hosts = np.exp(times - level)
    for _ in range(4):
        # Errors count in proportion to the time, as they do in the fit of a model.
        weighted = effects.T * (weights / hosts**2)
        fitted = effects @ np.linalg.solve(weighted @ effects + penalty, weighted @ hosts)
        predicted: np.ndarray = level + np.log(np.maximum(fitted, LEAST_HOST))
        weights = 1.0 / (1.0 + ((times - predicted) / ERROR) ** 2)
    return predicted
