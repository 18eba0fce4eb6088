"""Shows a sweep as tables and plots: the fastest backend, the automatic choice, and the regret of the choice.

python -m benchmarks.sweep_report times.json                 # the tables, printed
python -m benchmarks.sweep_report times.json --write times   # writes the tables and the plots to a folder
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attn_core.cli.bench import regret_table
from attn_core.cli.bench_sweep import read
from attn_core.errors import SpecError
from attn_core.selection import preference
from attn_core.selection.preference import Case
from attn_core.selection.regret import GOALS, Regret, record_spec, regrets, right_times

DIRECTIONS = ("forward", "training")
CAPTIONS = {
    "causal.png": "TFLOP/s of causal calls by row length, a line for each backend",
    "regret.png": "The number of cases by regret",
}
"""The captions of the plots, by the end of their file names."""


def write_report(raw: dict[str, Any], cases: Sequence[Case], folder: Path) -> list[Path]:
    """Writes the page and its two plots; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"sweep-{raw['device']}"
    pictures = {f"{stem}-causal.png": speeds(raw), f"{stem}-regret.png": histogram(regrets(raw, cases))}
    paths = [folder / f"{stem}.md", *(folder / name for name in pictures)]
    paths[0].write_text(page(raw, cases, list(pictures)), encoding="utf-8")
    for path, figure in zip(paths[1:], pictures.values(), strict=True):
        figure.savefig(path, dpi=150)
    return paths


def page(raw: dict[str, Any], cases: Sequence[Case], pictures: Sequence[str] = ()) -> str:
    """Returns the whole page as Markdown."""
    versions = ", ".join(f"{name} {version}" for name, version in raw["versions"].items() if version)
    chosen = regrets(raw, cases)
    parts = [
        f"# Sweep on {raw['device_name']} ({raw['device']})\n",
        f"Written by `python -m benchmarks.sweep_report` from times measured on {raw['date']}, "
        f"{len(raw['cases'])} measurements in {raw['seconds']:.0f} s; {versions}.\n",
        f"Each case has two calls to warm up, and then {raw['rounds']} rounds in which the backends take turns; slow "
        "backends have fewer rounds. Times are medians in µs per call and include the host's time. Training is the "
        "forward and the gradients of q, k and v.\n",
        "Regret is the time of the automatic choice divided by the time of the fastest backend; inf if the chosen "
        "backend was not timed.\n",
        "## Regret of automatic choice\n",
        regret_table(raw, cases),
        *(f"![{CAPTIONS[name.rpartition('-')[2]]}]({name})\n" for name in pictures),
    ]
    for direction in DIRECTIONS:
        rows = [record for record in raw["cases"] if record["direction"] == direction]
        if rows:
            parts += [f"## {direction.capitalize()}, µs per call\n", _times(rows, chosen)]
    return "\n".join([*parts, _left_out(raw)])


def _times(records: list[dict[str, Any]], chosen: list[Regret]) -> str:
    names = list(dict.fromkeys(name for record in records for name, e in record["backends"].items() if "median" in e))
    by_case = {(regret.case, regret.training): regret for regret in chosen}
    lines = ["| case | best | chosen | regret | " + " | ".join(names) + " |", "|---" * (4 + len(names)) + "|"]
    for record in records:
        regret = by_case.get((record["name"], record["direction"] == "training"))
        verdict = (regret.best, regret.chosen, f"{regret.ratio:.2f}") if regret else ("none", "", "")
        right = right_times(record)
        cells = [_cell(record["backends"].get(name, {}), name in right) for name in names]
        lines.append(f"| {record['name']} | " + " | ".join((*verdict, *cells)) + " |")
    return "\n".join(lines) + "\n"


def _cell(entry: dict[str, Any], right: bool) -> str:
    if "median" in entry:
        return f"{entry['median']:.0f}" if right else "WRONG"
    return "FAILED" if "failed" in entry else "skipped" if "skipped" in entry else "—"


def _left_out(raw: dict[str, Any]) -> str:
    """Lists failures, wrong results and the reasons of skipped cases, each with its number of cases."""
    counts: dict[str, int] = {}
    for record in raw["cases"]:
        right = right_times(record)
        for name, entry in record["backends"].items():
            said = f"failed: {entry['failed']}" if "failed" in entry else ""
            if "skipped" in entry:
                said = "skipped: " + entry["skipped"].partition(" scores, ")[2] or entry["skipped"]
            if "median" in entry and name not in right:
                said = f"wrong in {record['name']} ({record['direction']}): differs by {entry['difference']:.2g}"
            if said:
                counts[f"{name}: {said}"] = counts.get(f"{name}: {said}", 0) + 1
    lines = [f"- {said} ({count} times)" for said, count in counts.items()]
    return "\n".join(["## Not measured, or not counted\n", *(lines or ["Nothing."]), ""])


def speeds(raw: dict[str, Any]) -> Any:
    """Draws TFLOP/s by row length for plain causal bfloat16 calls with head_dim 128; a line per backend."""
    figure = _figure(11, 4.5)
    for axes, direction in zip(figure.subplots(1, 2), DIRECTIONS, strict=True):
        lines: dict[str, dict[int, float]] = {}
        for record in raw["cases"]:
            if record["direction"] == direction and _is_plain_causal(record):
                for name, time in right_times(record).items():
                    by_length = lines.setdefault(name, {})
                    by_length[record["spec"]["q_len"]] = record["gigaflop"] / time * 1e3  # GFLOP / µs = 1000 TFLOP/s
        for name, points in lines.items():
            lengths = sorted(points)
            axes.plot(lengths, [points[length] for length in lengths], marker="o", markersize=3, label=name)
        axes.set(title=f"{direction}, causal, heads 32/8, d 128, 16K tokens", xlabel="row length", ylabel="TFLOP/s")
        axes.grid(alpha=0.3)
        if lines:
            axes.set_xscale("log", base=2)
            axes.legend(fontsize=7)
    figure.suptitle(f"{raw['device_name']}, {raw['date']}", fontsize=8)
    return figure


def _is_plain_causal(record: dict[str, Any]) -> bool:
    spec = record_spec(record)
    shape = (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.value_dim, spec.dtype)
    return record["name"].startswith("causal ") and shape == (32, 8, 128, 128, "bfloat16") and _fills(spec)


def _fills(spec: Any) -> bool:
    return spec.q_len == spec.kv_len and spec.batch * spec.q_len == 16384


def histogram(chosen: Sequence[Regret]) -> Any:
    """Draws the number of cases by regret, separately for forward and training."""
    figure = _figure(8, 3.5)
    axes = figure.subplots()
    finite = {
        direction: [regret.ratio for regret in chosen if regret.training is training and math.isfinite(regret.ratio)]
        for direction, training in zip(DIRECTIONS, (False, True))
    }
    top = max([1.3, *(ratio for ratios in finite.values() for ratio in ratios)])
    edges = [1 + (top - 1) * number / 24 for number in range(25)]
    axes.hist(list(finite.values()), bins=edges, label=[f"{name} ({len(finite[name])})" for name in finite])
    axes.axvline(GOALS["worst"], color="black", linewidth=0.8)
    axes.set(xlabel="time of the automatic choice / time of the fastest", ylabel="cases", yscale="symlog")
    axes.legend()
    return figure


def _figure(width: float, height: float) -> Any:
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise SpecError("--write: matplotlib is not installed; pip install 'attn-core[cli]'") from None
    return Figure(figsize=(width, height), layout="constrained")


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the tables of a sweep; with ``--write``, writes them and the plots to a folder."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sweep_report")
    parser.add_argument("times", type=Path, help="the raw times, written by attn bench --json")
    parser.add_argument("--write", type=Path, metavar="FOLDER", help="the folder for the page and its plots")
    options = parser.parse_args(arguments)
    try:
        raw = read(options.times)
        cases = preference.measured(raw["device"])
        if options.write is None:
            print(page(raw, cases))
        for path in [] if options.write is None else write_report(raw, cases, options.write):
            print(f"written to {path}")
    except SpecError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
