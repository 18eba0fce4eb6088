"""A plain fit of cost models to the times of ``attn tune``. Apart from it, because it is arithmetic without a device.

The parameters of a model are logarithms (``cost_model.Model``), so that a product of rate and effects is a sum. A model
has more parameters than a minute of measuring has calls. So the fit is a ridge regression of log times: parameters stay
where they start, with a spread for each, unless calls say otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from attn_core.selection.cost_model import EFFECTS, FACTORS, RATES, Model, host_multiple
from attn_core.selection.features import Kind
from attn_core.selection.sizes import Sizes

RATE_SPREAD, FACTOR_SPREAD = 3.0, 0.4
"""How far the logarithm of a rate, or of an effect, may be from where it starts without evidence."""

ERROR = 0.05
"""The usual error of a log time."""

STEPS, LONGEST = 60, 0.7
"""The most steps of a fit, and the most that a parameter changes in one."""

FIRST_SHARE, FIRST_QUANTILE, UNKNOWN_RATE = 0.3, 0.03, 10.0
"""Where rates start without a model: no part of a call takes longer than the call, so the smallest times per size bound
a rate. The bound is this quantile, and the start this share of it. A size that no call has gets the last, in µs."""

HOST_DECIDES, IDLE = 1.15, 0.5
"""The host decided a time if it is at most this many times the host's. On a CPU, whose host does the work, the host's
rate is this share of the least time, so that it decides nothing."""


class Sample(NamedTuple):
    """A measured call: its kind and sizes, its microseconds, the host's (0 if unknown), and how much it counts."""

    kind: Kind
    sizes: Sizes
    microseconds: float
    host: float
    weight: float


def fit(samples: Sequence[Sample], start: Model | None) -> Model:
    """Returns the model whose log times differ least from the samples, near a start."""
    sizes = np.array([sample.sizes for sample in samples])
    times = np.array([sample.microseconds for sample in samples])
    weights = np.array([sample.weight for sample in samples])
    rates, factors = _first(sizes, times) if start is None else (np.array(start.rates[1:]), np.array(start.factors))
    # Which factors each sample has, and which rates (but the host's) each factor multiplies.
    present = np.array([[EFFECTS[name](sample.kind) for _, name, _ in FACTORS] for sample in samples], float)
    reach = np.zeros((len(FACTORS), len(RATES)))
    for number, (_, _, places) in enumerate(FACTORS):
        reach[number, list(places)] = 1.0
    of_host, reach = reach[:, 0] > 0, reach[:, 1:]
    # Effects on the host stay those of the start.
    multiple = host_multiple((present * factors)[:, of_host])
    host_rate = _host_rate(samples, multiple)
    host = host_rate * multiple
    count = len(RATES) - 1
    center = np.concatenate([rates, factors])
    pull = 1 / np.concatenate([np.full(count, RATE_SPREAD), np.full(len(FACTORS), FACTOR_SPREAD)]) ** 2
    parameters = center

    def parts(parameters: np.ndarray) -> np.ndarray:
        logs = parameters[:count] + (present * parameters[count:]) @ reach
        return np.exp(np.clip(logs, -30, 30)) * sizes  # type: ignore[no-any-return]

    def loss(parameters: np.ndarray) -> float:
        errors = np.log(np.maximum(parts(parameters).sum(1), host) / times) / ERROR
        # The logarithm of large ones, so that a wrong time does little harm.
        return float(weights @ (9 * np.log1p(errors**2 / 9)) + pull @ (parameters - center) ** 2)

    least = loss(parameters)
    for _ in range(STEPS):
        each = parts(parameters)
        device = each.sum(1)
        errors = np.log(np.maximum(device, host) / times)
        # The derivative of a log time by a log rate is the rate's share of the time.
        shares = np.where((device >= host)[:, None], each / device[:, None], 0.0)
        slopes = np.concatenate([shares, (shares @ reach.T) * present], axis=1)
        weight = weights / (1 + (errors / ERROR) ** 2 / 9) / ERROR**2
        curvature = (slopes.T * weight) @ slopes + np.diag(pull)
        step = np.linalg.solve(curvature, slopes.T @ (weight * errors) + pull * (parameters - center))
        step = np.clip(step, -LONGEST, LONGEST)
        lower = loss(parameters - step)
        while lower > least and np.abs(step).max() > 1e-4:
            step = step / 3
            lower = loss(parameters - step)
        if least - lower < 1e-3 * max(1.0, least):
            break
        parameters, least = parameters - step, lower
    return Model((math.log(host_rate), *map(float, parameters[:count])), tuple(map(float, parameters[count:])))


def _host_rate(samples: Sequence[Sample], multiple: np.ndarray) -> float:
    """Returns the host's microseconds without any effect; ``multiple``: what the effects of each sample make of it."""
    hosts = np.array([sample.host for sample in samples]) / multiple
    decided = np.array([sample.microseconds < HOST_DECIDES * sample.host for sample in samples])
    if hosts.any():
        return float(np.median(hosts[decided] if decided.any() else hosts))
    return IDLE * min(sample.microseconds for sample in samples)


def _first(sizes: np.ndarray, times: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    rates = []
    for column in sizes.T:
        bounds = times[column > 0] / column[column > 0]
        bound = float(np.quantile(bounds, FIRST_QUANTILE)) if len(bounds) else UNKNOWN_RATE
        rates.append(math.log(FIRST_SHARE * bound))
    return np.array(rates), np.zeros(len(FACTORS))
