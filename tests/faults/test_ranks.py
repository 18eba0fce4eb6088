"""Tests a rank of context parallelism that dies, stops, is late, sends NaN, or refuses a call alone, over gloo."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("torch was built without torch.distributed", allow_module_level=True)

from context_torch_worker import Failed, World, once
from rank_fault_scenes import GRACE, PATIENT, TIMEOUT

LOST = ("dies in forward", "dies in backward", "stops in forward", "stops in backward", "refuses alone")
FAULTS = (*LOST, "is late", "sends NaN")


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, float]]:
    """By fault of rank 1: what rank 0 got, and after how many seconds."""
    worlds = [
        World(how, 2, {how: ("rank_fault_scenes", "fault", (how,))}, TIMEOUT if how in LOST else PATIENT)
        for how in FAULTS
    ]
    _, ran = once(worlds, "faults", tmp_path_factory, seconds=550)
    for how, ranks in ran.items():
        for rank in ranks:  # the faulty one, too: a rank that dies or stops leaves no result
            result = rank.get(how)
            assert not isinstance(result, Failed), f"{how}: {result.text}"
    return {how: ranks[0][how] for how, ranks in ran.items()}


@pytest.mark.parametrize("how", LOST)
def test_the_other_rank_raises_within_the_timeout(others: dict[str, tuple[Any, float]], how: str) -> None:
    text, seconds = others[how]
    assert isinstance(text, str) and text, text
    assert not text.startswith(("AttributeError", "TypeError", "NameError", "IndexError")), text
    assert seconds < TIMEOUT + GRACE, "before the faulty rank is ended, or answers"


def test_a_late_rank_changes_no_number(others: dict[str, tuple[Any, float]]) -> None:
    error, seconds = others["is late"]
    assert error < 1e-12 and seconds > 1.0


def test_nan_of_one_rank_does_not_reach_rows_that_cannot_see_it(others: dict[str, tuple[Any, float]]) -> None:
    error, _ = others["sends NaN"]
    assert error < 1e-12
