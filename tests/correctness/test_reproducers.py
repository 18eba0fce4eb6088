"""Runs every call in which a campaign once found a fault: a line of reproducers.jsonl each, as it was printed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.campaign.case import case_of
from tests.campaign.entries import left_out
from tests.campaign.judge import verdict_of

LINES = (Path(__file__).parent / "reproducers.jsonl").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("line", LINES)
def test_a_mended_fault_stays_mended(line: str) -> None:
    case = case_of(line)
    framework = case.entry.partition(" ")[0]
    pytest.importorskip(framework)
    if case.entry in (absent := left_out(framework)):
        pytest.skip(absent[case.entry])
    verdict = verdict_of(case, "cpu")
    assert verdict.skipped is None and verdict.fault is None, verdict
