"""Derives the table of automatic choice from sweeps, and shows what the choice costs for calls that a fit did not see.

    python -m benchmarks.fit.sweep --json times.json                                 # measures random calls
    python -m benchmarks.fit times.json                                              # what the choice by a fit costs
    python -m benchmarks.fit times.json --write attn_core/selection/measured         # also writes the table
    python -m benchmarks.fit old.json new.json --together times.json --write FOLDER  # several sweeps, fitted together
    python -m benchmarks.fit times.json --judge                                      # another GPU: the package's table

Of several sweeps the newest alone says how long the host takes (records.py). ``--judge`` shows what the package's order
costs; its table must not have seen the calls.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from attn_core.errors import SpecError
from attn_core.selection.tables import write_table
from benchmarks.fit.choice import Fitting, report
from benchmarks.fit.records import read, together, write


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the cost of automatic choice for unseen calls; with ``--write``, also writes the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fit")
    parser.add_argument("times", type=Path, nargs="+", help="the raw times, written by benchmarks.fit.sweep")
    parser.add_argument("--together", type=Path, metavar="FILE", help="the raw file of several sweeps, to be written")
    parser.add_argument("--write", type=Path, metavar="FOLDER", help="the folder of the table to be written")
    parser.add_argument("--judge", action="store_true", help="show the cost of the package's order as it is")
    options = parser.parse_args(arguments)
    if options.judge and options.write is not None:
        parser.error("--judge: expected no --write")
    try:
        raw = together([read(path) for path in options.times])
    except SpecError as error:
        parser.error(str(error))
    fitting = Fitting(raw)
    print(report(fitting, options.judge))
    if options.together is not None:
        write(raw, options.together)
    if options.write is not None:
        path = options.write / f"{raw['framework']}-{raw['device']}.json"
        write_table(fitting.table(), path)
        print(f"written to {path}")


if __name__ == "__main__":
    main()
