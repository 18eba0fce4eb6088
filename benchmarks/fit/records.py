"""The raw records of a sweep: which times count, what a choice costs in them, and the samples of a fit.

Raw times of several sweeps may be fitted together. What the host does between kernels changes with every version of
this project, and kernels do not. So the newest sweep alone says how long the host takes; an older one says how long the
device takes, where the device decided.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from attn_core import backends
from attn_core.call.spec import AttentionSpec
from attn_core.cli import timing
from attn_core.errors import SpecError
from attn_core.expressions.tracing import Aux
from attn_core.expressions.tree import from_text
from attn_core.selection import preference
from attn_core.selection.cost_model import kind_of_call, sizes_of_call
from attn_core.selection.whole_file import read_json, write_whole
from benchmarks.fit.models import HOST_DECIDES, Sample, slowness

GOALS = {
    "cuda": {"geometric mean": 1.03, "99th percentile": 1.20, "worst": 1.35},
    "cpu": {"geometric mean": 1.05, "worst": 1.4},
}
"""Limits of the automatic choice's cost for calls that were not measured, by the kind of device."""

TORCH_ALONE = ("sdpa_cudnn", "sdpa_flash", "sdpa_efficient", "flex", "math")
"""The backends of a GPU that need no package but torch."""

HIDES_HOST = 2.5
"""From this many times the host's time on, nothing is known about the host."""

LEAST_WEIGHT, HALF_WEIGHT = 0.05, 2.0
"""The least weight of a sample, and the logarithm of how many times as slow as the best it has half a weight."""

BY_BLOCKS = ("math",)
"""Backends whose host takes longer for each block of queries. So the sizes of a call explain its time, not its kind."""

Samples = dict[tuple[bool, str], dict[int, Sample]]
"""By direction and backend the samples, each under the position of its record."""

HEAD = ("date", "seconds", "versions")
"""The facts of each sweep that merged content keeps."""

FUNCTIONS = "mask_mod", "score_mod"
"""The fields of a spec that are expressions; plain data has their rows."""

Record = dict[str, Any]


class Regret(NamedTuple):
    """The cost of automatic choice in a case: ``ratio`` is 1 at best, infinite if the chosen backend has no time."""

    case: str
    training: bool
    best: str
    chosen: str
    ratio: float


def plain_fields(spec: AttentionSpec) -> dict[str, Any]:
    """Returns the fields of a spec that differ from their defaults, for JSON."""
    values = {field.name: getattr(spec, field.name) for field in fields(spec)}
    values |= {name: json.loads(values[name].text) for name in FUNCTIONS if values[name] is not None}
    return {field.name: values[field.name] for field in fields(spec) if values[field.name] != field.default}


def spec_of(plain: dict[str, Any]) -> AttentionSpec:
    """Inverts ``plain_fields``, also if JSON has turned tuples into lists."""
    values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in plain.items()}
    values |= {name: from_text(json.dumps(plain[name])) for name in FUNCTIONS if plain.get(name) is not None}
    if "aux" in values:
        values["aux"] = tuple(Aux(tuple(shape), dtype) for shape, dtype in values["aux"])
    return AttentionSpec(**values)


def read(path: Path) -> dict[str, Any]:
    """Reads the raw file of a sweep.

    Raises:
        SpecError: if the file cannot be read or was not written by ``benchmarks.fit.sweep``.
    """
    raw = read_json(path)
    if not isinstance(raw, dict) or raw.get("format") != 1:
        raise SpecError(f"{path}: expected a file written by `python -m benchmarks.fit.sweep`")
    kinds: dict[str, Any] = {"seconds": (int, float), "cases": list}
    for name, kind in kinds.items():
        if not isinstance(raw.get(name), kind):
            raise SpecError(f"{path}: {name}={raw.get(name)!r}: expected what `python -m benchmarks.fit.sweep` writes")
    for case in raw["cases"]:
        if not isinstance(case, dict) or not {"name", "direction"} <= case.keys():
            raise SpecError(f"{path}: cases: expected the name and the direction of each, got {str(case)[:80]}")
    return raw


def write(raw: dict[str, Any], path: Path) -> None:
    """Writes JSON with one line per case, so that diffs of two files are readable."""
    head = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in raw.items() if name != "cases"]
    cases = ",\n".join("  " + json.dumps(case) for case in raw["cases"])
    write_whole("{\n" + "".join(f" {line},\n" for line in head) + f' "cases": [\n{cases}\n ]\n}}\n', path)


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


def right_times(record: Record) -> dict[str, float]:
    """Returns microseconds by backend, for the backends with right numbers."""
    return timing.right_times(record["backends"], record["spec"]["dtype"])


def broken(record: Record) -> list[str]:
    """Returns the backends that claim a case but raised, or whose numbers differ from the first backend's."""
    return timing.broken(record["backends"], record["spec"]["dtype"])


def measured_records(raw: dict[str, Any]) -> list[Record]:
    """Returns the records in which a result is known to be right.

    If more than half of the backends disagree with the first one, the right result is unknown.
    """
    return [
        record
        for record in raw["cases"]
        if (times := right_times(record))
        and len([name for name in broken(record) if "median" in record["backends"][name]]) <= len(times)
    ]


def regrets(
    records: Iterable[Record], ranked: Callable[[Record], Sequence[str]], only: Sequence[str] | None = None
) -> list[Regret]:
    """Returns the cost of a choice for every record.

    Args:
        ranked: the candidates of a record, best first.
        only: the installed backends; None for all that were measured.
    """
    result = []
    for record in records:
        times = {name: time for name, time in right_times(record).items() if only is None or name in only}
        # No installed backend had a right result, so there is no best time to compare with.
        if not times:
            continue
        # A call never runs on a backend that was not measured here or that refuses it, so none of these is chosen.
        able = [name for name in ranked(record) if name in times or _failed(record, name, only)]
        chosen, best = able[0] if able else "", min(times, key=lambda name: times[name])
        ratio = times[chosen] / times[best] if chosen in times else math.inf
        result.append(Regret(record["name"], record["direction"] == "training", best, chosen, ratio))
    return result


def _failed(record: Record, name: str, only: Sequence[str] | None) -> bool:
    return (only is None or name in only) and name in broken(record)


def static_order(raw: dict[str, Any]) -> Callable[[Record], Sequence[str]]:
    """Returns the ranking that ignores all measurements."""
    usual = backends.usual_order(raw["framework"], backends.kind_of(raw["device"]))
    return lambda record: usual


def summary(regrets: Iterable[Regret]) -> dict[str, dict[str, Any]]:
    """Returns per direction: the number of cases, the regret's geometric mean, 99th percentile and worst with its case.

    The 99th percentile is the smallest regret that at least 99 of 100 cases do not exceed.
    """
    result, regrets = {}, list(regrets)
    for direction, training in (("forward", False), ("training", True)):
        these = sorted((regret for regret in regrets if regret.training is training), key=lambda regret: regret.ratio)
        if these:
            worst = these[-1]
            mean = math.exp(sum(math.log(regret.ratio) for regret in these) / len(these))
            result[direction] = {
                "cases": len(these),
                "geometric mean": mean,
                "99th percentile": these[math.ceil(0.99 * len(these)) - 1].ratio,
                "worst": worst.ratio,
                "worst case": f"{worst.case}: {worst.chosen or 'none'} for {worst.best}",
            }
    return result


def record_spec(record: Record) -> AttentionSpec:
    """Returns the spec of a raw record, with a backward if the record is of training."""
    return replace(spec_of(record["spec"]), needs_backward=record["direction"] == "training")


def samples_of(
    records: Sequence[Record], candidates: Sequence[str], device: str, tile: int, processors: int
) -> Samples:
    """Returns the samples of the candidates; ``device`` is "cuda" or "cpu".

    A time of a kernel that the backend's model is not about is none: ``Backend.modelled`` told the sweep.
    """
    result: Samples = {}
    specs = [record_spec(record) for record in records]
    kinds, hosts = [kind_of_call(spec) for spec in specs], [_hosts(record, device) for record in records]
    slow = [0.0] * len(records)
    for training in (False, True):
        places = [place for place, spec in enumerate(specs) if spec.needs_backward is training]
        values = slowness([kinds[place] for place in places], [hosts[place] for place in places])
        for place, value in zip(places, values, strict=True):
            slow[place] = value
    for place, record in enumerate(records):
        spec, times = specs[place], right_times(record)
        sizes = sizes_of_call(spec, tile, processors)
        for name, time in times.items():
            if name in candidates and record["backends"][name].get("modelled", True):
                known = 0.0 if name in BY_BLOCKS else hosts[place].get(name, 0.0)
                weight = 0.0 if _outdated(record, name) else _weight(name, times)
                sample = Sample(kinds[place], sizes, time, known, weight, slow[place])
                result.setdefault((spec.needs_backward, name), {})[place] = sample
    return result


def counts(record: Record) -> bool:
    """Returns whether a record tells the cost of a choice: not if its best time is the host's in an older sweep."""
    times = right_times(record)
    return not _outdated(record, min(times, key=lambda name: times[name]))


def _outdated(record: Record, name: str) -> bool:
    """Returns whether a time is the host's in an older sweep."""
    host = record["backends"][name].get("host", 0.0)
    return bool(record.get("older") and right_times(record)[name] < HOST_DECIDES * host)


def _hosts(record: Record, device: str) -> dict[str, float]:
    """Returns the host's microseconds by backend, where they are known."""
    # On a CPU the host does all the work, so its time says nothing more.
    if device != "cuda" or record.get("older"):
        return {}
    hosts = {name: (time, record["backends"][name].get("host", 0.0)) for name, time in right_times(record).items()}
    # If the device took far longer, launches may have waited for it.
    return {name: min(time, host) for name, (time, host) in hosts.items() if time < HIDES_HOST * min(time, host)}


def _weight(name: str, times: Mapping[str, float]) -> float:
    """Returns how much a time counts in a fit: less if the backend is far from the best, so that it is never chosen.

    The best of all backends, or of those that need no package but torch. A backend is never chosen, either, where the
    one runs that it ranks behind (``behind`` of its record).
    """
    weight = LEAST_WEIGHT
    if preference.behind()[0].get(name) in times:
        return weight
    for installed in (tuple(times), TORCH_ALONE):
        if name in installed:
            behind = math.log(times[name] / min(times[one] for one in installed if one in times))
            weight = max(weight, 1.0 / (1.0 + (behind / HALF_WEIGHT) ** 2))
    return weight
