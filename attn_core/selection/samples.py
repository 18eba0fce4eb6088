"""Turns raw records into the samples of fits: what each sample says about the host, and how much it counts.

Raw times of several sweeps may be fitted together (sweeps.py). What the host does between kernels changes with every
version of this project, and kernels do not. So the newest sweep alone says how long the host takes; an older one says
how long the device takes, where the device decided.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from attn_core.selection.features import kind_of_call
from attn_core.selection.fit import HOST_DECIDES, Sample
from attn_core.selection.host_noise import slowness
from attn_core.selection.preference import BEHIND
from attn_core.selection.regret import TORCH_ALONE, Record, record_spec, right_times
from attn_core.selection.sizes import sizes_of_call

HIDES_HOST = 2.5
"""From this many times the host's time on, nothing is known about the host."""

LEAST_WEIGHT, HALF_WEIGHT = 0.05, 2.0
"""The least weight of a sample, and the logarithm of how many times as slow as the best it has half a weight."""

WITHOUT_MODEL = ("xformers",)
"""Backends that launch the kernels of others and are never faster. Without a model they rank after fast backends."""

BY_BLOCKS = ("math",)
"""Backends whose host takes longer for each block of queries. So the sizes of a call explain its time, not its kind."""

Samples = dict[tuple[bool, str], dict[int, Sample]]
"""By direction and backend the samples, each under the position of its record."""


def samples_of(
    records: Sequence[Record], candidates: Sequence[str], device: str, tile: int, processors: int
) -> Samples:
    """Returns the samples of the candidates that may have a model; ``device`` is "cuda" or "cpu"."""
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
            if name in candidates and name not in WITHOUT_MODEL:
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
    one runs that it ranks behind (BEHIND in preference.py).
    """
    weight = LEAST_WEIGHT
    if BEHIND.get(name) in times:
        return weight
    for installed in (tuple(times), TORCH_ALONE):
        if name in installed:
            behind = math.log(times[name] / min(times[one] for one in installed if one in times))
            weight = max(weight, 1.0 / (1.0 + (behind / HALF_WEIGHT) ** 2))
    return weight
