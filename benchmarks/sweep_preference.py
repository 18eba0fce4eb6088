"""Derives the table of automatic choice from a sweep's raw times.

The raw times are the file of ``attn bench --json``; the table is ``attn_core/selection/measured/<device>.json``.

    python -m benchmarks.sweep_preference times.json                                        # shows the regret
    python -m benchmarks.sweep_preference times.json --write attn_core/selection/measured   # also writes the table
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attn_core import backends
from attn_core.cli.bench import regret_table
from attn_core.cli.bench_sweep import read, write
from attn_core.errors import SpecError
from attn_core.selection import preference
from attn_core.selection.regret import broken, record_spec, regrets, right_times

TIE = 1.02
"""A difference of at most two per cent is noise; the usual order then decides."""


def derive(raw: dict[str, Any]) -> dict[str, Any]:
    """Derives the table of a raw file: each case with its features, sizes, relative times in order, and best time.

    Leaves out cases without measurements. Also leaves out a case if more than half of the backends disagree with the
    first one, because its right result is then unknown.
    """
    usual = backends.PREFERENCE.get((raw["framework"], backends.kind_of(raw["device"])), ())
    cases = [case for record in raw["cases"] if (case := _case(record, usual))]
    header = ("date", "device", "device_name", "framework", "versions")
    return {name: raw.get(name) for name in header} | {"cases": cases}


def _case(record: dict[str, Any], usual: tuple[str, ...]) -> dict[str, Any] | None:
    times, failed = right_times(record), broken(record)
    if not times or len([name for name in failed if "median" in record["backends"][name]]) > len(times):
        return None
    spec = record_spec(record)
    best = min(times.values())
    return {
        "name": record["name"],
        "features": preference.features(spec)._asdict(),
        "sizes": list(preference.sizes(spec)),
        "times": {name: round(times[name] / best, 3) for name in stable_order(times, usual)},
        "microseconds": round(best, 1),
    } | ({"failed": failed} if failed else {})


def stable_order(times: dict[str, float], usual: tuple[str, ...]) -> list[str]:
    """Returns names by time, fastest first; names within TIE of the fastest remaining one follow the usual order."""
    left, ranked = dict(times), []
    while left:
        tied = [name for name in left if left[name] <= TIE * min(left.values())]
        ranked.append(min(tied, key=lambda name: (usual.index(name) if name in usual else len(usual), left[name])))
        del left[ranked[-1]]
    return ranked


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the regret of automatic choice by the derived table; with ``--write``, also writes the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sweep_preference")
    parser.add_argument("times", type=Path, help="the raw times, written by attn bench --json")
    parser.add_argument("--write", type=Path, metavar="FOLDER", help="the folder for the table of the device")
    options = parser.parse_args(arguments)
    try:
        raw = read(options.times)
    except SpecError as error:
        parser.error(str(error))
    table = derive(raw)
    cases = preference.cases_of(table)
    print(regret_table(raw, cases))
    for regret in sorted(regrets(raw, cases, leave_out=True), key=lambda regret: -regret.ratio)[:10]:
        print(f"unseen: {regret.ratio:.2f} {regret.case}: {regret.chosen} for {regret.best}")
    if options.write is not None:
        options.write.mkdir(parents=True, exist_ok=True)
        path = options.write / f"{raw['device']}.json"
        write(table, path)
        print(f"written to {path}")


if __name__ == "__main__":
    main()
