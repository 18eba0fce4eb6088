"""Shows a sweep as tables and plots: times, the errors of predicted times, and the regret of automatic choice.

python -m benchmarks.sweep_report times.json                 # the tables, printed
python -m benchmarks.sweep_report times.json --write times   # writes the tables and the plots to a folder
python -m benchmarks.sweep_report seed0.json seed1.json      # the same of several sweeps of one device
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attn_core.cli.bench import regret_table
from attn_core.cli.bench_sweep import read
from attn_core.cli.plots import empty_figure
from attn_core.errors import SpecError
from attn_core.selection.cross_validation import FOLDS, Fitting
from attn_core.selection.regret import Regret, fastest_round, right_times
from attn_core.selection.sweeps import together, with_orders

DIRECTIONS = ("forward", "training")
CAPTIONS = {
    "errors.png": "Predicted over measured time of unseen calls, by measured time, for each backend",
    "regret.png": "The number of cases by regret",
}
"""The captions of the plots, by the end of their file names."""

OLDER = """The host's part of a call changes with every version. A call of an older sweep says nothing about the host,
and counts only if the device decided its best time.

The features and settings of the models were chosen with a look at these calls. `sweep-sm90-h100.md` judges the same
models on another GPU, with calls that nothing was chosen by.
"""

OTHER_GPU = """Automatic choice on this GPU follows the package's table, which was fitted to another GPU and to none of
these calls. The rows that begin with "the package's order" show its cost; the comparison with F.sdpa, too, is of its
choice.
"""

ON_CPU = """Automatic choice on a CPU follows the order in `attn_core.backends`, and in JAX the rule in
`attn_core/selection/jax_on_cpu.py`. The row that begins with "the package's order" shows its cost; the comparison with
the framework's own function, too, is of its choice. "Predicted order" is what a table of `attn tune` would choose.
"""


def write_report(raw: dict[str, Any], folder: Path) -> list[Path]:
    """Writes the page and its two plots; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    stem, fitting = stem_of(raw), Fitting(raw)
    pictures = {f"{stem}-errors.png": errors(fitting), f"{stem}-regret.png": histogram(fitting.regrets())}
    paths = [folder / f"{stem}.md", *(folder / name for name in pictures)]
    paths[0].write_text(page(fitting, list(pictures)), encoding="utf-8")
    for path, figure in zip(paths[1:], pictures.values(), strict=True):
        figure.savefig(path, dpi=150)
    return paths


def stem_of(raw: dict[str, Any]) -> str:
    """Returns the name of the page and the start of its plots' names, such as sweep-sm90.

    If another GPU's table decides, the GPU's own name follows: sweep-sm90-h100.
    """
    framework = "" if raw["framework"] == "torch" else f"{raw['framework']}-"
    own = f"-{raw['device_name'].split()[1].lower()}" if "package" in raw and raw["device"] != "cpu" else ""
    return f"sweep-{framework}{raw['device']}{own}"


def page(fitting: Fitting, pictures: Sequence[str] = ()) -> str:
    """Returns the whole page as Markdown."""
    raw = fitting.raw
    versions = ", ".join(f"{name} {version}" for name, version in raw["versions"].items() if version)
    chosen = fitting.regrets()
    parts = [
        f"# Sweep on {raw['device_name']} ({raw['device']})\n",
        f"Written by `python -m benchmarks.sweep_report` from times measured on {_dates(raw)}, "
        f"{len(raw['cases'])} measurements in {raw['seconds']:.0f} s; {versions}.\n",
        f"Each case has two calls to warm up, and then {raw['rounds']} rounds in which the backends take turns; slow "
        "backends have fewer rounds. Times are µs per call in the fastest round, because what interferes only makes "
        "rounds slower. They include the host's time. Training is the forward and the gradients of q, k and v.\n",
        "Regret is the time of the automatic choice divided by the time of the fastest backend; inf if the chosen "
        "backend was not timed. The models that choose a backend for a call were fitted to other calls only "
        f"({FOLDS}-fold cross-validation). The calls repeat, so the figures leave out that automatic choice avoids "
        "cuDNN for decoding without a mask, where every number of keys needs a plan of its own (NEW_LENGTH in "
        "selection/preference.py).\n",
        *([OLDER] if "sweeps" in raw else []),
        *([(ON_CPU if raw["device"] == "cpu" else OTHER_GPU)] if "package" in raw else []),
        "## Regret of automatic choice\n",
        regret_table(fitting),
        "## Errors of the predicted times\n",
        _errors_table(fitting),
        *(f"![{CAPTIONS[name.rpartition('-')[2]]}]({name})\n" for name in pictures),
    ]
    for direction in DIRECTIONS:
        rows = [record for record in raw["cases"] if record["direction"] == direction]
        if rows:
            parts += [f"## {direction.capitalize()}, µs per call\n", _times(rows, chosen)]
    return "\n".join([*parts, _left_out(raw)])


def _dates(raw: dict[str, Any]) -> str:
    return " and ".join(sweep["date"] for sweep in raw.get("sweeps", [raw]))


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
        return f"{fastest_round(entry):.0f}" if right else "WRONG"
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


def _log_errors(fitting: Fitting, direction: str) -> dict[str, list[tuple[float, float]]]:
    """Returns by backend (measured microseconds, logarithm of predicted over measured), for unseen calls."""
    result: dict[str, list[tuple[float, float]]] = {}
    for record, predicted in zip(fitting.records, fitting.unseen, strict=True):
        if record["direction"] == direction:
            times = right_times(record)
            for name, time in predicted.items():
                result.setdefault(name, []).append((times[name], math.log(time / times[name])))
    return result


def _errors_table(fitting: Fitting) -> str:
    lines = ["| backend | direction | calls | median error | 90th percentile |", "|---" * 5 + "|"]
    for direction in DIRECTIONS:
        for name, pairs in _log_errors(fitting, direction).items():
            sizes = sorted(math.expm1(abs(error)) for _, error in pairs)
            middle, high = sizes[len(sizes) // 2], sizes[math.ceil(0.9 * len(sizes)) - 1]
            lines.append(f"| {name} | {direction} | {len(sizes)} | {middle:.1%} | {high:.1%} |")
    return "\n".join(lines) + "\n"


def errors(fitting: Fitting) -> Any:
    """Draws predicted over measured time of unseen calls by measured time; a colour per backend."""
    figure = empty_figure(11, 4.5, "--write")
    for axes, direction in zip(figure.subplots(1, 2), DIRECTIONS, strict=True):
        for name, pairs in _log_errors(fitting, direction).items():
            times, ratios = [time for time, _ in pairs], [math.exp(error) for _, error in pairs]
            axes.plot(times, ratios, linestyle="", marker="o", markersize=2, label=name)
        axes.set(title=direction, xlabel="measured microseconds", ylabel="predicted / measured")
        axes.set(xscale="log", yscale="log", ylim=(0.3, 3))
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    figure.suptitle(f"{fitting.raw['device_name']}, {fitting.raw['date']}", fontsize=8)
    return figure


def histogram(chosen: Sequence[Regret]) -> Any:
    """Draws the number of cases by regret, separately for forward and training."""
    figure = empty_figure(8, 3.5, "--write")
    axes = figure.subplots()
    finite = {
        direction: [regret.ratio for regret in chosen if regret.training is training and math.isfinite(regret.ratio)]
        for direction, training in zip(DIRECTIONS, (False, True))
    }
    top = max([1.3, *(ratio for ratios in finite.values() for ratio in ratios)])
    edges = [1 + (top - 1) * number / 24 for number in range(25)]
    axes.hist(list(finite.values()), bins=edges, label=[f"{name} ({len(finite[name])})" for name in finite])
    axes.axvline(1.35, color="black", linewidth=0.8)
    axes.set(xlabel="time of the automatic choice / time of the fastest", ylabel="cases", yscale="symlog")
    axes.legend()
    return figure


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the tables of a sweep; with ``--write``, writes them and the plots to a folder."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sweep_report")
    parser.add_argument("times", type=Path, nargs="+", help="the raw times, written by attn bench --json")
    parser.add_argument("--write", type=Path, metavar="FOLDER", help="the folder for the page and its plots")
    options = parser.parse_args(arguments)
    try:
        raw = (
            with_orders(together([read(path) for path in options.times]))
            if options.times[1:]
            else read(options.times[0])
        )
        if options.write is None:
            print(page(Fitting(raw)))
        for path in [] if options.write is None else write_report(raw, options.write):
            print(f"written to {path}")
    except SpecError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
