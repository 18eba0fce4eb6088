"""Calls every public function with bad values, on a CPU, and counts what happens. Needs torch and JAX.

python -m benchmarks.hostile                        # 3,000 calls
python -m benchmarks.hostile --calls 50000 --json benchmarks/results/hostile-cpu.json

The calls run in other processes, so that one that dies or never returns is a fault like any other. A call is right, is
refused by an error that names an argument, or finds no memory; everything else is a fault, and the exit code is then 1.
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results"
JUDGE = ROOT / "tests/helpers/hostile_judge.py"
SHARES = {"torch": 0.7, "jax": 0.2, "core": 0.1}
"""The frameworks' shares of the calls; ``core`` is attn_core's own functions."""
PATIENCE = 120.0
"""Seconds after which a call hangs."""
NO_FAULT = ("right", "accepted", "refused", "host's error", "no backend", "no memory")
HEAD = """## Bad arguments

`python -m benchmarks.hostile` calls every public function of the three packages with good arguments, of which one or
two are replaced by bad ones: values of other types, numbers near 2^31 and 2^63, arrays of every dtype, arrays without
memory, leaked tracers, deleted arrays, subclasses, views of all kinds. The call must be right, which is compared with
the float64 reference or with a call on plain copies, or an error that names an argument. An argument must not change,
and no switch may stay on. The calls run in other processes, so a crash or a hang is a fault, too.
"""


def main(arguments: list[str] | None = None) -> int:
    """Runs the calls and prints the counts; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="writes the counts to this file")
    given = parser.parse_args(arguments)
    counts: dict[str, Counter[str]] = {}
    faults: list[dict[str, Any]] = []
    for framework, share in SHARES.items():
        for line in judged(framework, given.seed, 0, round(given.calls * share)):
            counts.setdefault(line["function"], Counter())[line["outcome"]] += 1
            if line["outcome"] not in NO_FAULT:
                faults.append({key: line[key] for key in ("number", "case", "outcome", "text")} | {"in": framework})
                print(
                    f"{line['outcome']}: {framework} {line['number']}: {line['case']}\n    {line['text']}", flush=True
                )
    total = sum((counter for counter in counts.values()), Counter[str]())
    print(f"{total.total()} calls of {len(counts)} functions: {dict(total)}; {len(faults)} faults")
    if given.json:
        versions = {name: version(name) for name in ("torch", "jax", "numpy")}
        result = {"date": date.today().isoformat(), "seed": given.seed, "versions": versions, "faults": faults}
        result["functions"] = {name: dict(sorted(counts[name].items())) for name in sorted(counts)}
        given.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 1 if faults else 0


def judged(framework: str, seed: int, first: int, count: int, judge: Path = JUDGE) -> Iterator[dict[str, Any]]:
    """Yields a line for every call: number, function, case, outcome, text. Starts another process if one ends early."""
    end = first + count
    while first < end:
        begun = None
        for line in _lines(framework, seed, first, end - first, judge):
            if line["outcome"]:
                first = line["number"] + 1
                begun = None
                yield line
            else:
                begun = line
        if begun is None:
            if first < end:
                raise RuntimeError(f"the process of {framework} ended between two calls, before call {first}")
            return
        yield begun | {"outcome": begun.get("ended", "crash"), "text": begun.get("log", "")}
        first = begun["number"] + 1


def _lines(framework: str, seed: int, first: int, count: int, judge: Path) -> Iterator[dict[str, Any]]:
    """Yields the lines of one process. The last one says how the process ended if it ended within a call."""
    command = [sys.executable, "-P", str(judge), framework, *map(str, (seed, first, count))]
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, env=_environment(), cwd=ROOT)
        assert process.stdout is not None
        last: dict[str, Any] = {}
        with process, selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            rest = b""
            while True:
                ready = selector.select(PATIENCE)
                if not ready:
                    process.kill()
                chunk = os.read(process.stdout.fileno(), 2**16) if ready else b""
                if not chunk:
                    break
                *whole, rest = (rest + chunk).split(b"\n")
                for line in map(json.loads, whole):
                    last = line
                    yield line
        if not last:
            log.seek(0)
            raise RuntimeError(f"the process of {framework} ran no call:\n{log.read()[-3000:]}")
        if not last["outcome"]:
            log.seek(0)
            yield last | {"ended": "crash" if ready else "hang", "log": log.read()[-600:]}


def _environment() -> dict[str, str]:
    """The environment of a process: one thread, a CPU, and XLA's quick compiler."""
    sys.path.append(str(ROOT / "tests/helpers"))
    import xla_compiler

    return {**os.environ, "OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu", "XLA_FLAGS": xla_compiler.flags()}


def section() -> str:
    """Returns the part of the page on reliability, as Markdown."""
    parts = [HEAD]
    for file in sorted(RESULTS.glob("hostile-*.json")):
        result = json.loads(file.read_text(encoding="utf-8"))
        versions = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
        functions: dict[str, dict[str, int]] = result["functions"]
        total = sum((Counter(row) for row in functions.values()), Counter[str]())
        names = [name for name in NO_FAULT if total[name]]
        parts += [
            f"{total.total()} calls on a CPU, seed {result['seed']}, {result['date']}, {versions}: "
            f"{len(result['faults'])} faults. `right` has numbers that were compared, `accepted` has none to compare, "
            "`host's error` is an error of torch or JAX that a drop-in hands on.\n",
            f"| function | {' | '.join(names)} | faults |\n|{'---|' * (len(names) + 2)}",
            *(
                f"| `{name}` | {' | '.join(str(row.get(outcome, 0)) for outcome in names)} | "
                f"{sum(number for outcome, number in row.items() if outcome not in NO_FAULT)} |"
                for name, row in functions.items()
            ),
            "",
        ]
    return "\n".join(parts)


if __name__ == "__main__":
    sys.exit(main())
