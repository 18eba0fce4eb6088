"""``other_process`` reports what happens in the second process: a failure with its traceback, a skip, and an end."""

from __future__ import annotations

from pathlib import Path

import pytest
from other_process import OtherProcess

TESTS = """
import os, pytest

def test_passes(): assert os.environ["ONLY_THERE"] == "yes"
def test_fails():
    print("printed before")
    assert 1 + 1 == 3, "in another process"
def test_skips(): pytest.skip("not today")
def test_ends(): os._exit(3)

@pytest.mark.parametrize("x", [1, 2])
def test_cases(x): assert x == 1
"""


def test_outcomes_of_the_second_process_are_those_of_the_test(tmp_path: Path) -> None:
    files = [tmp_path / "test_there.py", tmp_path / "test_also.py"]
    for file in files:
        file.write_text(TESTS, encoding="utf-8")
    process = OtherProcess(files, tmp_path, tmp_path / "log", {"ONLY_THERE": "yes"})
    try:
        process.run("test_there.py::test_passes")
        process.run("test_also.py::test_cases[1]")
        for test, words in {
            "test_fails": r"(?s)assert 1 \+ 1 == 3.*in another process.*printed before",
            "test_skips": "not today",
            "test_ends": "the other process ended",
            "test_cases[2]": "assert 2 == 1",  # in a process that starts anew
            "test_nothing": "test_nothing: no such test",
        }.items():
            with pytest.raises(pytest.fail.Exception, match=words):
                process.run(f"test_there.py::{test}")
    finally:
        process.end()
