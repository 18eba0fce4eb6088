"""Known-bad kernels: every row of ``known_bad.json`` that refuses calls does refuse them, by name and automatically.

It needs neither the kernels nor their devices: selection is asked about a machine with a faulty version.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from attn_core import backends
from attn_core.backends.shared import known_bad
from attn_core.backends.shared.known_bad import Row, Version
from attn_core.backends.support import Build
from attn_core.call.spec import AttentionSpec
from attn_core.cli.certify.check import Finding
from attn_core.cli.certify.subject import Subject
from attn_core.selection import Target, choice

NAME = "known-bad"

_CHAT: dict[str, Any] = {
    **{"batch": 2, "q_len": 2048, "kv_len": 2048, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128},
    **{"value_dim": 128, "dtype": "bfloat16", "causal": True, "needs_backward": True},
}
_CHANGES: tuple[dict[str, Any], ...] = (
    {},
    {"q_len": 1},
    {"kv_len": 192, "q_len": 64, "causal": False},
    {"kv_len": 65, "causal": False},
    {"q_len": 2050, "window": (3, 2), "causal": False},
    {"q_len": 2050, "window": (3, None), "causal": False},
    {"q_len": 64, "window": (31, 0)},
    {"batch": 8300, "q_len": 1, "kv_len": 1},
    {"batch": 1, "q_len": 2**17, "kv_len": 2**17, "bias_shape": (1, 1, 2**17, 2**17)},
)
CALLS = tuple(AttentionSpec(**_CHAT | changes) for changes in _CHANGES)
"""Calls of which each row refuses at least one; a test checks it."""


class Refused(NamedTuple):
    """A call that a row must refuse."""

    row: Row
    backend: str
    device: str
    version: Version
    spec: AttentionSpec


def refused_calls() -> list[Refused]:
    """Returns a call for each refusing row and each of its backends and devices."""
    return [each for row in known_bad.rows() if row.handling == "refused" for each in _of_row(row)]


def _of_row(row: Row) -> Iterator[Refused]:
    for name in row.backends:
        for device in map(_device_of, row.devices):
            for spec in CALLS:
                met = all(known_bad.holds(one, spec) for one in row.conditions)
                if met and (row.direction == "forward" or spec.needs_backward):
                    yield Refused(row, name, device, faulty_version(row), spec)
                    break


def _device_of(named: str) -> str:
    return {"cuda": "sm90", "rocm": "gfx942"}.get(named, named.partition("-")[0])


def faulty_version(row: Row) -> Version:
    """Returns a version that a row calls faulty; one that no comparison excludes."""
    numbers = [known_bad.numbers_of(part.lstrip("<>=!")) for part in row.versions.split(",") if part]
    below = [(*number[:-1], number[-1] - 1) if number[-1] else (number[0] - 1, 99) for number in numbers]
    candidates = [*numbers, *below, (1,)]
    return next(version for version in candidates if known_bad.includes(row.versions, version))


def check(refused: Refused) -> Finding:
    """Asks selection for a call that a row must refuse."""
    row, name, device, version, spec = refused
    build = Build(f"{row.package} {'.'.join(map(str, version))}", version=version)
    framework = backends.load(name, backends.kind_of(device)).FRAMEWORK
    target = Target(framework, device, builds=((name, build),))
    reasons = choice.refusals(name, spec, target)
    if not any(row.link in why and row.symptom in why for why in reasons):
        return Finding(f"{row.name}: {name} on {device} does not refuse {spec}")
    chosen = choice.explain(spec, target).backend
    return Finding(f"{row.name}: automatic choice takes {name} for {spec}" if chosen == name else None)


def met_here(subjects: list[Subject]) -> list[str]:
    """Returns the rows that are about kernels installed here, as ``"cudnn-nan-dq: sdpa_cudnn on sm90"``."""
    found: dict[str, None] = {}
    for subject in subjects:
        build = subject.target.build(subject.backend)
        version = () if build is None else build.version
        for row in known_bad.rows_of(subject.backend, subject.device, version):
            found[f"{row.name}: {subject.backend} on {subject.device}"] = None
    return list(found)
