"""Calls that each row of ``known_bad.json`` must refuse, asked of selection alone, which needs no kernel."""

from __future__ import annotations

from dataclasses import replace

from attn_core import AttentionSpec, Target, backends
from attn_core.backends.shared import known_bad
from attn_core.backends.support import Build
from attn_core.selection import choice

CHAT = AttentionSpec(
    **{"batch": 2, "q_len": 2048, "kv_len": 2048, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128},
    **{"value_dim": 128, "dtype": "bfloat16", "causal": True, "needs_backward": True},
)
"""A plain call of a chat model in training."""
CALLS = [
    CHAT,
    replace(CHAT, q_len=1),
    replace(CHAT, q_len=64, kv_len=192, causal=False),
    replace(CHAT, kv_len=65, causal=False),
    replace(CHAT, q_len=2050, window=(3, 2), causal=False),
    replace(CHAT, q_len=2050, window=(3, None), causal=False),
    replace(CHAT, q_len=64, window=(31, 0)),
    replace(CHAT, batch=8300, q_len=1, kv_len=1),
    replace(CHAT, batch=1, q_len=2**17, kv_len=2**17, bias_shape=(1, 1, 2**17, 2**17)),
]
"""Calls of which each row of ``known_bad.json`` that refuses any refuses at least one; a test checks it."""


def refused_calls() -> list[tuple[known_bad.Row, str, str, AttentionSpec]]:
    """A call for each refusing row and each of its backends and devices: (row, backend, device, spec)."""
    found = []
    for row in (row for row in known_bad.rows() if row.handling == "refused"):
        specs = [spec for spec in CALLS if all(known_bad.holds(one, spec) for one in row.conditions)]
        devices = [{"cuda": "sm90", "rocm": "gfx942"}.get(each, each.partition("-")[0]) for each in row.devices]
        found += [(row, name, device, specs[0]) for name in row.backends for device in devices if specs]
    return found


def faulty_version(row: known_bad.Row) -> known_bad.Version:
    """A version that a row calls faulty; one that no comparison excludes."""
    numbers = [known_bad.numbers_of(part.lstrip("<>=!")) for part in row.versions.split(",") if part]
    below = [(*number[:-1], number[-1] - 1) if number[-1] else (number[0] - 1, 99) for number in numbers]
    return next(version for version in [*numbers, *below, (1,)] if known_bad.includes(row.versions, version))


def not_refused(row: known_bad.Row, name: str, device: str, spec: AttentionSpec) -> str | None:
    """What is wrong, or None: selection must refuse the call, or a backend of several operators run it by another."""
    backend, _, operator = name.partition(":")
    if operator:
        runs = backends.load(backend).lower(spec)["operator"]
        return f"{row.name}: {backend} runs {spec} by {operator}" if runs == operator else None
    build = Build(row.package, version=faulty_version(row))
    target = Target(backends.load(name, backends.kind_of(device)).framework, device, builds=((name, build),))
    if not any(row.link in why and row.symptom in why for why in choice.refusals(name, spec, target)):
        return f"{row.name}: {name} on {device} does not refuse {spec}"
    return f"{row.name}: automatic choice takes {name}" if choice.explain(spec, target).backend == name else None
