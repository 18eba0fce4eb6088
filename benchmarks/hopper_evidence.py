"""Reads the outcomes of the tests, compute-sanitizer and the sweep on a GPU as plain data for the page."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path
from typing import Any

from attn_core.selection.cross_validation import Fitting
from attn_core.selection.regret import summary


def junit_outcome(paths: list[Path]) -> dict[str, Any]:
    """Reads pytest's JUnit XML: counts by file, the failed tests, and the reasons of skipped tests.

    If several files have a test, the last file that did not skip it counts, or the last file if all skipped it.
    Outcomes are "passed", "failed", "skipped" and, for known limitations, "xfailed".
    """
    cases: dict[tuple[str, str], tuple[str, str]] = {}
    sources = []
    for path in paths:
        suites = list(ElementTree.parse(path).getroot().iter("testsuite"))
        outcomes = {
            (case.get("classname", ""), case.get("name", "")): _outcome(case)
            for suite in suites
            for case in suite.iter("testcase")
            if case.get("name")  # the test that was running when a run was stopped has no name
        }
        again = len(outcomes.keys() & cases.keys())
        date = suites[0].get("timestamp", "")[:10] if suites else ""
        sources.append({"source": path.name, "date": date, "tests": len(outcomes), "again": again})
        for case, latest in outcomes.items():
            if latest[0] != "skipped" or cases.get(case, latest)[0] == "skipped":
                cases[case] = latest
    files: dict[str, Counter[str]] = {}
    for (classname, _), (outcome, _) in cases.items():
        file = next((part for part in classname.split(".") if part.startswith("test_")), classname)
        files.setdefault(file, Counter())[outcome] += 1
    reasons = {
        kind: dict(Counter(why for outcome, why in cases.values() if outcome == kind).most_common())
        for kind in ("skipped", "xfailed")
    }
    failed = [f"{classname}.{name}" for (classname, name), (outcome, _) in cases.items() if outcome == "failed"]
    return {
        "sources": sources,
        "files": {name: dict(counts) for name, counts in sorted(files.items())},
        "failed": failed,
        **reasons,
    }


def _outcome(case: ElementTree.Element) -> tuple[str, str]:
    """Returns the outcome of a test, and its reason."""
    children = {child.tag: child for child in case}
    if children.keys() & {"failure", "error"}:
        return "failed", ""
    if "skipped" not in children:
        return "passed", ""
    kind = "xfailed" if children["skipped"].get("type") == "pytest.xfail" else "skipped"
    return kind, children["skipped"].get("message") or "no reason given"


def memcheck_outcome(path: Path) -> dict[str, Any]:
    """Reads the log of compute-sanitizer: its number of errors (None without a summary) and the program's output.

    ``api_calls`` counts the errors that a call of the CUDA API returned, by the call's name. For example, a library may
    look up a driver function that does not exist. All other errors are in a kernel or its memory.
    """
    text = path.read_text(encoding="utf-8", errors="replace")
    summaries = [int(count) for count in re.findall(r"ERROR SUMMARY: (\d+) error", text)]
    calls = Counter(re.findall(r"Program hit \S+ \(error \d+\) due to .* on CUDA API call to (\w+)", text))
    said = re.findall(r"^memcheck cases: .*$", text, re.MULTILINE)
    refused = re.findall(r"^not run: (.*)$", text, re.MULTILINE)
    errors = sum(summaries) if summaries else None
    return {"source": path.name, "errors": errors, "api_calls": dict(calls), "said": said, "not_run": refused}


def sweep_outcome(path: Path) -> dict[str, Any]:
    """Reads a raw file of ``attn bench``: the date of measurement, and the regret of automatic choice.

    ``unseen`` is a result of ``regret.summary``: for each call choose models that were fitted to other calls.
    """
    raw = json.loads(path.read_text(encoding="utf-8"))
    return {"source": path.name, "date": raw["date"], "unseen": summary(Fitting(raw).regrets())}
