"""Tables of ``benchmarks.context_rows``: efficiency, prediction and memory of rows, and the time of every other way."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks.context_row_shapes import Row

PAGE = Path(__file__).resolve().parent.parent / "docs" / "explanation" / "context_parallel.md"
RESULT = PAGE.parents[2] / "benchmarks" / "results" / "context-rows-h200.json"
BEGIN = "<!-- rows over ranks: written by python -m benchmarks.context_rows --write -->"
END = "<!-- end of rows over ranks -->"
ONE, CHOSEN, CAPTURED = "one rank", "chosen", "captured"
VARIANTS = {
    CAPTURED: "is the chosen call, replayed from a CUDA graph that one call was captured in.",
}
"""Other runs of the chosen way, each with a column of its own."""
DIRECTIONS = ("forward", "training")
NEAR = 0.03
"""How much slower than the best way the chosen one may be."""
SLOWER = 1.05
"""JAX's time divided by torch's: the goal."""
MIB = 2.0**20


def section(result: dict[str, Any]) -> str:
    """Returns all tables of a run."""
    where, rows = result["environment"], result["rows"]
    versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items() if version)
    ranks = result["ranks"]
    entries = [entry for row in rows for entry in row["torch"].values()]
    variants = [name for name in VARIANTS if any(name in entry["seconds"] for entry in entries)]
    described = "".join(f' "{name}" {VARIANTS[name]}' for name in variants)
    of_jax = "one process for all ranks" if result.get("jax in one process") else "a process for each rank"
    head = (
        f"{ranks} ranks on {result['device']}, {result['dtype']}, {where['date']}, Python {where['python']}; "
        f"{versions}. Drawn rows: seed {result['seed']}. E = T1 / ({ranks} T{ranks}): the time of one rank for the "
        "whole row, divided by the ranks' time and number. Medians over rounds in which the candidates took turns; the "
        'slowest rank counts. "chosen" is the way with the shortest estimate of the cost model, over all strategies '
        f"and layouts.{described} JAX runs the chosen way in {of_jax}."
    )
    return "\n\n".join([head, _efficiency(rows, ranks, variants), "Every way that ran, in ms:", _ways(rows)])


def stored() -> str:
    """Returns the tables of the stored run."""
    return section(json.loads(RESULT.read_text(encoding="utf-8")))


def median(entry: dict[str, Any], name: str) -> float | None:
    """Returns the median seconds of a candidate in one direction; None if it did not run."""
    seconds = entry["seconds"].get(name)
    return statistics.median(seconds) if seconds else None


def efficiency(entry: dict[str, Any], ranks: int, candidate: str = CHOSEN) -> float | None:
    """Returns E of the chosen way, or of another run of it: the median over rounds."""
    alone, shared = (entry["seconds"].get(name) for name in (ONE, candidate))
    if not alone or not shared:
        return None
    return statistics.median(one / (ranks * several) for one, several in zip(alone, shared, strict=True))


def regret(entry: dict[str, Any]) -> float | None:
    """Returns by how much the chosen way is slower than the best one, 0.02 for 2 %; None if no other way ran."""
    others = entry.get("others", {})
    times = {name: statistics.median(each) for name, each in others.items() if each}
    if CHOSEN not in times or len(times) < 2:
        return None
    return max(0.0, times[CHOSEN] / min(times.values()) - 1)


def _efficiency(rows: list[dict[str, Any]], ranks: int, variants: list[str]) -> str:
    names = ["row", "direction", "E", "goal", *(f"E, {name}" for name in variants)]
    names += ["chosen", "measured", "estimate", "off"]
    names += ["above the best way", "JAX", "JAX / torch", "memory of a rank", "of one rank alone"]
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for row in rows:
        for at, direction in enumerate(DIRECTIONS):
            entry = row["torch"].get(direction)
            if entry is None:
                lines.append(
                    f"| {row['name']}: {row['words']} | {direction} | {row['error']} |" + " |" * (len(names) - 3)
                )
                continue
            lines.append(f"| {' | '.join(_cells(row, entry, direction, at, ranks, variants))} |")
    return "\n".join(lines)


def _cells(
    row: dict[str, Any], entry: dict[str, Any], direction: str, at: int, ranks: int, variants: list[str]
) -> list[str]:
    e, measured, goal = efficiency(entry, ranks), median(entry, CHOSEN), row["goals"][at] if row["goals"] else None
    estimate, above = entry["estimates"].get(entry["chosen"]), regret(entry)
    jax = statistics.median(each) if (each := row.get("jax", {}).get(direction, {}).get("seconds")) else None
    off = None if estimate is None or not measured else estimate / measured - 1
    ratio = None if jax is None or not measured else jax / measured
    memory = entry["memory"]
    return [
        f"{row['name']}: {row['words']}",
        direction,
        "" if e is None else f"{e:.2f}{' (missed)' if goal is not None and e < goal else ''}",
        "" if goal is None else f"≥ {goal:.2f}",
        *("" if (other := efficiency(entry, ranks, name)) is None else f"{other:.2f}" for name in variants),
        entry["chosen"],
        _ms(measured),
        _ms(estimate),
        "" if off is None else f"{off:+.0%}",
        "" if above is None else f"{above:.1%}{' (missed)' if above > NEAR else ''}",
        _ms(jax) or row.get("jax", {}).get(direction, {}).get("error", ""),
        "" if ratio is None else f"{ratio:.2f}{' (missed)' if ratio > SLOWER else ''}",
        *("" if memory.get(name) is None else f"{memory[name] / MIB:.0f} MiB" for name in (CHOSEN, ONE)),
    ]


def _ways(rows: list[dict[str, Any]]) -> str:
    entries = [entry for row in rows for entry in row["torch"].values()]
    names = list(dict.fromkeys(_column(name) for entry in entries for name in (*entry["estimates"], *entry["refused"])))
    lines = [f"| row | direction | {' | '.join(names)} |", "|---|---|" + "---|" * len(names)]
    refused: dict[str, set[str]] = {}
    for row in rows:
        for direction, entry in row["torch"].items():
            cells = dict.fromkeys(names, "")
            for name in (*entry["estimates"], *entry["refused"]):
                times = entry["others"].get(CHOSEN if name == entry["chosen"] else name)
                why = entry["refused"].get(name)
                if why:
                    refused.setdefault(f"{_column(name)}: {why}", set()).add(row["name"])
                cell = _ms(statistics.median(times)) if times else "refused" if why else "not measured"
                cells[_column(name)] = cell
            lines.append(f"| {row['name']} | {direction} | {' | '.join(cells.values())} |")
    reasons = [f"- {why} ({', '.join(sorted(names))})" for why, names in sorted(refused.items())]
    return "\n".join(lines) + ("\n\nRefused:\n\n" + "\n".join(reasons) if reasons else "")


def _column(name: str) -> str:
    """Returns the column of a way: "ring, window" for "ring, window:4096", because a row's window is in its words."""
    return name.partition(":")[0]


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.3g} ms"


def write(text: str, page: Path = PAGE) -> None:
    """Puts the tables between the markers of a page.

    Raises:
        ValueError: if the page has no markers.
    """
    whole = page.read_text(encoding="utf-8")
    if whole.count(BEGIN) != 1 or whole.count(END) != 1:
        raise ValueError(f"{page}: expected the markers {BEGIN} and {END}, each once")
    before, rest = whole.split(BEGIN)
    page.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.split(END)[1]}", encoding="utf-8")


def described(row: Row) -> dict[str, Any]:
    """Returns a row as plain data."""
    return {**row._asdict(), "words": row.words}
