"""Tests that every case of the benchmark of small calls runs, and that both sides compute the same where they can."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
import torch

from benchmarks import small_calls

SHAPE = (2, 6, 4, 2, 8)
ALIKE = ("plain", "causal", "mask", "mask of padding", "bias", "window", "ALiBi")


def test_dense_cases_equal_their_rivals() -> None:
    torch.manual_seed(0)
    for name, (ours, rival, _) in small_calls.dense_cases(SHAPE, "cpu", torch.float32).items():
        out = ours()
        if name in ALIKE:
            torch.testing.assert_close(out, rival().transpose(1, 2), msg=name)


def test_training_cases_equal_their_rivals() -> None:
    torch.manual_seed(0)
    for name, (ours, rival, _) in small_calls.training_cases(SHAPE, "cpu", torch.float32).items():
        for actual, expected in zip(ours(), rival(), strict=True):
            torch.testing.assert_close(actual, expected.transpose(1, 2), msg=name)


def test_packed_and_paged_cases_equal_their_rivals() -> None:
    torch.manual_seed(0)
    for name, (ours, rival, _) in small_calls.packed_cases(SHAPE, "cpu", torch.float32).items():
        torch.testing.assert_close(ours(), rival().transpose(1, 2), msg=name)
    for lengths in ([21, 3, 16], [20, 20, 20]):
        cases = small_calls.paged_cases((4, 2, 8, lengths), "cpu", torch.float32)
        ours, rival, _ = cases["paged decode"]
        torch.testing.assert_close(ours(), rival()[:, :, 0])
        ours, rival, _ = cases["append"]
        k_pages, v_pages = (pool.clone() for pool in ours())
        rival()
        for before, after in zip((k_pages, v_pages), ours(), strict=True):
            assert torch.equal(before, after)


def test_a_measurement_has_the_times_of_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_calls, "ROUNDS", 2)
    monkeypatch.setattr(small_calls, "SHAPES", {"small": SHAPE})
    monkeypatch.setattr(small_calls, "PAGED", {"paged": (4, 2, 8, [21, 3, 16])})
    jobs = small_calls.jobs("cpu", torch.float32)
    for case in (("bias, training", "small"), ("two documents of equal lengths", "small"), ("append", "paged")):
        row = jobs[case]()
        assert [len(row["seconds"][who]) for who in ("attention", "rival")] == [2, 2] and not row["not_run"]
