"""What tests, compute-sanitizer and the sweep left behind on a GPU, as plain data for the page."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path
from typing import Any

from attn_core.preference import measured
from attn_core.preference_table import regrets, summary


def junit_outcome(path: Path) -> dict[str, Any]:
    """Counts by file, what failed, and what was skipped with its reasons, from pytest's JUnit XML."""
    files: dict[str, Counter[str]] = {}
    failed: list[str] = []
    skipped: Counter[str] = Counter()
    suites = list(ElementTree.parse(path).getroot().iter("testsuite"))
    for case in (case for suite in suites for case in suite.iter("testcase")):
        classname = case.get("classname", "")
        file = next((part for part in classname.split(".") if part.startswith("test_")), classname)
        outcome = "passed"
        for child in case:
            if child.tag in ("failure", "error"):
                outcome = "failed"
                failed.append(f"{classname}.{case.get('name')}")
            elif child.tag == "skipped":
                outcome = "skipped"
                skipped[child.get("message") or "no reason given"] += 1
        files.setdefault(file, Counter())[outcome] += 1
    return {
        "source": path.name,
        "date": suites[0].get("timestamp", "")[:10] if suites else "",
        "files": {name: dict(counts) for name, counts in sorted(files.items())},
        "failed": failed,
        "skipped": dict(skipped.most_common()),
    }


def memcheck_outcome(path: Path) -> dict[str, Any]:
    """The errors that compute-sanitizer counted, None where its log has no summary; and what the program said.

    ``api_calls``: how many of the errors are calls of the CUDA API that returned one, by the call's name. A library
    that asks the driver for a function it may not have is such a one; the others are errors in a kernel or its memory.
    """
    text = path.read_text(encoding="utf-8", errors="replace")
    summaries = [int(count) for count in re.findall(r"ERROR SUMMARY: (\d+) error", text)]
    calls = Counter(re.findall(r"Program hit \S+ \(error \d+\) due to .* on CUDA API call to (\w+)", text))
    said = re.findall(r"^memcheck cases: .*$", text, re.MULTILINE)
    refused = re.findall(r"^not run: (.*)$", text, re.MULTILINE)
    errors = sum(summaries) if summaries else None
    return {"source": path.name, "errors": errors, "api_calls": dict(calls), "said": said, "not_run": refused}


def sweep_outcome(path: Path) -> dict[str, Any]:
    """What the page shows of a raw file of ``attn bench``: when it was measured, and the regret of automatic choice.

    ``regret`` and ``unseen`` are what ``preference_table.summary`` gives; for ``unseen`` each call's own measurement is
    left out of the table that chooses.
    """
    raw = json.loads(path.read_text(encoding="utf-8"))
    cases = measured(raw["device"])
    found = {
        name: summary(regrets(raw, cases, leave_out=name == "unseen")) if cases else {} for name in ("regret", "unseen")
    }
    return {"source": path.name, "date": raw["date"], **found}
