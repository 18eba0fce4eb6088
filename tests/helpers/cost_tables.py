"""Made-up tables of automatic choice, so that new measurements do not change the tests."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from operator import mul

import pytest

from attn_core.call.spec import AttentionSpec
from attn_core.selection import choice, preference
from attn_core.selection.cost_model import FACTORS, RATES, Model, Models, kind_of_call, sizes_of_call
from attn_core.selection.tables import Table


def made_up_model(host: float, error: float = 0.0, effects: Mapping[str, float] = {}, **rates: float) -> Model:
    """A model with a host's time and rates in microseconds, and effects (factors) on the rates of computing."""
    logs = tuple(math.log(({"host": host} | rates).get(name, 1e-9)) for name in RATES)
    factors = tuple(math.log(effects.get(name, 1.0)) if group == "compute" else 0.0 for group, name, _ in FACTORS)
    return Model(logs, factors, error)


def modelled_times(models: Mapping[str, Model], spec: AttentionSpec) -> dict[str, float]:
    """The microseconds of a call by each model, on a device with tiles of 128 rows and 132 processors."""
    sizes = sizes_of_call(spec, 128, 132)
    rates = _stacked(tuple(models.values())).of_kind(kind_of_call(spec))
    return {name: max(host, sum(map(mul, others, sizes))) for name, (host, *others) in zip(models, rates, strict=True)}


@cache
def _stacked(models: tuple[Model, ...]) -> Models:
    return Models(models, [1.0] * len(models))


def made_up_table(forward: Mapping[str, float | Model], training: Mapping[str, float | Model] | None = None) -> Table:
    """A table with the same models in both directions, unless ``training`` is passed; a number is a host's time."""
    models = {
        direction: {name: value if isinstance(value, Model) else made_up_model(value) for name, value in named.items()}
        for direction, named in ((False, forward), (True, forward if training is None else training))
    }
    return Table("made-up calls", tile=128, processors=132, models=models)


@contextmanager
def tables_in_force(tables: Mapping[tuple[str, str], Table]) -> Iterator[None]:
    """Replaces every table; choice must neither use what it cached before nor leave anything behind."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(preference, "table_in_force", lambda framework, device: tables.get((framework, device)))
        _forget()
        yield
    _forget()


def _forget() -> None:
    preference._order_by_time.cache_clear()
    preference._candidates.cache_clear()
    preference._models.cache_clear()
    choice._explained.cache_clear()
