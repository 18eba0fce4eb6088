"""The time of a call on each backend, by a model that was fitted to measured times.

For one backend and direction, in microseconds::

    time = max(host, constant + work * ... + memory * ...)

``host`` is the time until the call returns. Each size of the call (``sizes.Sizes``) has a rate. The call's kind
multiplies the rates by effects: a softcap, say, makes every score slower. The parameters are logarithms, so that rates
are positive and effects multiply. The effects on the host add up instead: what it does for sinks takes as long whether
or not documents are packed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import mul
from typing import NamedTuple

import numpy as np

from attn_core.selection.features import Kind
from attn_core.selection.sizes import Sizes

EFFECTS: dict[str, Callable[[Kind], bool]] = {
    "width 32": lambda kind: kind.width == 32,
    "width 64": lambda kind: kind.width == 64,
    "width 96": lambda kind: kind.width == 96,
    "width 192": lambda kind: kind.width == 192,
    "width 256": lambda kind: kind.width >= 256,
    "padded width": lambda kind: kind.padded,
    "narrow values": lambda kind: kind.narrow_values,
    "float16": lambda kind: kind.dtype == "float16",
    "float32": lambda kind: kind.dtype in ("float32", "float64"),
    "causal": lambda kind: kind.band == "causal",
    "window": lambda kind: kind.band == "window",
    "decode": lambda kind: kind.decode,
    "one query": lambda kind: kind.one_query,
    "grouped": lambda kind: kind.grouped,
    "softcap": lambda kind: kind.softcap,
    "alibi": lambda kind: kind.alibi,
    "sinks": lambda kind: kind.sinks,
    "packed": lambda kind: kind.packed,
    "mask of keys": lambda kind: kind.mask == "keys",
    "mask of scores": lambda kind: kind.mask == "scores",
    "bias": lambda kind: bool(kind.bias),
    "mask or bias, banded": lambda kind: bool(kind.mask or kind.bias) and kind.band != "full",
    "mask or bias, grouped": lambda kind: bool(kind.mask or kind.bias) and kind.grouped,
    "ragged mask": lambda kind: kind.ragged,
    "short": lambda kind: kind.short,
    "float32, grouped": lambda kind: kind.grouped and kind.dtype == "float32",
}
"""The properties of a kind that change rates."""

RATES = ("host", *Sizes._fields)
"""The rates of a model; the host's is a time."""

GROUPS: dict[str, tuple[str, ...]] = {
    "host": ("host",),
    "constant": ("constant", "tiles", "key_tiles", "search", "blocks"),
    "compute": (
        *("fine_work", "work", "waves", "coarse_waves", "grouped_work", "grouped_waves", "chain"),
        *("steps", "grouped_steps", "key_waves", "key_chain", "key_steps", "rectangle", "scores", "unsplit", "across"),
    ),
    "memory": ("memory", "query_memory", "padded_memory", "expanded_memory"),
    "masks": ("mask_memory", "dense_scores"),
}
"""Groups of rates that an effect multiplies alike."""

SINGLE = ("causal", "window", "decode", "one query", "packed")
"""Effects that also multiply each rate alone: such calls are tiled differently, so another size limits a kernel."""

FACTORS: tuple[tuple[str, str, tuple[int, ...]], ...] = (
    *((group, name, tuple(map(RATES.index, members))) for group, members in GROUPS.items() for name in EFFECTS),
    *((f"only {rate}", name, (place,)) for name in SINGLE for place, rate in enumerate(RATES) if place > 1),
)
"""The factors of a model: (name of a group or rate, effect, places in RATES that it multiplies)."""

LEAST_HOST = 0.25
"""The least host time of a kind, as a share of the host's rate, however many effects make it shorter."""


class Model(NamedTuple):
    """The fitted parameters of one backend in one direction.

    Attributes:
        rates: the logarithms of RATES, for a call without any of EFFECTS.
        factors: the logarithms of FACTORS. A factor of the host says what one effect alone would multiply it by.
        error: the root mean square error of log time over calls that the fit did not see.
    """

    rates: tuple[float, ...]
    factors: tuple[float, ...]
    error: float = 0.0


class Models:
    """The models of several backends as arrays, because a new kind of call needs the rates of all of them."""

    def __init__(self, models: Sequence[Model], multiples: Sequence[float]) -> None:
        """Stacks the models. The rates of each are multiplied by its number in ``multiples``."""
        rates = np.array([model.rates for model in models]).reshape(len(models), len(RATES))
        self._base = rates + np.log(np.array(multiples)).reshape(len(models), 1)
        names = list(EFFECTS)
        effects = np.zeros((len(EFFECTS), len(models), len(RATES)))
        for number, (_, name, places) in enumerate(FACTORS):
            values = np.array([model.factors[number] for model in models])
            effects[names.index(name)][:, places] += values[:, None]
        self._effects = effects

    def of_kind(self, kind: Kind) -> list[list[float]]:
        """Returns each model's rates for a kind of call, in microseconds, in the order of RATES."""
        effects = self._effects[[place for place, applies in enumerate(_APPLIES) if applies(kind)]]
        logarithms = self._base + effects.sum(0)
        logarithms[:, 0] = self._base[:, 0] + np.log(host_multiple(effects[:, :, 0].T))
        rates: list[list[float]] = np.exp(logarithms).tolist()
        return rates


def host_multiple(factors: np.ndarray) -> np.ndarray:
    """Returns how many times the host's rate the host takes, by the logarithms of its factors along the last axis."""
    multiple: np.ndarray = np.maximum(LEAST_HOST, 1.0 + np.expm1(factors).sum(-1))
    return multiple


_APPLIES = tuple(EFFECTS.values())


def microseconds(model: Model, kind: Kind, sizes: Sizes) -> float:
    """Returns the time of a call by one model."""
    ((host, *rates),) = Models([model], [1.0]).of_kind(kind)
    return max(host, sum(map(mul, rates, sizes)))
