"""Tests which of the tests marked ``sampled`` or ``slow`` are in the sample that ``make test`` runs, and its draws."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

from tests import conftest

pytest_plugins = ["pytester"]
CONFTEST = Path(__file__).parents[1] / "conftest.py"
BEGINNING = """
import os
import pytest

def pytest_addoption(parser):
    parser.addoption("--all", action="store_true")
    parser.addoption("--sample", action="store_true")

"""
FAMILIES = """
import pytest

@pytest.mark.sampled
@pytest.mark.parametrize("case", range(7))
def test_many(case): pass

@pytest.mark.sampled
@pytest.mark.parametrize("case", range(2))
def test_two(case): pass

@pytest.mark.sampled
def test_alone(): pass

@pytest.mark.slow
def test_slow(): pass

@pytest.mark.slow
@pytest.mark.parametrize("case", range(2))
def test_slow_too(case): pass

@pytest.mark.parametrize("case", range(5))
def test_other(case): pass

@pytest.mark.words
@pytest.mark.cuda
@pytest.mark.parametrize("case", range(7))
def test_words(case): pass

@pytest.mark.words
@pytest.mark.on_gpus(only=lambda case: case == 2)
@pytest.mark.cuda
@pytest.mark.parametrize("case", range(3))
def test_chosen(case): pass
"""
SLOW = {"test_slow", "test_slow_too[0]", "test_slow_too[1]"}
MANY, OTHERS = {f"test_many[{case}]" for case in range(7)}, {"test_two[0]", "test_two[1]", "test_alone"}


def ran(pytester: pytest.Pytester, *options: str) -> set[str]:
    """The names of the cases that a run collects."""
    source = CONFTEST.read_text(encoding="utf-8")
    head, middle = source.index("EVERY = "), source.index("def pytest_collection_modifyitems(")
    end = source.index("    items.sort(", middle)
    pytester.makeconftest(BEGINNING + source[head:middle] + source[middle:end])
    pytester.makepyfile(test_families=FAMILIES)
    result = pytester.runpytest_inprocess("--collect-only", "-q", "-p", "no:randomly", *options)
    return {line.partition("::")[2] for line in result.outlines if "::" in line}


def test_the_sample_has_a_case_of_each_family(pytester: pytest.Pytester) -> None:
    sample = ran(pytester)
    assert sample & MANY == {"test_many[0]"} and not sample & SLOW and sample >= OTHERS
    assert len([name for name in sample if "other" in name]) == 5


def test_the_sample_is_the_same_on_every_day(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    sample = ran(pytester)
    for day in range(3):
        monkeypatch.setattr("time.time", lambda day=day: 86400.0 * day)
        assert ran(pytester) == sample


@pytest.mark.parametrize("options", [("--all",), ("test_families.py",), ("-m", "sampled or slow or cuda")])
def test_all_and_a_file_by_name_run_everything(pytester: pytest.Pytester, options: tuple[str, ...]) -> None:
    assert ran(pytester, *options) >= MANY | OTHERS | SLOW


def test_files_by_name_are_sampled_if_told_so(pytester: pytest.Pytester) -> None:
    assert ran(pytester, "--sample", "test_families.py") == ran(pytester)


def test_the_sample_draws_the_first_of_all_examples(pytestconfig: pytest.Config) -> None:
    """The profile of this run, unless somebody chose it."""
    sample, every = settings.get_profile("sample"), settings.get_profile("ci")
    assert sample.derandomize and sample.max_examples < every.max_examples
    chosen = pytestconfig.getoption("--hypothesis-profile")
    expected = chosen or ("sample" if conftest.is_sample(pytestconfig) else "ci")
    assert settings.get_current_profile_name() == expected


def test_a_gpu_runs_every_fifth_case_that_differs_in_words_and_those_that_are_chosen(pytester: pytest.Pytester) -> None:
    every = {f"test_words[{case}]" for case in range(7)} | {f"test_chosen[{case}]" for case in range(3)}
    assert ran(pytester, "-m", "cuda") == {"test_words[0]", "test_words[5]", "test_chosen[2]"}
    assert ran(pytester, "--all") >= every and ran(pytester, "-m", "cuda", "test_families.py") == every


def test_the_suite_of_gpus_leaves_out_no_test(pytestconfig: pytest.Config) -> None:
    """``-m cuda`` does not read the files that ``pytest_ignore_collect`` names. Of those that this run has read, none
    has a test for GPUs."""
    found = pytestconfig.stash.get(conftest.GPU_FILES, set[Path]())
    if pytestconfig.args == pytestconfig.getini("testpaths"):  # this run has collected all files
        assert len(found) > 50
    assert [path for path in found if not conftest.GPU_WORDS.search(path.read_text("utf-8"))] == []
    files = list(CONFTEST.parent.rglob("test_*.py"))
    read = [path for path in files if conftest.GPU_WORDS.search(path.read_text("utf-8"))]
    assert 50 < len(read) < len(files) - 50
