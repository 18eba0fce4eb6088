"""Derives the table of automatic choice from a sweep's raw times, and shows what the choice costs for unseen calls.

The raw times are the file of ``attn bench --json``; the table is
``attn_core/selection/measured/<framework>-<device>.json``.

    python -m benchmarks.sweep_preference times.json                                        # shows the regret
    python -m benchmarks.sweep_preference times.json --write attn_core/selection/measured   # also writes the table
    python -m benchmarks.sweep_preference seed0.json seed1.json --together times.json --write FOLDER
    python -m benchmarks.sweep_preference times.json --judge   # another GPU, or a CPU: the package's choice

With ``--write``, times.json gets the predictions for unseen calls, too; ``benchmarks.sweep_report`` shows their errors.
Several files are fitted together (attn_core/selection/sweeps.py): the newest alone says how long the host takes. The
regret is then shown for calls that a fit did not see, and for each sweep by models that saw no call of it. ``--judge``
writes the package's orders into times.json, whose calls its table must not have seen.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from attn_core.cli.bench import regret_table
from attn_core.cli.bench_sweep import read, write
from attn_core.errors import SpecError
from attn_core.selection.cross_validation import Fitting, write_table
from attn_core.selection.sweeps import together, with_orders, with_package_order


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the regret of automatic choice for unseen calls; with ``--write``, also writes the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sweep_preference")
    parser.add_argument("times", type=Path, nargs="+", help="the raw times, written by attn bench --json")
    parser.add_argument("--together", type=Path, metavar="FILE", help="the raw file of several sweeps, to be written")
    parser.add_argument("--write", type=Path, metavar="FOLDER", help="the folder for the table")
    parser.add_argument("--judge", action="store_true", help="show what the package's choice costs; writes no table")
    options = parser.parse_args(arguments)
    if options.judge and (options.write is not None or len(options.times) > 1):
        parser.error("--judge: expected one file, and no --write")
    if options.together is None and options.write is not None and len(options.times) > 1:
        parser.error("--write: several files also need --together, for the predictions")
    try:
        raw = together([read(path) for path in options.times])
    except SpecError as error:
        parser.error(str(error))
    # Predictions in the file may come from an earlier version of the models.
    raw = with_orders(raw | {"cases": [record | {"predicted": None} for record in raw["cases"]]})
    fitting = Fitting(with_package_order(raw) if options.judge else raw)
    print(regret_table(fitting))
    for regret in sorted(fitting.regrets(), key=lambda regret: -regret.ratio)[:10]:
        print(f"{regret.ratio:.2f} {regret.case}: {regret.chosen} for {regret.best}")
    if options.judge:
        write(fitting.with_predictions(), options.times[0])
    if options.write is not None:
        path = options.write / f"{raw['framework']}-{raw['device']}.json"
        write_table(fitting.table(), path)
        times = options.together or options.times[0]
        write(fitting.with_predictions(), times)
        print(f"written to {path}; the predictions for unseen calls to {times}")


if __name__ == "__main__":
    main()
