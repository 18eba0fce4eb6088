"""Writes docs/explanation/reliability.md from the files of ``attn campaign --json`` in benchmarks/results.

python -m benchmarks.reliability            # the page, printed
python -m benchmarks.reliability --write    # writes the page; needs no framework
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from attn_core import backends
from attn_core.cli.campaign import coverage, same_bits
from attn_core.cli.campaign.processes import COUNTED, add_counts
from benchmarks import fault_report, hostile, sanitizer, soak_report

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results"
PAGE = ROOT / "docs/explanation/reliability.md"

HEAD = """# Reliability

How this project looks for wrong numbers, and what it has found. `python -m benchmarks.reliability --write` writes this
page from the files in `benchmarks/results`.

A campaign draws whole calls from a seed: sizes, dtypes, options, packed documents, gradients, a backend or automatic
choice, and the entry point that runs the call. Each result is compared with the float64 reference, with a bound for
each element ([Numerics](numerics.md)). One call in four is first written in another way that must not change the
result. Dropout is drawn on a CPU alone, because kernels on a GPU drop weights of their own choice.

One call in some dozens runs twice, on one backend: as a program (`torch.compile` without Inductor, `torch.export`,
`jax.jit`, `jax.export`) and eagerly. [Programs and eager calls](#programs-and-eager-calls) says whose bits must be
equal.

A call outside its bound, an exception from an accepted call, and a process that dies are faults. Such a call becomes a
line of `tests/correctness/reproducers.jsonl`, which tests run. `make campaign` runs a campaign on your machine. Every
change of this project runs a short one, with a seed from its commit ([Command
line](../reference/cli.md#search-for-wrong-numbers)).
"""


EXPLAINED = (
    (
        "appears to not have been used in the graph",
        "torch's own function, and so ours by its name, gives the bias of an empty call no gradient. The campaign no "
        "longer asks for it.",
    ),
    (
        "Cannot serialize code with custom calls",
        "`export_checks()` lacked the kernels that are compiled while the function is traced. Mended.",
    ),
    ("integer modulo by zero", "`equinox.attend` could not reshape a mask without rows. Mended."),
)
"""Words of faults, and what they were."""


def explanation(fault: dict[str, Any]) -> str | None:
    """Returns what a fault was, or None if nobody knows."""
    for words, meaning in EXPLAINED:
        if words in fault["fault"]:
            return meaning
    case = json.loads(fault["case"])
    spec = case["spec"]
    if (
        case.get("backend") == "flex"
        and spec.get("sinks")
        and spec["dtype"] == "float32"
        and fault["fault"][:2] == "dv"
    ):
        return "FlexAttention on a GPU: the weight beside a sink that has nearly all of it had few digits. Mended."
    if case["entry"] == "torch context_parallel_attention" and fault["fault"].startswith("out: 1.02 "):
        return "A merge of two parts rounds once more, for which the bound had no room. It has a quarter of it now."
    return None


def main(arguments: list[str] | None = None) -> None:
    """Prints the page or writes it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    text = page()
    if parser.parse_args(arguments).write:
        PAGE.write_text(text, encoding="utf-8")
    else:
        print(text)


def page() -> str:
    """Returns the page as Markdown."""
    files = sorted(RESULTS.glob("campaign-*.json"))
    runs = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        by_kind.setdefault(backends.kind_of(next(iter(run["devices"].values()))), []).append(run)
    kinds = [_kind(kind, runs) for kind, runs in by_kind.items()]
    parts = [HEAD, _suites(), "## Campaigns\n", _overview(runs), *kinds, _both_ways(runs), soak_report.section()]
    parts += [sanitizer.section(), hostile.section(), fault_report.section()]
    return "\n".join(parts)


def _suites() -> str:
    """Returns the section about the tests of GPUs, from what ``make test-gpu`` stored."""
    suites = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(RESULTS.glob("suite-*.json"))]
    about = "`make test-gpu` runs every test of one GPU, and `make test-two-gpus` those of two."
    if not suites:
        return f"## The tests on GPUs\n\n{about} No whole run is stored yet.\n"
    lines = [
        "## The tests on GPUs\n",
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
        devices = ", ".join(suite["devices"])
        lines += [f"\nFailed on {devices}: `{name}`" for name in suite["failed"]]
        lines += [f"\nWhy tests were skipped on {devices}:\n"]
        lines += [f"- {count}: {reason}" for reason, count in suite["skipped"].items()] or ["None was."]
    return "\n".join([*lines, ""])


def _both_ways(runs: list[dict[str, Any]]) -> str:
    """Returns the section about programs and eager calls: the claims of the code, and what campaigns counted."""
    lines = [
        "## Programs and eager calls\n",
        "Results and gradients of a program and of the eager call have the same bits. A difference is a fault:\n",
        "| device | framework | calls without gradients | calls with gradients |\n|---|---|---|---|",
    ]
    for kind, by_framework in same_bits.HOLDS.items():
        for framework, equal in by_framework.items():
            names = " | ".join(", ".join(f"`{name}`" for name in sorted(part)) or "not measured" for part in equal)
            lines.append(f"| {kind} | {framework} | {names} |")
    lines.append(
        "\n`jax_xla` may have other last bits under `jax.jit` than eagerly: XLA chooses its code by processor and by "
        "program, and\nunder `jax.jit` one program has the forward and the backward. On an AMD EPYC without AVX-512 "
        "only calls with gradients\ndiffered. Calls that the table does not have stay within the bounds both ways, and "
        "the campaign counts equal bits.\n"
    )
    total: dict[str, Any] = {}
    for run in runs:
        kind = backends.kind_of(next(iter(run["devices"].values())))
        add_counts(total, {f"{key}, {kind}": row for key, row in run.get("both ways", {}).items()})
    return "\n".join([*lines, *([coverage.table_of_bits(total), ""] if total else [])])


def _overview(runs: list[dict[str, Any]]) -> str:
    lines = ["| device | date | versions | seed | calls | seconds | faults | unexplained | largest error / bound |"]
    lines.append("|---" * 9 + "|")
    for run in runs:
        versions = ", ".join(f"{name} {run['versions'][name]}" for name in run["devices"])
        lines.append(
            f"| {run['device_name']} | {run['date']} | {versions} | {run['seed']} | {run['calls']} | "
            f"{run['seconds']:.0f} | {len(run['faults'])} | "
            f"{sum(explanation(fault) is None for fault in run['faults'])} | {run['worst']['use']:.2f} |"
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
        *([f"- {hole}" for hole in coverage.holes(by_backend, kind)] or ["None."]),
        "",
    ]
    parts += _faults([fault for run in runs for fault in run["faults"]])
    return "\n".join(parts)


def _faults(faults: list[dict[str, Any]]) -> list[str]:
    counts: dict[str | None, list[dict[str, Any]]] = {}
    for fault in faults:
        counts.setdefault(explanation(fault), []).append(fault)
    lines = []
    for meaning, same in counts.items():
        if meaning is not None:
            lines.append(f"- {len(same)} faults: {meaning}")
    unknown = counts.get(None, [])
    if unknown:
        lines.append(f"- {len(unknown)} faults are not explained. The first:")
        lines.append(f"\n```text\n{unknown[0]['fault']}\n{unknown[0]['case']}\n```")
    return ["\nFaults:\n", *(lines or ["None."]), ""]


if __name__ == "__main__":
    main()
