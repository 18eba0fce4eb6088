"""Fits cost models to samples, with numpy only, and estimates how busy the host was while a call was measured.

The backends of a record take turns, so a busy host slows all of them. What the hosts of a record have in common, beyond
what the kinds of calls explain, is its slowness. A fit must not take it for the call's own time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from attn_core.selection.cost_model import EFFECTS, FACTORS, LEAST_HOST, RATES, Kind, Model, Sizes, host_multiple

FIRST_SHARE, FIRST_QUANTILE = 0.3, 0.03
"""Where the rates of a fit start: a call takes at least a rate times its size, so the smallest times per size bound the
rate from above. The fit starts from this share of this quantile."""

UNKNOWN_RATE = 10.0
"""Microseconds: the bound of the rate of a size that no sample has."""

NOISES = (1.0, 0.3, 0.1)
"""The error of a log time. A fit first takes it for large, because outliers would hold a bad start in place."""

HOST_WEIGHT, HIDDEN_HOST_WEIGHT = 2.0, 0.4
"""How much a measured time of the host counts, next to a measured time: if the host decided that, and if it did not."""

HOST_DECIDES = 1.15
"""The host decided a time if it is at most this many times the host's."""

RATE_SPREAD = 3.0
"""How far the logarithm of a rate may be from the start without evidence."""

FACTOR_SPREAD = {"host": 0.3, "constant": 0.5, "compute": 0.6, "memory": 0.3, "masks": 0.3}
"""The same for the factors of each group."""

SINGLE_SPREAD = {"decode": 0.6, "one query": 0.6, "causal": 0.3, "window": 0.3, "packed": 0.3}
"""The same for the factors of single rates, by their effect."""

STEPS = 60
"""The most steps of a fit."""

FEWEST_HOSTS = 12
"""A backend with fewer measured hosts says nothing about slowness."""

PASSES = 8
"""How often slowness and the effects of kinds are estimated in turns."""

ERROR, EFFECT_WEIGHT = 0.15, 0.05
"""The error of a host's log time, and how strongly effects stay near 0, in medians of the time."""


class Sample(NamedTuple):
    """A measured call on one backend.

    Attributes:
        kind, sizes: of the call.
        microseconds: per call.
        host: microseconds of the host alone; 0 if unknown.
        weight: how much the sample counts.
        slowness: of the host while the call was measured, see ``slowness``.
    """

    kind: Kind
    sizes: Sizes
    microseconds: float
    host: float
    weight: float = 1.0
    slowness: float = 0.0


def fit(
    samples: Sequence[Sample],
    start: Model | None = None,
    noises: Sequence[float] = NOISES,
    own_rates: bool = False,
) -> Model:
    """Returns the model whose log times differ least from the samples.

    Differences count as they are up to a few times the noise, and as their logarithm beyond, so that a wrong time does
    little harm. Parameters stay near ``start`` unless samples say otherwise.

    Args:
        noises: the errors of a log time, one fit after the other.
        own_rates: whether the search begins with rates that the samples suggest, instead of the start's. They are worth
            more if the start is a fit to other backends.
    """
    problem = _Problem(samples)
    center = problem.center(start)
    parameters = center
    if own_rates:
        parameters = np.concatenate([problem.center(None)[: len(RATES)], center[len(RATES) :]])
    for noise in noises:
        parameters = _descend(problem, parameters, center, noise)
    return problem.model(parameters)


def _descend(problem: _Problem, parameters: np.ndarray, center: np.ndarray, noise: float) -> np.ndarray:
    """Returns the parameters of least loss near some parameters, by Gauss and Newton's method with damping."""
    damping, loss = 1e-2, problem.loss(parameters, center, noise)
    for _ in range(STEPS):
        gradient, curvature = problem.slopes(parameters, center, noise)
        while damping < 1e8:
            step = np.linalg.solve(curvature + damping * np.diag(np.diag(curvature)), gradient)
            step = np.clip(step, -1.5, 1.5)
            lower = problem.loss(parameters - step, center, noise)
            if lower < loss:
                break
            damping *= 4
        else:
            break
        gain, loss, parameters, damping = loss - lower, lower, parameters - step, max(damping / 6, 1e-6)
        if gain < 1e-3 * max(1.0, loss):
            break
    return parameters


class _Problem:
    """A fit's data as arrays, and its loss. The parameters are the rates, then the factors."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self.sizes = np.array([sample.sizes for sample in samples])
        self.effects = np.array([[applies(sample.kind) for applies in EFFECTS.values()] for sample in samples], float)
        self.log_times = np.log([sample.microseconds for sample in samples])
        hosts = np.array([sample.host for sample in samples])
        self.known = hosts > 0
        self.log_hosts = np.log(np.where(self.known, hosts, 1.0))
        self.weights = np.array([sample.weight for sample in samples])
        self.slowness = np.exp([sample.slowness for sample in samples])
        decides = np.exp(self.log_times) < HOST_DECIDES * hosts
        self.host_weights = self.weights * np.where(decides, HOST_WEIGHT, HIDDEN_HOST_WEIGHT)
        spreads = [FACTOR_SPREAD.get(group) or SINGLE_SPREAD[name] for group, name, _ in FACTORS]
        self.spread = np.array([RATE_SPREAD] * len(RATES) + spreads)
        # Which factors each sample has, and which rates each factor multiplies.
        names = list(EFFECTS)
        self.present = self.effects[:, [names.index(name) for _, name, _ in FACTORS]]
        self.reach = np.zeros((len(FACTORS), len(RATES)))
        for number, (_, _, places) in enumerate(FACTORS):
            self.reach[number, list(places)] = 1.0
        self.of_host = np.flatnonzero(self.reach[:, 0])  # the factors that multiply the host's rate

    def center(self, start: Model | None) -> np.ndarray:
        if start is not None:
            return np.concatenate([start.rates, start.factors])
        times = np.exp(self.log_times)
        known = np.exp(self.log_hosts[self.known])
        rates = [math.log(np.median(known) if len(known) else times.min())]
        for sizes in self.sizes.T:
            bounds = times[sizes > 0] / sizes[sizes > 0]
            # A size that no sample has gets a rate that is low, because nothing is known about it.
            bound = float(np.quantile(bounds, FIRST_QUANTILE)) if len(bounds) else UNKNOWN_RATE
            rates.append(math.log(FIRST_SHARE * bound))
        return np.concatenate([rates, np.zeros(len(FACTORS))])

    def model(self, parameters: np.ndarray) -> Model:
        return Model(tuple(map(float, parameters[: len(RATES)])), tuple(map(float, parameters[len(RATES) :])))

    def _parts(self, parameters: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns each sample's microseconds by size, and its host's."""
        logs = parameters[: len(RATES)] + (self.present * parameters[len(RATES) :]) @ self.reach
        logs = np.clip(logs, -30, 30)
        host = math.exp(min(30.0, max(-30.0, parameters[0]))) * host_multiple(self._host_factors(parameters))
        return np.exp(logs[:, 1:]) * self.sizes, host * self.slowness

    def _host_factors(self, parameters: np.ndarray) -> np.ndarray:
        """Returns the logarithms of the host's factors for each sample, 0 for an effect that it does not have."""
        factors: np.ndarray = self.present[:, self.of_host] * parameters[len(RATES) + self.of_host]
        return factors

    def _host_slopes(self, parameters: np.ndarray) -> np.ndarray:
        """Returns the derivatives of each sample's log host time by the parameters."""
        factors = self._host_factors(parameters)
        multiple = host_multiple(factors)[:, None]
        slopes = np.zeros((len(self.sizes), len(parameters)))
        slopes[:, 0] = 1.0
        changing = self.present[:, self.of_host] * (multiple > LEAST_HOST)
        slopes[:, len(RATES) + self.of_host] = changing * np.exp(factors) / multiple
        return slopes

    def _errors(self, parameters: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        parts, host = self._parts(parameters)
        time = np.maximum(parts.sum(1), host)
        return np.log(time) - self.log_times, np.where(self.known, np.log(host) - self.log_hosts, 0.0)

    def loss(self, parameters: np.ndarray, center: np.ndarray, noise: float) -> float:
        time, host = self._errors(parameters)
        pull = (parameters - center) / self.spread
        errors = self.weights @ _robust(time / noise) + self.host_weights @ _robust(host / noise)
        return float(errors + (pull**2).sum())

    def slopes(self, parameters: np.ndarray, center: np.ndarray, noise: float) -> tuple[np.ndarray, np.ndarray]:
        """Returns the gradient of half the loss, and its curvature in the approximation of Gauss and Newton."""
        parts, host = self._parts(parameters)
        device = parts.sum(1)
        bound = host > device
        # The derivative of log time by the logarithm of each size's rate: the rate's share of the time.
        shares = np.where(bound[:, None], 0.0, parts / device[:, None])
        host_slopes = self._host_slopes(parameters)
        time, hosts = self._errors(parameters)
        jacobian = self._jacobian(shares) + bound[:, None] * host_slopes
        weight = self.weights * _weight(time / noise) / noise**2
        of_host = self.known[:, None] * host_slopes
        weight_host = self.host_weights * _weight(hosts / noise) / noise**2
        pull = 1.0 / self.spread**2
        gradient = jacobian.T @ (weight * time) + of_host.T @ (weight_host * hosts) + pull * (parameters - center)
        curvature = (jacobian.T * weight) @ jacobian + (of_host.T * weight_host) @ of_host + np.diag(pull)
        return gradient, curvature

    def _jacobian(self, shares: np.ndarray) -> np.ndarray:
        """Returns the derivatives by all parameters from those by the logarithm of each size's rate."""
        nothing = np.zeros((len(shares), 1))  # for the host's rate
        return np.concatenate([nothing, shares, (shares @ self.reach[:, 1:].T) * self.present], axis=1)


def _robust(errors: np.ndarray) -> np.ndarray:
    """Returns the loss of errors in units of the noise: the square of small ones, the logarithm of large ones."""
    scaled: np.ndarray = 9.0 * np.log1p(errors**2 / 9.0)
    return scaled


def _weight(errors: np.ndarray) -> np.ndarray:
    weights: np.ndarray = 1.0 / (1.0 + errors**2 / 9.0)
    return weights


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
