"""Renders benchmarks/results/context_parallel.md from the times of context_torch and context_jax.

torchrun --nproc-per-node 2 -m benchmarks.context_torch --json torch.json      # on the GPUs
python -m benchmarks.context_jax --json jax.json
torchrun --nproc-per-node 2 -m benchmarks.context_jax --json jaxes.json
python -m benchmarks.context_parallel torch.json jax.json jaxes.json           # prints the page; needs no GPU
... --write                                                                    # both files in benchmarks/results

If several files of one framework hold the same measure, the later file wins; rows for a size of shards replace the rows
of that size only. benchmarks/results/context-parallel.json, as written before, may be one of the files.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "benchmarks" / "results" / "context_parallel.md"
RESULTS = ROOT / "benchmarks" / "results" / "context-parallel.json"
GOALS = {
    (8192, 2): (0.85, 0.90, ("all_gather", "ulysses")),
    (16384, 2): (0.92, 0.94, ("all_gather", "ulysses")),
    (32768, 2): (0.90, 0.92, ("ring",)),
    (8192, 4): (0.86, 0.90, ("all_gather", "ulysses")),
    (16384, 4): (0.92, 0.94, ("all_gather", "ulysses")),
    (32768, 4): (0.88, 0.92, ("ring",)),
}
"""By tokens per rank and number of ranks: goals for the efficiency of forward and forward + backward, and the
strategies of which the best one counts."""
MEASURES = ("speed", "errors", "peers", "long")
ONE = "one GPU"
JAX = {"jax, a process a GPU": "JAX, one process per GPU", "jax": "JAX, one process"}
"""The page's names for JAX's processes: as many as torch has ranks, or one with all GPUs."""
SLOWER = 1.05
"""JAX's time divided by torch's: the goal."""

Measures = dict[str, dict[str, list[dict[str, Any]]]]
"""``{framework: {measure: rows}}``; each row has the environment of its measurement."""
Results = dict[str, Measures]
"""``Measures`` by the number of ranks."""


def main(arguments: list[str] | None = None) -> None:
    """Prints the page, or writes the page and the combined times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args(arguments)
    read = (json.loads(path.read_text(encoding="utf-8")) for path in options.files)
    results = combined([part for file in read for part in ([file] if "framework" in file else apart(file))])
    text = page(results)
    if not options.write:
        print(text)
        return
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(text, encoding="utf-8")


def combined(files: list[dict[str, Any]]) -> Results:
    """Combines files as ``{ranks: {framework: measures}}``; each row gets the environment of its file."""
    results: Results = {}
    for file in sorted(files, key=lambda file: file["world"]):
        of = results.setdefault(str(file["world"]), {}).setdefault(file["framework"], {})
        for name in MEASURES:
            if file.get(name):
                rows = [{"environment": file.get("environment"), **row} for row in file[name]]
                of[name] = _together(of.get(name, []), rows)
    return results


def _together(rows: list[dict[str, Any]], later: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the later rows, and the earlier rows for other sizes of shards. Rows without a size replace all rows."""
    again = {row.get("shard") for row in later}
    unchanged = [row for row in rows if "shard" in row and None not in again and row["shard"] not in again]
    return sorted([*unchanged, *later], key=lambda row: row.get("shard", 0))


def apart(results: Results) -> list[dict[str, Any]]:
    """Splits a combined result into one file for each measure."""
    return [
        {"framework": framework, "world": int(world), name: rows}
        for world, frameworks in results.items()
        for framework, measures in frameworks.items()
        for name, rows in measures.items()
    ]


def page(results: Results) -> str:
    """benchmarks/results/context_parallel.md."""
    lines = [
        "# Context parallelism on GPUs of one host",
        "",
        "Written by `python -m benchmarks.context_parallel` from `benchmarks/results/context-parallel.json`.",
        "",
        "One causal row of bfloat16, 32 query heads on 8 kv heads of 128 channels, over H200s of one host, NVLink "
        "multicast off. The efficiency E is the time of one GPU for the whole row, divided by the time of the ranks "
        "and by their number. Times are medians over rounds in which candidates took turns; the slowest rank counts. "
        '"waiting" is the time of a call minus the time of the same call if it sends nothing.',
        "",
    ]
    for world, measures in results.items():
        lines += _world(int(world), measures)
    return "\n".join(lines) + "\n"


def _world(world: int, results: Measures) -> list[str]:
    torch, lines = results.get("torch", {}), [f"## {world} GPUs", ""]
    lines += [f"Measured {_made(results)}.", ""]
    speed = torch.get("speed", [])
    lines += _goals(speed, world, results)
    for row in speed:
        lines += _speed(row, world, results)
    if torch.get("peers"):
        lines += _peers(torch["peers"], speed)
    for name, called in (("torch", "torch"), ("jax", "JAX")):
        if rows := results.get(name, {}).get("errors"):
            lines += _errors(rows, called)
    if torch.get("long"):
        lines += _long(torch["long"])
    return lines


def _made(results: Measures) -> str:
    """Returns the dates and versions of the rows, with the frameworks that they apply to."""
    of: dict[str, set[str]] = {}
    for name, measures in results.items():
        for row in (row for rows in measures.values() for row in rows):
            where = row["environment"]
            of.setdefault(f"on {where['date']}, {_versions(where)}", set()).add(JAX.get(name, name))
    return "; ".join(f"{made} ({'; '.join(sorted(names))})" for made, names in sorted(of.items()))


def _versions(where: dict[str, Any]) -> str:
    apart = ("numpy", "transformers", "flax")
    return ", ".join(
        f"{name} {version}" for name, version in where["versions"].items() if version and name not in apart
    )


def _goals(rows: list[dict[str, Any]], world: int, results: Measures) -> list[str]:
    """Returns the table of goals: the fastest of the strategies that a goal names counts."""
    shown = "".join(f" {way} / torch, goal <= {SLOWER} |" for way in JAX.values())
    lines = [f"| tokens per rank | | fastest | E | goal | |{shown}", "|---|---|---|---|---|---|" + "---|" * len(JAX)]
    for row in (row for row in rows if "error" not in row):
        *least, strategies = GOALS.get((row["shard"], world), (None, None, ()))
        for word, goal in zip(row["seconds"], least, strict=False):
            seconds = row["seconds"][word]
            usable = [name for name in seconds if strategies and name.startswith(strategies) and not _silent(name)]
            if not usable or goal is None:
                continue
            best = max(usable, key=lambda name: _efficiency(seconds, name, world))
            reached = _efficiency(seconds, best, world)
            verdict = "met" if reached >= goal else "missed"
            torch_takes = min(statistics.median(seconds[name]) for name in usable)
            ratios = [_beside(_jax(row, word, results, way), strategies, torch_takes) for way in JAX]
            cells = row["shard"], word, best, f"{reached:.3f}", f">= {goal}", verdict, *ratios
            lines.append(f"| {' | '.join(map(str, cells))} |")
    measured = {row["shard"] for row in rows if "error" not in row}
    for shard in (shard for shard, ranks in GOALS if ranks == world and shard not in measured):
        lines.append(f"| {shard} | | not measured | | | |{' |' * len(JAX)}")
    return [*lines, ""]


def _beside(jax: dict[str, list[float]], strategies: tuple[str, ...], torch: float) -> str:
    """Returns the time of JAX's fastest strategy divided by torch's, and whether it meets the goal."""
    times = {name: statistics.median(each) for name, each in jax.items() if name.startswith(strategies)}
    if not times:
        return "not measured"
    name = min(times, key=lambda name: times[name])
    share = times[name] / torch
    return f"{share:.3f} ({name}), {'met' if share <= SLOWER else 'missed'}"


def _silent(name: str) -> bool:
    return name.endswith("nothing sent")


def _speed(row: dict[str, Any], world: int, results: Measures) -> list[str]:
    if "error" in row:
        return [f"Not run: {row['error']}", ""]
    words = list(row["seconds"])
    backend = row["notes"][words[0]].get(ONE, ""), row["notes"][words[-1]].get(ONE, "")
    lines = [f"### {row['shard']} tokens per rank, {world} GPUs", ""]
    lines += [f"One GPU: {backend[0]} forward, {backend[1]} with backward.", ""]
    ways = [name for name in JAX if _jax(row, words[0], results, name)]
    columns = " | ".join(["ms", "E", "waiting, ms", *(f"{JAX[name]}, ms" for name in ways)])
    lines += ["| | " + " | ".join(f"{word}, {columns}" for word in words) + " | beyond inputs, GB |"]
    lines += ["|---" * (2 + (3 + len(ways)) * len(words)) + "|"]
    for name in (name for name in row["seconds"][words[0]] if not _silent(name)):
        cells = [cell for word in words for cell in _cells(row, word, name, world, results, ways)]
        memory = row["memory"][words[-1]].get(name)
        lines.append(f"| {name} | {' | '.join(cells)} | {'' if memory is None else f'{memory / 1e9:.2f}'} |")
    return [*lines, ""]


def _cells(row: dict[str, Any], word: str, name: str, world: int, results: Measures, ways: list[str]) -> Iterator[str]:
    seconds = row["seconds"][word]
    if name not in seconds:
        yield from ("not run", "", "", *("" for _ in ways))
        return
    yield _ms(seconds[name])
    yield "" if name == ONE else f"{_efficiency(seconds, name, world):.3f}"
    silent = seconds.get(f"{name}, nothing sent")
    yield "" if silent is None else f"{1e3 * (statistics.median(seconds[name]) - statistics.median(silent)):.2f}"
    for way in ways:
        times = _jax(row, word, results, way).get(name)
        yield "" if times is None else _ms(times)


def _jax(row: dict[str, Any], word: str, results: Measures, way: str) -> dict[str, list[float]]:
    """Returns JAX's seconds for the same shape, by candidate."""
    rows = results.get(way, {}).get("speed", [])
    same = next((other for other in rows if other.get("shard") == row["shard"]), {})
    return same.get("seconds", {}).get(word, {})  # type: ignore[no-any-return]


def _ms(seconds: list[float]) -> str:
    return f"{1e3 * statistics.median(seconds):.2f}"


def _efficiency(seconds: dict[str, list[float]], name: str, world: int) -> float:
    pairs = zip(seconds[ONE], seconds[name], strict=True)
    return statistics.median(one / (world * several) for one, several in pairs)


def _peers(rows: list[dict[str, Any]], speed: list[dict[str, Any]]) -> list[str]:
    lines = [
        "### Compared with torch's own context_parallel",
        "",
        "torch's own runs cuDNN's attention, with k and v copied for every head. Ours is the fastest row above.",
        "",
        "| tokens per rank | | theirs, ms | ours, ms | theirs / ours |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        if "error" in row:
            lines.append(f"| not run: {row['error']} | | | | |")
            continue
        ours = next((other["seconds"] for other in speed if other.get("shard") == row["shard"]), {})
        for word, theirs in row["seconds"].items():
            mine = {name: each for name, each in ours.get(word, {}).items() if name != ONE and not _silent(name)}
            if mine and theirs:
                names = [min(of, key=lambda name: statistics.median(of[name])) for of in (theirs, mine)]
                its, own = statistics.median(theirs[names[0]]), statistics.median(mine[names[1]])
                shown = f"{1e3 * its:.2f} ({names[0].split(', ')[-1]}) | {1e3 * own:.2f} ({names[1]})"
                lines.append(f"| {row['shard']} | {word} | {shown} | {its / own:.2f} |")
    return [*lines, ""]


def _errors(rows: list[dict[str, Any]], framework: str) -> list[str]:
    heading = f"### Errors in {framework}"
    failed = [row["error"].splitlines()[0] for row in rows if "error" in row]
    if failed:
        return [heading, "", *(f"Not run: {why}" for why in failed), ""]
    lines = [
        heading,
        "",
        "Errors of several GPUs divided by those of one GPU with the same backend: mean, largest.",
        "",
    ]
    lines += ["| | backend | out | dq | dk | dv |", "|---|---|---|---|---|---|"]
    worst = {"mean": 0.0, "max": 0.0}
    for row in (case for part in rows for case in part.get("found", [])):
        cells = []
        for each in row["errors"].values():
            ratios = {what: each["several"][what] / each["one"][what] for what in worst}
            worst = {what: max(worst[what], ratio) for what, ratio in ratios.items()}
            cells.append(" ".join(f"{ratio:.2f}" for ratio in ratios.values()))
        lines.append(f"| {row['candidate']}, {row['case']} | {row['backend']} | {' | '.join(cells)} |")
    verdict = "met" if worst["mean"] <= 1.5 and worst["max"] <= 3 else "missed"
    return [*lines, "", f"Worst: {worst['mean']:.2f}, {worst['max']:.2f}; goal <= 1.5, 3: {verdict}.", ""]


def _long(rows: list[dict[str, Any]]) -> list[str]:
    lines = ["### Long rows", "", "A forward in a zigzag ring. One late query is compared with float64.", ""]
    lines += ["| tokens | seconds | GB per rank beyond inputs | largest error |", "|---|---|---|---|"]
    for row in rows:
        if "error" in row:
            lines.append(f"| not run: {row['error']} | | | |")
        else:
            memory, error = row["bytes beyond inputs"] / 1e9, row["largest error of a row"]
            lines.append(f"| {row['tokens']} | {row['seconds']:.2f} | {memory:.1f} | {error:.1e} |")
    return [*lines, ""]


if __name__ == "__main__":
    main()
