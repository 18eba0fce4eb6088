"""Tests which cases of the tests marked ``rotates`` or ``slow`` run on a day."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]
CONFTEST = Path(__file__).parents[1] / "conftest.py"
BEGINNING = """
import os
import pytest

def pytest_addoption(parser):
    parser.addoption("--sweep", action="store_true")
    parser.addoption("--rotate", action="store_true")

"""
FAMILIES = """
import pytest

@pytest.mark.rotates
@pytest.mark.parametrize("case", range(7))
def test_many(case): pass

@pytest.mark.rotates
@pytest.mark.parametrize("case", range(2))
def test_two(case): pass

@pytest.mark.rotates
def test_alone(): pass

@pytest.mark.slow
def test_slow(): pass

@pytest.mark.slow
@pytest.mark.parametrize("case", range(2))
def test_slow_too(case): pass

@pytest.mark.parametrize("case", range(5))
def test_other(case): pass
"""
SLOW = {"test_slow", "test_slow_too[0]", "test_slow_too[1]"}
MANY, OTHERS = {f"test_many[{case}]" for case in range(7)}, {"test_two[0]", "test_two[1]", "test_alone"}


def ran(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, day: int, *options: str) -> set[str]:
    """The names of the cases that a run on a day collects."""
    source = CONFTEST.read_text(encoding="utf-8")
    head, middle = source.index("DAYS = "), source.index("def pytest_collection_modifyitems(")
    end = source.index("    items.sort(", middle)
    pytester.makeconftest(BEGINNING + source[head:middle] + source[middle:end])
    pytester.makepyfile(test_families=FAMILIES)
    monkeypatch.setenv("SWEEP_DAY", str(day))
    result = pytester.runpytest_inprocess("--collect-only", "-q", "-p", "no:randomly", *options)
    return {line.partition("::")[2] for line in result.outlines if "::" in line}


def test_every_case_runs_within_a_week_and_no_family_rests(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    days = [ran(pytester, monkeypatch, day) for day in range(700, 707)]
    assert set.union(*days) >= MANY | SLOW
    for day in days:
        assert len(day & SLOW) == 1
        assert 1 <= len(day & MANY) <= 2 and day >= OTHERS and len([name for name in day if "other" in name]) == 5


@pytest.mark.parametrize("options", [("--sweep",), ("test_families.py",), ("-m", "rotates or slow or cuda")])
def test_a_sweep_and_a_file_by_name_run_everything(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
) -> None:
    assert ran(pytester, monkeypatch, 700, *options) >= MANY | OTHERS | SLOW


def test_files_by_name_rotate_if_told_so(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ran(pytester, monkeypatch, 700, "--rotate", "test_families.py") == ran(pytester, monkeypatch, 700)
