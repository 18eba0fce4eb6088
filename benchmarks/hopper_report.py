"""Renders benchmarks/results/hopper.md: figures, tests, memcheck and sweep, and everything that was not run.

This file measures nothing and fills in nothing: the page lists as "not run" everything that the files do not contain.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from attn_core.selection.regret import GOALS
from benchmarks.hopper_evidence import junit_outcome, memcheck_outcome, sweep_outcome

MEASURES = {
    "attention": "attention() compared with the kernels that it calls",
    "jax": "JAX compared with torch, jax.nn and tokamax",
    "softcap": "Softcap: speed",
    "softcap_error": "Softcap: error",
    "compiled": "The compiled lane",
    "callback": "The callback lane",
    "training": "Training steps in JAX",
    "jax_backends": "JAX: the backends by the size of a call",
    "paged": "Keys and values in pages",
    "dropins": "Drop-ins",
    "memory": "Peak memory",
    "small": "Small calls",
}
"""The measurements in the order of the page, with their headings."""

NEVER_RUN = (
    "Any GPU but the one named above.",
    "AMD GPUs. The rules about their builds are tested on a CPU only.",
)
SHOWN_REASONS = 40
"""The number of reasons for skipped tests that the page shows, the most frequent first."""

REGRET_GOALS = GOALS["cuda"]


def combined(figures: list[Path], junit: list[Path], memcheck: Path | None, sweep: Path | None) -> dict[str, Any]:
    """Combines the figures with the outcomes of the tests, compute-sanitizer and the sweep, as plain data.

    A later file of figures replaces the measures that an earlier file has, too. The first file may be an earlier result
    of this function, benchmarks/results/hopper.json: the parts that no other file replaces stay unchanged.

    Raises:
        ValueError: if the files were measured with different versions. A later run may lack a package.
    """
    result, *later = (json.loads(path.read_text(encoding="utf-8")) for path in figures)
    result.setdefault("later", [])
    for more in later:
        versions, others = result["environment"]["versions"], more["environment"]["versions"]
        # The first run may be older than the list of packages.
        if any(others.get(name) not in (None, version) for name, version in versions.items()):
            raise ValueError(f"{[str(path) for path in figures]}: measured with different versions")
        result["measures"] |= more["measures"]
        result["later"].append({"date": more["environment"]["date"], "measures": list(more["measures"])})
    stored = {
        "tests": junit_outcome(junit) if junit else None,
        "memcheck": None if memcheck is None else memcheck_outcome(memcheck),
        "sweep": None if sweep is None else sweep_outcome(sweep),
    }
    return result | {name: made if made is not None else result.get(name) for name, made in stored.items()}


def page(result: dict[str, Any]) -> str:
    """benchmarks/results/hopper.md."""
    parts = [_head(result), _verdict(result), *_measures(result), _sweep(result), _tests(result), _memcheck(result)]
    return "\n\n".join([*parts, _not_run(result)]) + "\n"


def _head(result: dict[str, Any]) -> str:
    where = result["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items() if version)
    return f"""# On a Hopper GPU

Written by `python -m benchmarks.hopper --render` from `benchmarks/results/hopper.json`, measured on {where["date"]}:
{where.get("device", "unknown device")}, {where["processor"]}, Python {where["python"]}, {versions}.

{_later(result)}The candidates of a table took turns in one process. Each turn begins with one call that is not timed.
CUDA events time torch; the host's clock times JAX until its last result is ready. Ratios and differences are medians
over the rounds. Absolute times belong to this machine. TFLOP/s count half of the scores of a causal call, and 3.5 times
the forward's operations for forward + backward."""


def _later(result: dict[str, Any]) -> str:
    """Names the measures that come from another run, on a machine of the same kind."""
    texts, replaced = [], set()
    for run in reversed(result.get("later") or ()):
        names = [heading for name, heading in MEASURES.items() if name in run["measures"] and name not in replaced]
        replaced |= set(run["measures"])
        if names:
            texts.append(f"{', '.join(names)}: from a later run, {run['date']}, on a host of the same kind.\n\n")
    return "".join(reversed(texts))


def figures_of(result: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields every figure with the title of its group, in the order of the page."""
    for measure in MEASURES:
        for group in result["measures"].get(measure, {}).get("groups", ()):
            for figure in group["figures"]:
                yield group["title"], figure


def _verdict(result: dict[str, Any]) -> str:
    goals = [(title, figure) for title, figure in figures_of(result) if figure["goal"]]
    missed = [(title, figure) for title, figure in goals if figure["held"] is False]
    open_goals = sum(figure["held"] is None for _, figure in goals)
    met = len(goals) - len(missed) - open_goals
    lines = ["## Goals", "", f"Met: {met}. Missed: {len(missed)}. Not run: {open_goals}."]
    if missed:
        lines += ["", "Missed:", ""]
        lines += [f"- {title}, {figure['name']}: {_shown(figure)}, goal {figure['goal']}" for title, figure in missed]
    return "\n".join(lines)


def _measures(result: dict[str, Any]) -> Iterator[str]:
    for measure, heading in MEASURES.items():
        stored = result["measures"].get(measure)
        yield f"## {heading}" + ("\n\nNot run." if stored is None else "")
        if stored is not None and not stored["groups"]:
            yield str(stored["error"])
        for group in (stored or {}).get("groups", ()):
            yield _group(group)


def _group(group: dict[str, Any]) -> str:
    lines = [f"### {group['title']}", ""]
    if group["note"]:
        lines += [f"{group['note']}.", ""]
    if group["median_seconds"]:
        speeds = group["tflops"]
        lines += [
            "| candidate | median µs |" + (" TFLOP/s |" if speeds else ""),
            "|---|---|" + ("---|" if speeds else ""),
        ]
        for name, seconds in group["median_seconds"].items():
            speed = f" {speeds[name]:,.0f} |" if speeds else ""
            lines.append(f"| {name} | {seconds * 1e6:,.1f} |{speed}")
        lines.append("")
    shown = [figure for figure in group["figures"] if figure["not_run"] is None or figure["held"] is False]
    if shown:
        lines += ["| figure | measured | goal | |", "|---|---|---|---|"]
        lines += [_row(figure) for figure in shown]
    return "\n".join(lines).rstrip()


def _row(figure: dict[str, Any]) -> str:
    verdict = {True: "met", False: "missed", None: ""}[figure["held"]]
    detail = f" ({figure['detail']})" if figure["detail"] else ""
    return f"| {figure['name']} | {_cell(_shown(figure) + detail)} | {figure['goal'] or ''} | {verdict} |"


def _shown(figure: dict[str, Any]) -> str:
    if figure["value"] is None:
        return str(figure["not_run"])
    digits = 0 if abs(figure["value"]) >= 100 else 3 if abs(figure["value"]) < 10 else 1
    return f"{figure['value']:,.{digits}f} {figure['unit']}".rstrip()


def _cell(text: str) -> str:
    return _plain(text).replace("|", "\\|")


def _plain(text: str) -> str:
    """Puts a text of any origin on one line, and breaks up everything that Markdown would read as a link."""
    return " ".join(text.replace("](", "] (").split())


def _sweep(result: dict[str, Any]) -> str:
    heading, sweep = "## Automatic choice", result.get("sweep")
    if sweep is None:
        return f"{heading}\n\nNot run."
    if not sweep["unseen"]:
        return f"{heading}\n\n`{sweep['source']}` names no regret."
    lines = [
        heading,
        "",
        "Regret is the time of the automatic choice divided by the time of the fastest backend,",
        f"over the calls of {sweep['date']}, `{sweep['source']}`.",
        "The models that choose for a call were fitted to other calls only.",
        "",
    ]
    lines += ["| | calls |" + "".join(f" {name} | goal | |" for name in REGRET_GOALS) + " the worst call |"]
    lines += ["|---" * (3 + 3 * len(REGRET_GOALS)) + "|"]
    for direction, regret in sweep["unseen"].items():
        cells = [direction, str(regret["cases"])]
        for name, goal in REGRET_GOALS.items():
            cells += [f"{regret[name]:.3f}", f"<= {goal:g}", "met" if regret[name] <= goal else "missed"]
        lines.append("| " + " | ".join([*cells, _cell(regret["worst case"])]) + " |")
    return "\n".join(lines)


def _tests(result: dict[str, Any]) -> str:
    stored, lines = result.get("tests"), ["## Tests", ""]
    if not stored:
        return "\n".join([*lines, "Not run."])
    kinds = ("passed", "failed", "xfailed", "skipped")
    total: Counter[str] = Counter()
    for counts in stored["files"].values():
        total.update(counts)
    lines.append(f"{', '.join(f'{total[kind]:,} {kind}' for kind in kinds)}. If a test ran twice, the last run counts.")
    lines.append("")
    for source in stored["sources"]:
        again = f", {source['again']:,} of them again" if source["again"] else ""
        lines.append(f"- `{source['source']}`, {source['date'] or 'no date'}: {source['tests']:,} tests{again}")
    lines += ["", f"| file | {' | '.join(kinds)} |", "|---|---|---|---|---|"]
    for name, counts in stored["files"].items():
        lines.append(f"| {name} | {' | '.join(str(counts.get(kind, 0)) for kind in kinds)} |")
    if stored["failed"]:
        lines += ["", "Failed:", "", *(f"- `{name}`" for name in stored["failed"])]
    if stored["xfailed"]:
        known = (f"- {count} tests: {why}" for why, count in stored["xfailed"].items())
        lines += ["", "Expected to fail, because docs/reference/semantics.md states the limitation:", "", *known]
    return "\n".join(lines)


def _memcheck(result: dict[str, Any]) -> str:
    heading, stored = "## compute-sanitizer memcheck", result.get("memcheck")
    if stored is None:
        return f"{heading}\n\nNot run."
    said = "; ".join(line.removeprefix("memcheck cases: ") for line in stored["said"]) or "the program printed nothing"
    if stored["errors"] is None:
        return f"{heading}\n\n`{stored['source']}` has no summary of compute-sanitizer: not shown to have run. ({said})"
    calls = stored["api_calls"]
    inside = stored["errors"] - sum(calls.values())
    api = ", ".join(f"{count} × `{name}`" for name, count in calls.items())
    more = f" Calls of the CUDA API that returned an error, from any library: {api}." if calls else ""
    run = f"`python tests/gpu/memcheck_cases.py` under it, `{stored['source']}`"
    return f"{heading}\n\n{run}: {inside} errors in kernels; {said}.{more}"


def _not_run(result: dict[str, Any]) -> str:  # noqa: C901
    items: dict[str, list[str]] = {}

    def add(what: str, where: str) -> None:
        items.setdefault(_plain(what), []).append(where)

    for measure, heading in MEASURES.items():
        stored = result["measures"].get(measure)
        if stored is None or stored.get("error"):
            add(heading if stored is None else f"{heading}: {stored['error']}", "")
        for group in (stored or {}).get("groups", ()):
            for name, why in group["not_run"].items():
                add(f"{name}: {why.removeprefix('not run: ')}", group["title"])
            for figure in group["figures"]:
                if figure["goal"] and figure["held"] is None and figure["not_run"]:
                    add(f"{figure['name']}: {figure['not_run'].removeprefix('not run: ')}", group["title"])
    for name in ("sweep", "tests", "memcheck"):
        if not result.get(name):
            add({"sweep": "The sweep", "tests": "The tests", "memcheck": "compute-sanitizer"}[name], "")
    reasons = list((result.get("tests") or {"skipped": {}})["skipped"].items())
    for why, count in reasons[:SHOWN_REASONS]:
        add(f"{count} tests: {why}", "")
    if rest := reasons[SHOWN_REASONS:]:
        count = sum(number for _, number in rest)
        add(f"{count} tests for {len(rest)} other reasons, all in benchmarks/results/hopper.json", "")
    for why in (result.get("memcheck") or {}).get("not_run", ()):
        add(f"memcheck: {why}", "")
    lines = [f"- {what}{_places(where)}" for what, where in items.items()]
    return "\n".join(["## Not run", "", *lines, *(f"- {text}" for text in NEVER_RUN)])


def _places(where: list[str]) -> str:
    named = list(dict.fromkeys(filter(None, where)))
    return f" (in {len(named)} tables)" if len(named) > 2 else f" ({'; '.join(named)})" if named else ""
