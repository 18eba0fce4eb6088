"""Tests that both sides of every call of the benchmark of real calls compute the same."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
import torch

from benchmarks import real_calls, real_calls_report
from benchmarks.real_calls import RealCall


def shortened(call: RealCall) -> RealCall:
    """The call with few rows and tokens, so that a CPU runs it quickly."""

    def short(length: int) -> int:
        return min(length, 24)

    batch = min(call.batch, 2)
    sizes = {"batch": batch, "q_len": short(call.q_len), "kv_len": short(call.kv_len)}
    shape = call.shape
    if shape is not None:
        shape = (min(shape[0], batch), shape[1], short(shape[2]), short(shape[3]))
    return call._replace(**sizes, shape=shape)


@pytest.mark.parametrize("call", real_calls.CALLS, ids=lambda call: call.name)
def test_both_sides_compute_the_same(call: RealCall) -> None:
    both = real_calls.sides(shortened(call), call.training, "cpu", torch.float32)
    ours, torchs = (side() for side in both.values())
    for actual, expected in zip(ours, torchs, strict=True) if call.training else [(ours, torchs)]:
        torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


def test_the_report_marks_what_was_missed() -> None:
    calls = [
        {"call": name, "direction": "forward", "backend": "flash2", "seconds": {"attention": [1e-5], "F.sdpa": [time]}}
        for name, time in (("fast", 2e-5), ("slow", 0.9e-5))
    ]
    facts = {"date": "2026-01-01", "python": "3.12", "versions": {"torch": "2.11"}, "processor": "x"}
    text = real_calls_report._section({"environment": facts, "device": "GPU", "dtype": "bfloat16", "calls": calls})
    assert "| slow | forward | `flash2` | 10 µs | 9 µs | 0.90 (missed) |" in text
    assert "1 of 2 are below the goal" in text and text.count("missed") == 1
