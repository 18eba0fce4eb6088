"""Tests that the benchmark of random calls in JAX measures calls that jax.nn has, and sums them up."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("jax")
from attn_core import Target
from attn_core.selection.sweep import QUICK
from benchmarks import jax_calls


def test_a_call_is_measured_beside_jax_nn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax_calls, "ROUNDS", 1)
    target = Target.here("jax", "cpu")
    cases = {case.name: case for case in QUICK}
    entry = jax_calls.entry_of(cases["quick causal"], True, target)
    assert entry is not None and entry["direction"] == "training"
    assert set(entry["microseconds"]) == {entry["backend"], "jax.nn"} and not entry["failed"]
    assert entry["differences"]["jax.nn"] < 1e-4
    assert jax_calls.entry_of(cases["quick softcap"], False, target) is None, "jax.nn has no softcap"


def test_the_summary_counts_slower_calls() -> None:
    entries = [
        {
            "call": name,
            "direction": "forward",
            "backend": "jax_xla",
            "microseconds": {"jax_xla": [20, 10], "jax.nn": [t]},
        }
        for name, t in (("fast", 20), ("slow", 8))
    ]
    text = jax_calls.summary(entries)
    assert "| jax.nn | forward | 2 | 1.265 | 1 | 0.80 | slow: jax_xla |" in text
