"""Tests the page of the GPU figures with invented data: nothing is measured, and nothing is written outside the
test's folder."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from attn_core import AttentionSpec, NoBackendError, Target, explain
from benchmarks import hopper, hopper_evidence
from benchmarks.hopper_evidence import junit_outcome, memcheck_outcome
from benchmarks.hopper_group import LARGE, Group, Shape, holds, reason
from benchmarks.hopper_report import MEASURES, combined, page

ENVIRONMENT = {
    "date": "1999-12-31",
    "python": "0.0",
    "processor": "made-up processor",
    "device": "made-up GPU",
    "versions": {"torch": "0.0.0", "tokamax": None},
}
JUNIT = """<?xml version="1.0"?>
<testsuites><testsuite name="pytest" tests="4" timestamp="1999-12-31T00:00:00">
<testcase classname="tests.test_made_up" name="test_one[cuda]" time="1"/>
<testcase classname="tests.test_made_up.TestMore" name="test_two" time="1"/>
<testcase classname="tests.test_other" name="test_three"><failure message="no">no</failure></testcase>
<testcase classname="tests.test_other" name="test_four"><skipped message="needs two GPUs">x</skipped></testcase>
</testsuite></testsuites>
"""
MEMCHECK = """========= COMPUTE-SANITIZER
ran: made_up, dense, forward
not run: packed: other: refused it
memcheck cases: 1 ran, 0 wrong
========= ERROR SUMMARY: 0 errors
"""
REGRET = {"cases": 3, "geometric mean": 1.01, "99th percentile": 1.2, "worst": 1.5, "worst case": "a made-up call"}
SWEEP = {"device": "sm0", "date": "1999-12-30", "cases": []}


@pytest.fixture(autouse=True)
def invented_regret(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device with arbitrary measurements, and a regret computed from them."""
    monkeypatch.setattr(hopper_evidence, "Fitting", lambda raw: SimpleNamespace(regrets=lambda: raw["cases"]))
    monkeypatch.setattr(hopper_evidence, "summary", lambda regrets: {"forward": REGRET})


def after(seconds: float) -> Any:
    """A candidate that reports this time without spending it."""
    return lambda: lambda calls: seconds


def absent() -> Any:
    raise ModuleNotFoundError("No module named 'made_up'")


def broken() -> Any:
    raise ValueError("a made-up fault")


@cache
def invented_group() -> Group:
    """Shared by all tests, none of which changes it: timing begins with a slow garbage collection."""
    group = Group("Made-up speeds", "made up", LARGE.flops("forward"))
    makers = {"bare x": after(1e-3), "attention x": after(2e-3), "bare y": absent, "attention z": broken}
    group.measure(makers, calls=2, rounds=3)
    group.speed("x beside bare", "attention x", "bare x", 0.98)
    group.speed("bare beside x", "bare x", "attention x", 0.98)
    group.speed("y", "bare y", "bare x", 0.5)
    group.extra("what x adds", "attention x", "bare x", 2000.0)
    group.tflops("z", "attention z", 1.0)
    group.tflops("x", "attention x", 100.0, beside="bare x")
    return group


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    measures = {"attention": {"groups": [invented_group().as_json()], "error": None}}
    measures["softcap"] = {"groups": [], "error": "failed: RuntimeError: made up"}
    texts = {
        "hopper.json": json.dumps({"environment": ENVIRONMENT, "measures": measures}),
        "results.xml": JUNIT,
        "memcheck.txt": MEMCHECK,
        "sweep.json": json.dumps(SWEEP),
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    return {name: tmp_path / name for name in texts}


def rendered(files: dict[str, Path], *names: str) -> str:
    junit = [files["results.xml"]] if "results.xml" in names else []
    return page(combined([files["hopper.json"]], junit, *(files[n] if n in names else None for n in FILES[1:])))


FILES = ("results.xml", "memcheck.txt", "sweep.json")


def test_the_page_shows_what_was_measured(files: dict[str, Path]) -> None:
    text = rendered(files, *FILES)
    assert "1999-12-31" in text and "made-up GPU" in text and "torch 0.0.0." in text
    assert "| bare x | 1,000.0 | 550 |" in text
    assert "| x beside bare | 0.500 times the speed of bare x | >= 0.98 | missed |" in text
    assert "| bare beside x | 2.000 times the speed of attention x | >= 0.98 | met |" in text
    assert "| what x adds | 1,000 µs above bare x | <= 2000 | met |" in text
    assert "| x | 275 TFLOP/s (bare x: 550 in the same run) | >= 100 | met |" in text
    assert "| z | failed: attention z: ValueError: a made-up fault | >= 1 | missed |" in text
    assert "Met: 3. Missed: 2. Not run: 1." in text


def test_the_page_lists_everything_that_was_not_run(files: dict[str, Path]) -> None:
    text = rendered(files).partition("## Not run\n")[2]
    assert "- bare y: ModuleNotFoundError: No module named 'made_up' (Made-up speeds)" in text
    assert "- y: bare y: ModuleNotFoundError: No module named 'made_up' (Made-up speeds)" in text
    for measure, heading in MEASURES.items():
        assert (f"- {heading}\n" in text) == (measure not in ("attention", "softcap"))
    assert "- Softcap: speed: failed: RuntimeError: made up" in text
    assert "- The sweep\n" in text and "- The tests\n" in text and "- compute-sanitizer\n" in text
    assert "AMD GPUs" in text and "Any GPU but the one named above" in text
    complete = rendered(files, *FILES).partition("## Not run\n")[2]
    assert "- The sweep\n" not in complete
    assert "- 1 tests: needs two GPUs\n" in complete
    assert "- memcheck: packed: other: refused it" in complete


def test_the_outcome_of_the_tests(files: dict[str, Path]) -> None:
    outcome = junit_outcome([files["results.xml"]])
    assert outcome["files"] == {"test_made_up": {"passed": 2}, "test_other": {"failed": 1, "skipped": 1}}
    text = rendered(files, *FILES)
    assert "2 passed, 1 failed, 0 xfailed, 1 skipped." in text
    assert "- `results.xml`, 1999-12-31: 4 tests\n" in text
    assert "| test_other | 0 | 1 | 0 | 1 |" in text
    assert "- `tests.test_other.test_three`" in text


def test_the_last_run_of_a_test_counts(files: dict[str, Path], tmp_path: Path) -> None:
    later = tmp_path / "later.xml"
    skipped = '<skipped type="pytest.xfail" message="known">x</skipped>'
    mended = JUNIT.replace('<failure message="no">no</failure>', "").replace('name="test_two"', 'name="test_new"')
    later.write_text(mended.replace('time="1"/>', f'time="1">{skipped}</testcase>', 1), encoding="utf-8")
    result = combined([files["hopper.json"]], [files["results.xml"], later], None, None)
    assert result["tests"]["files"] == {
        "test_made_up": {"xfailed": 1, "passed": 2},
        "test_other": {"passed": 1, "skipped": 1},
    }
    assert result["tests"]["failed"] == [] and result["tests"]["skipped"] == {"needs two GPUs": 1}
    text = page(result)
    assert "- `later.xml`, 1999-12-31: 4 tests, 3 of them again" in text and "- 1 tests: known" in text
    nothing_there = tmp_path / "bare.xml"
    nothing_there.write_text(JUNIT.replace('<failure message="no">no</failure>', '<skipped message="bare"/>'), "utf-8")
    actual = combined([files["hopper.json"]], [later, nothing_there], None, None)["tests"]
    assert actual["failed"] == [] and "bare" not in actual["skipped"]  # a skip does not replace an outcome
    nothing_there.write_text(JUNIT.replace("needs two GPUs", "bare"), "utf-8")
    actual = combined([files["hopper.json"]], [later, nothing_there], None, None)["tests"]
    assert actual["skipped"] == {"bare": 1}  # but it replaces the reason of another skip


def test_memcheck_counts_only_with_a_summary(files: dict[str, Path]) -> None:
    assert "`memcheck.txt`: 0 errors in kernels; 1 ran, 0 wrong." in rendered(files, *FILES)
    call = 'Program hit CUDA_ERROR_INVALID_VALUE (error 1) due to "invalid argument" on CUDA API call to cuMadeUp.\n'
    files["memcheck.txt"].write_text("========= " + call + MEMCHECK.replace("0 errors", "3 errors"), encoding="utf-8")
    assert memcheck_outcome(files["memcheck.txt"])["errors"] == 3
    text = rendered(files, *FILES)
    assert "2 errors in kernels; 1 ran, 0 wrong." in text and "1 × `cuMadeUp`" in text
    files["memcheck.txt"].write_text("memcheck cases: 1 ran, 0 wrong\n", encoding="utf-8")
    assert "has no summary of compute-sanitizer: not shown to have run" in rendered(files, *FILES)


def test_the_regret_of_the_automatic_choice(files: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    text = rendered(files, *FILES)
    assert "over the calls of 1999-12-30, `sweep.json`" in text
    expected = (
        "| forward | 3 | 1.010 | <= 1.03 | met | 1.200 | <= 1.2 | met | 1.500 | <= 1.35 | missed | a made-up call |"
    )
    assert expected in text
    monkeypatch.setattr(hopper_evidence, "summary", lambda regrets: {})
    assert "`sweep.json` names no regret." in rendered(files, *FILES)


def test_the_command_writes_only_with_the_write_option(
    files: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in ("docs", "benchmarks/results"):
        (tmp_path / folder).mkdir(parents=True)
    junit = ["--junit", str(files["results.xml"]), "--memcheck", str(files["memcheck.txt"])]
    arguments = ["--render", str(files["hopper.json"]), *junit, "--sweep", str(files["sweep.json"])]
    assert hopper.main(arguments, tmp_path) == 1  # goals are missed
    printed = capsys.readouterr().out
    assert not (tmp_path / "benchmarks/results/hopper.md").exists()
    assert hopper.main([*arguments, "--write"], tmp_path) == 1
    text = (tmp_path / "benchmarks/results/hopper.md").read_text(encoding="utf-8")
    assert printed.strip() == text.strip()
    assert page(json.loads((tmp_path / "benchmarks/results/hopper.json").read_text(encoding="utf-8"))) == text


def test_a_failed_measure_does_not_lose_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measures = {"small": broken, "attention": lambda: [invented_group()], "jax": broken}
    monkeypatch.setattr(hopper, "measures", lambda: measures)
    monkeypatch.setattr(hopper, "gpu_environment", lambda: ENVIRONMENT)
    result = hopper.measured(["small", "attention"], tmp_path / "out.json")
    assert json.loads((tmp_path / "out.json").read_text(encoding="utf-8")) == result
    assert result["measures"]["small"]["error"] == "failed: ValueError: a made-up fault"
    assert "## Small calls\n\nfailed: ValueError: a made-up fault" in page(result)
    assert "jax" not in result["measures"] and not hopper.all_well(result)


def test_the_exit_code_is_0_only_without_failures() -> None:
    figure = {"goal": ">= 1", "held": True}
    fine: dict[str, Any] = {"measures": {"small": {"groups": [{"title": "", "figures": [figure]}], "error": None}}}
    assert hopper.all_well(fine)
    assert not hopper.all_well({**fine, "tests": {"failed": ["test_made_up"]}})
    assert not hopper.all_well({**fine, "memcheck": {"errors": 1, "api_calls": {}}})
    assert not hopper.all_well({**fine, "memcheck": {"errors": None, "api_calls": {}}})
    assert not hopper.all_well({"measures": {"small": {"groups": [], "error": "failed"}}})
    figure["held"] = False
    assert not hopper.all_well(fine)


def test_skipped_and_failed_measures_are_separate() -> None:
    spec = AttentionSpec(
        batch=1, q_len=5, kv_len=5, num_heads=2, num_kv_heads=2, head_dim=16, value_dim=16, dtype="float32"
    )
    refused = explain(spec, Target("torch", "cpu"), "jax_xla")
    assert reason("attention x", NoBackendError(refused)) == "not run: runs in JAX only"
    assert reason("attention x", ValueError("no\nmore")) == "failed: ValueError: no"
    assert reason("somebody else's", ValueError("no")) == "not run: ValueError: no"
    assert reason("attention x", ImportError("no")) == "not run: ImportError: no"


def test_goals_and_counts() -> None:
    assert holds(0.98, ">= 0.98") and not holds(0.97, ">= 0.98")
    assert holds(1.0, "<= 1 (to two digits)") and not holds(1.01, "<= 1 (to two digits)")
    shape = Shape(1, 2, 3, 1, 5)
    assert shape.flops("forward") == 2 * 2 * 3 * 2 * 2 * 5 / 2
    assert shape.flops("forward + backward") == 3.5 * shape.flops("forward")


def test_a_later_run_replaces_what_it_measured_again(files: dict[str, Path], tmp_path: Path) -> None:
    first, later = json.loads(files["hopper.json"].read_text(encoding="utf-8")), tmp_path / "later.json"
    again = {"softcap": {"groups": [], "error": "failed: made up again"}}
    later.write_text(json.dumps({**first, "measures": again}), encoding="utf-8")
    result = combined([files["hopper.json"], later], [], None, None)
    assert result["measures"] == {**first["measures"], **again}
    assert "Softcap: speed: from a later run, 1999-12-31, on a host of the same kind." in page(result)
    other = {**first["environment"], "versions": {"torch": "0.0.1"}}
    later.write_text(json.dumps({"environment": other, "measures": again}), encoding="utf-8")
    with pytest.raises(ValueError, match="different versions"):
        combined([files["hopper.json"], later], [], None, None)


def test_results_missing_in_a_later_run_stay(files: dict[str, Path], tmp_path: Path) -> None:
    whole = combined(
        [files["hopper.json"], files["hopper.json"]], [files["results.xml"]], *(files[n] for n in FILES[1:])
    )
    before, later = tmp_path / "before.json", tmp_path / "later.xml"
    before.write_text(json.dumps(whole), encoding="utf-8")
    assert combined([before], [], None, None) == json.loads(before.read_text(encoding="utf-8"))
    later.write_text(JUNIT.replace("tests.test_", "tests.test_other_"), encoding="utf-8")
    actual = combined([before], [later], None, None)
    assert [source["source"] for source in actual["tests"]["sources"]] == ["later.xml"]
    assert {**actual, "tests": None} == {**json.loads(before.read_text(encoding="utf-8")), "tests": None}
