"""The tables about campaigns, the tests of GPUs, and faults, for ``benchmarks.report``.

``docs/explanation/reliability.md`` shows which programs have the bits of eager calls, and ``docs/lab`` the others.

A fault of a stored campaign that is understood says in "explained" what it was.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from attn_core import backends
from tests.campaign import coverage, same_bits
from tests.campaign.loop import COUNTED, add_counts

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks/results"
FAULTS = ROOT / "tests/faults/table.jsonl"


def campaigns() -> str:
    """Returns what campaigns ran and found: all of them, by kind of device, and programs beside eager calls."""
    files = sorted(RESULTS.glob("campaign-*.json"))
    runs = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        by_kind.setdefault(backends.kind_of(next(iter(run["devices"].values()))), []).append(run)
    kinds = [_kind(kind, runs) for kind, runs in by_kind.items()]
    return "\n".join([_overview(runs), *kinds, *_both_ways(runs)]).rstrip()


MOST_REASONS = 10
"""How many reasons of skipped tests the page shows for each suite, the most frequent first."""


def suites() -> str:
    """Returns the outcome of the tests of GPUs, which ``make test-gpu`` stored."""
    suites = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(RESULTS.glob("suite-*.json"))]
    about = "`make test-gpu` runs every test of one GPU, and `make test-two-gpus` those of two."
    if not suites:
        return f"{about} No whole run is stored yet."
    lines = [
        f"{about} The last whole runs:\n",
        "| devices | date | commit | versions | passed | failed | skipped | seconds | workers |",
        "|---" * 9 + "|",
    ]
    for suite in suites:
        versions = ", ".join(f"{name} {suite['versions'][name]}" for name in ("torch", "jax"))
        counts = " | ".join(str(suite["counts"][name]) for name in ("passed", "failed", "skipped"))
        lines.append(
            f"| {', '.join(suite['devices'])} | {suite['date']} | {suite['commit']} | {versions} | {counts} | "
            f"{suite['seconds']} | {suite['workers']} |"
        )
    for suite in suites:
        devices, reasons = ", ".join(suite["devices"]), list(suite["skipped"].items())
        lines += [f"\nFailed on {devices}: `{name}`" for name in suite["failed"]]
        lines += [f"\nWhy tests were skipped on {devices}:\n"]
        lines += [f"- {count}: {reason}" for reason, count in reasons[:MOST_REASONS]] or ["None was."]
        if rest := reasons[MOST_REASONS:]:
            lines.append(
                f"- {sum(count for _, count in rest)} for {len(rest)} other reasons, which the stored file has"
            )
    return "\n".join(lines)


def _both_ways(runs: list[dict[str, Any]]) -> list[str]:
    """Returns the section about programs and eager calls: what campaigns counted."""
    total: dict[str, Any] = {}
    for run in runs:
        kind = backends.kind_of(next(iter(run["devices"].values())))
        add_counts(total, {f"{key}, {kind}": row for key, row in run.get("both ways", {}).items()})
    return ["## Programs and eager calls\n", coverage.table_of_bits(total), ""] if total else []


def programs() -> str:
    """Returns the backends whose programs have the bits of eager calls. A difference is a fault."""
    lines = ["| device | framework | calls without gradients | calls with gradients |\n|---|---|---|---|"]
    for kind, by_framework in same_bits.HOLDS.items():
        for framework, equal in by_framework.items():
            names = " | ".join(", ".join(f"`{name}`" for name in sorted(part)) or "not measured" for part in equal)
            lines.append(f"| {kind} | {framework} | {names} |")
    return "\n".join(lines)


def _overview(runs: list[dict[str, Any]]) -> str:
    lines = ["| device | date | versions | seed | calls | seconds | faults | unexplained | largest error / bound |"]
    lines.append("|---" * 9 + "|")
    for run in runs:
        versions = ", ".join(f"{name} {run['versions'][name]}" for name in run["devices"])
        lines.append(
            f"| {run['device_name']} | {run['date']} | {versions} | {run['seed']} | {run['calls']} | "
            f"{run['seconds']:.0f} | {len(run['faults'])} | "
            f"{sum(fault.get('explained') is None for fault in run['faults'])} | {run['worst']['use']:.2f} |"
        )
    return "\n".join([*lines, ""])


def _kind(kind: str, runs: list[dict[str, Any]]) -> str:
    total: dict[str, Any] = {name: {} for name in COUNTED}
    for run in runs:
        for name in COUNTED:
            add_counts(total[name], run.get(name, {}))
    by_backend, by_entry = total["backends"], total["by entry"]
    calls = sum(run["calls"] for run in runs)
    parts = [
        f"## {'On a CPU' if kind == 'cpu' else 'On a GPU'}: {calls} calls\n",
        "Calls by backend, and how many of them had each feature:\n",
        coverage.table(by_backend, "backend"),
        "\nCalls by entry point:\n",
        coverage.table(by_entry, "entry"),
        "\nCalls that were written in another way:\n",
        "| relation | calls |\n|---|---|",
        *(f"| {name} | {count} |" for name, count in sorted(total["by relation"].items())),
        "\nFeatures that a backend claims and no call had:\n",
        *([f"- {hole}" for hole in coverage.holes_of_backends(by_backend, kind)] or ["None."]),
        "",
    ]
    parts += _faults([fault for run in runs for fault in run["faults"]])
    return "\n".join(parts)


def _faults(faults: list[dict[str, Any]]) -> list[str]:
    counts: dict[str | None, list[dict[str, Any]]] = {}
    for fault in faults:
        counts.setdefault(fault.get("explained"), []).append(fault)
    lines = []
    for meaning, same in counts.items():
        if meaning is not None:
            lines.append(f"- {len(same)} faults: {meaning}")
    unknown = counts.get(None, [])
    if unknown:
        lines.append(f"- {len(unknown)} faults are not explained. The first:")
        lines.append(f"\n```text\n{unknown[0]['fault']}\n{unknown[0]['case']}\n```")
    return ["\nFaults:\n", *(lines or ["None."]), ""]


def faults() -> str:
    """Returns what a caller sees if something goes wrong: a table for each group, in the order of the file."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for line in FAULTS.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        groups.setdefault(row["group"], []).append(row)
    lines = []
    for group, rows in groups.items():
        lines += [f"### {group.capitalize()}\n", "| fault | what happens | tests |", "|---|---|---|"]
        for row in rows:
            fault, behaviour = (row[name].replace("|", "\\|") for name in ("fault", "behaviour"))
            lines.append(f"| {fault} | {behaviour} | {'<br>'.join(f'`{test}`' for test in row['tests'])} |")
        lines.append("")
    return "\n".join(lines).rstrip()


TABLES: dict[str, Callable[[], str]] = {
    "suites": suites,
    "campaigns": campaigns,
    "programs": programs,
    "faults": faults,
}
