"""Known-bad kernels: every row of ``known_bad.json`` that refuses calls does refuse them, by name and automatically.

It needs neither the kernels nor their devices: selection is asked about a machine with a faulty version.
"""

from __future__ import annotations

from typing import Any

from attn_core import backends
from attn_core.backends.shared import known_bad
from attn_core.backends.shared.known_bad import Row, Version
from attn_core.backends.support import Build
from attn_core.call.spec import AttentionSpec
from attn_core.cli.certify.calls import STORED
from attn_core.selection import Target, choice

NAME = "known-bad"

_CHAT: dict[str, Any] = {
    **{"batch": 2, "q_len": 2048, "kv_len": 2048, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128},
    **{"value_dim": 128, "dtype": "bfloat16", "causal": True, "needs_backward": True},
}
CALLS = tuple(
    AttentionSpec(**_CHAT | {name: tuple(value) if isinstance(value, list) else value for name, value in call.items()})
    for call in STORED["known bad"]
)
"""Calls of which each row refuses at least one; a test checks it."""


def refused_calls() -> list[tuple[Row, str, str, AttentionSpec]]:
    """Returns a call for each refusing row and each of its backends and devices: (row, backend, device, spec)."""
    found = []
    for row in (row for row in known_bad.rows() if row.handling == "refused"):
        specs = [spec for spec in CALLS if all(known_bad.holds(condition, spec) for condition in row.conditions)]
        devices = [{"cuda": "sm90", "rocm": "gfx942"}.get(each, each.partition("-")[0]) for each in row.devices]
        found += [(row, name, device, specs[0]) for name in row.backends for device in devices if specs]
    return found


def faulty_version(row: Row) -> Version:
    """Returns a version that a row calls faulty; one that no comparison excludes."""
    numbers = [known_bad.numbers_of(part.lstrip("<>=!")) for part in row.versions.split(",") if part]
    below = [(*number[:-1], number[-1] - 1) if number[-1] else (number[0] - 1, 99) for number in numbers]
    return next(version for version in [*numbers, *below, (1,)] if known_bad.includes(row.versions, version))


def fault_of(row: Row, name: str, device: str, spec: AttentionSpec) -> str | None:
    """Asks selection for a call that a row must refuse, or a backend of several operators which of them runs it."""
    backend, _, operator = name.partition(":")
    if operator:
        runs = backends.load(backend).lower(spec)["operator"]
        return f"{row.name}: {backend} runs {spec} by {operator}" if runs == operator else None
    version = faulty_version(row)
    build = Build(f"{row.package} {'.'.join(map(str, version))}", version=version)
    target = Target(backends.load(name, backends.kind_of(device)).FRAMEWORK, device, builds=((name, build),))
    if not any(row.link in why and row.symptom in why for why in choice.refusals(name, spec, target)):
        return f"{row.name}: {name} on {device} does not refuse {spec}"
    return f"{row.name}: automatic choice takes {name}" if choice.explain(spec, target).backend == name else None
