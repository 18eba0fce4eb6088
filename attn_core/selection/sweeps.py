"""Several sweeps of one device as one raw file, and choice for the calls of a sweep by models that saw none of them.

The merged content has the head of the newest sweep. Each record has the number of its sweep, and ``older`` unless it is
of the newest one. A sweep of another GPU, or of a CPU, is judged by the package's choice as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attn_core import backends
from attn_core.errors import SpecError
from attn_core.selection import preference
from attn_core.selection.cost_model import microseconds
from attn_core.selection.cross_validation import Fitting, Models
from attn_core.selection.features import kind_of_call
from attn_core.selection.preference import caution, ranking
from attn_core.selection.regret import Record, Regret, record_spec, regrets, right_times
from attn_core.selection.sizes import sizes_of_call
from attn_core.selection.tables import shipped_table

HEAD = ("date", "seconds", "versions")
"""The facts of each sweep that merged content keeps."""


def together(raws: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the content of one raw file, with the records of all. One file stays as it is.

    Raises:
        SpecError: if the files are of different devices or frameworks, or are merged already.
    """
    if len(raws) == 1:
        return raws[0]
    ordered = sorted(raws, key=lambda raw: str(raw["date"]))
    newest = ordered[-1]
    for raw in ordered:
        for name in ("framework", "device", "device_name"):
            if raw[name] != newest[name]:
                raise SpecError(f"sweeps of different {name}s cannot be fitted together: {raw[name]}, {newest[name]}")
        if "sweeps" in raw:
            raise SpecError("a file of several sweeps cannot be merged again; pass the files of its sweeps")
    names: set[str] = set()
    cases = []
    for number, raw in enumerate(ordered):
        taken = frozenset(names)  # both directions of a call have one name
        for record in raw["cases"]:
            name = record["name"] if record["name"] not in taken else f"{record['name']} of {raw['date']}"
            names.add(name)
            case = record | {"name": name, "sweep": number, "older": raw is not newest, "predicted": None}
            cases.append(case)
    sweeps = [{name: raw.get(name) for name in HEAD} for raw in ordered]
    return newest | {"sweeps": sweeps, "seconds": sum(raw.get("seconds") or 0.0 for raw in ordered), "cases": cases}


def without(raw: dict[str, Any], number: int) -> dict[str, Any]:
    """Returns merged content without one of its sweeps; the newest of the others then says how long the host takes."""
    kept = [record for record in raw["cases"] if record["sweep"] != number]
    newest = max((record["sweep"] for record in kept), default=0)
    return raw | {"cases": [record | {"older": record["sweep"] < newest, "predicted": None} for record in kept]}


def with_orders(raw: dict[str, Any]) -> dict[str, Any]:
    """Returns merged content in which each record has the order of models that saw no call of its sweep.

    Content of one sweep stays as it is.
    """
    if "sweeps" not in raw:
        return raw
    fittings = [Fitting(without(raw, number)) for number in range(len(raw["sweeps"]))]
    cases = [record | {"order_by_others": _order(fittings[record["sweep"]], record)} for record in raw["cases"]]
    return raw | {"cases": cases}


def regrets_of_new_sweeps(fitting: Fitting, only: Sequence[str] | None = None) -> dict[str, list[Regret]]:
    """Returns by sweep the cost of the choice of models that saw no call of it; empty for one sweep.

    Args:
        fitting: with a raw content ``with_orders``.
        only: the installed backends; None for all that were measured.
    """
    result = {}
    for number, sweep in enumerate(fitting.raw.get("sweeps", ())):
        records = [record for record in fitting.counted if record["sweep"] == number and "order_by_others" in record]
        result[str(sweep["date"])] = regrets(records, lambda record: record["order_by_others"], only)
    return result


def with_package_order(raw: dict[str, Any]) -> dict[str, Any]:
    """Returns a sweep's content in which each record has the package's order, which saw none of its calls.

    That is the order of the shipped table, which was fitted to another GPU, or the one without a table.
    """
    framework, device = raw["framework"], raw["device"]
    usual = backends.usual_order(framework, backends.kind_of(device))
    table = shipped_table(framework, device)

    def order(record: Record) -> list[str]:
        if table is None:
            return list(preference.order(record_spec(record), framework, device))
        return _order_by(table.models, table.tile, table.processors, usual, record)

    cases = [record | {"package_order": order(record)} for record in raw["cases"]]
    return raw | {"package": "without a table" if table is None else f"fitted to {table.source}", "cases": cases}


def regrets_of_package(fitting: Fitting, only: Sequence[str] | None = None) -> list[Regret]:
    """Returns the cost of the package's choice; empty without ``with_package_order``.

    Args:
        only: the installed backends; None for all that were measured.
    """
    if "package" not in fitting.raw:
        return []
    return regrets(fitting.counted, lambda record: record["package_order"], only)


def _order(fitting: Fitting, record: Record) -> list[str]:
    usual = backends.usual_order(fitting.raw["framework"], fitting.kind)
    return _order_by(fitting.models, fitting.tile, fitting.processors, usual, record)


def _order_by(models: Models, tile: int, processors: int, usual: tuple[str, ...], record: Record) -> list[str]:
    spec, right = record_spec(record), right_times(record)
    kind, sizes = kind_of_call(spec), sizes_of_call(spec, tile, processors)
    times = {
        name: caution(name, model.error) * microseconds(model, kind, sizes)
        for name, model in models[spec.needs_backward].items()
        if name in right
    }
    return list(ranking(times, usual))
