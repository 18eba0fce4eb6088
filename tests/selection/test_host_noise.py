"""Tests the estimate of how busy the host was while each call was measured."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

from attn_core.selection.cost_model import Kind, kind_of_call
from benchmarks.fit.calls import random_calls
from benchmarks.fit.models import slowness

BACKENDS = {"flash2": 20.0, "flash3": 30.0, "math": 90.0}


def host(name: str, kind: Kind) -> float:
    """Microseconds in which sinks and packed documents add to each other."""
    return BACKENDS[name] + 60.0 * kind.sinks + 50.0 * kind.packed


def test_calls_with_several_effects_are_not_slow() -> None:
    kinds = [kind_of_call(replace(case.spec, needs_backward=False)) for case in islice(random_calls(0, "cuda"), 300)]
    assert any(kind.sinks and kind.packed for kind in kinds)
    slow = set(range(0, len(kinds), 10))
    hosts = [
        {name: host(name, kind) * (1.5 if place in slow else 1.0) for name in BACKENDS}
        for place, kind in enumerate(kinds)
    ]
    measured = slowness(kinds, hosts)
    for place, (kind, value) in enumerate(zip(kinds, measured, strict=True)):
        # The residuals of three backends are shrunk, so slow calls seem less slow than log(1.5), 0.41.
        assert 0.15 < value < 0.45 if place in slow else abs(value) < 0.13, kind
