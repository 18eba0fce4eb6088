"""Measures the rows that people train over several ranks of one host, in torch and in JAX, in one run.

python -m benchmarks.context_rows --json rows.json                    # on 2 GPUs, in at most 10 minutes
python -m benchmarks.context_rows rows.json --write                   # tables for docs/explanation/context_parallel.md
python -m benchmarks.context_rows --only packed gemma --json part.json
python -m benchmarks.context_rows --profile packed --folder profiles  # torch's profiler, a file for each rank
python -m benchmarks.context_rows --device cpu --json dry.json        # tiny rows over gloo, to try the program
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks import context_row_report
from benchmarks.context_row_shapes import rows_of
from benchmarks.measure import environment

ROOT = Path(__file__).resolve().parent.parent
SECONDS = 560.0
"""The time of a whole run. JAX has a share; ways for which there is no time are left out."""
JAX_SHARE = 0.45
SECONDS_TO_END = 40.0
"""The launcher gives its ranks 30 s to end, and then kills them."""


def main(arguments: list[str] | None = None) -> int:
    """Measures, or renders earlier measurements; returns an exit code: 1 if a framework's processes failed."""
    options = _parser().parse_args(arguments)
    if options.file is not None:
        result = json.loads(options.file.read_text(encoding="utf-8"))
    else:
        try:
            rows_of(options.seed, options.only)
        except ValueError as error:
            _parser().error(str(error))
        result = _measure(options)
        if result is None:
            return 1
        if options.json is not None:
            options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if not options.profile:
        text = context_row_report.section(result)
        print(text)
        if options.write:
            context_row_report.write(text)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, nargs="?", help="an earlier --json: render it, and measure nothing")
    parser.add_argument("--json", type=Path, help="write the raw seconds to this file")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/explanation/context_parallel.md")
    parser.add_argument("--only", nargs="+", help="rows whose names begin with one of these words")
    parser.add_argument("--seed", type=int, default=1, help="of the drawn rows")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: tiny rows, to try the program")
    parser.add_argument("--frameworks", nargs="+", choices=("torch", "jax"), default=["torch", "jax"])
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of the whole run")
    parser.add_argument("--profile", metavar="ROW", help="profile this row in torch instead of measuring")
    parser.add_argument("--folder", type=Path, default=Path("profiles"), help="of --profile")
    return parser


def _measure(options: argparse.Namespace) -> dict[str, Any] | None:
    """Runs the processes of each framework, one after the other; returns the combined result."""
    ends = time.time() + options.seconds
    launched = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(options.ranks), "-m"]
    commands = {"torch": [*launched, "benchmarks.context_row_torch"], "jax": ["benchmarks.context_row_jax"]}
    frameworks = ["torch"] if options.profile else options.frameworks
    combined: dict[str, Any] = {}
    with TemporaryDirectory() as name:
        for framework in frameworks:
            later = options.seconds * JAX_SHARE if framework == "torch" and "jax" in frameworks else 0.0
            task = {
                **{"rows": options.only, "seed": options.seed, "device": options.device, "ranks": options.ranks},
                **{"ends": ends - later, "out": str(Path(name) / f"{framework}.json")},
                **{"chosen": _chosen(combined), "profile": options.profile, "folder": str(options.folder)},
            }
            path = Path(name) / f"{framework}-task.json"
            path.write_text(json.dumps(task), encoding="utf-8")
            code = _run([*commands[framework], str(path)], options.device, ends + 20 - time.time())
            if code:
                print(f"the processes of {framework} ended with {code}", file=sys.stderr)
            out = Path(task["out"])
            if out.exists():  # also after a failure: the rows until then
                _combine(combined, framework, json.loads(out.read_text(encoding="utf-8")))
            elif code and framework == "torch":
                return None
    combined["jax in one process"] = True
    combined["environment"], combined["seed"], combined["ranks"] = environment(), options.seed, options.ranks
    return combined


def _run(command: list[str], device: str, seconds: float) -> int:
    """Runs a module, and ends it with its ranks if it takes longer; returns the exit code, 124 if it was ended."""
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    # Ranks, which the launcher starts, import from the working folder only what is named here.
    defaults = {"OMP_NUM_THREADS": "1", "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "PYTHONSAFEPATH": "1"}
    forced = {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu"} if device == "cpu" else {}
    environ = {**defaults, **os.environ, "PYTHONPATH": paths, **forced}
    running = subprocess.Popen([sys.executable, "-P", "-m", *command], cwd=ROOT, env=environ, start_new_session=True)
    try:
        return running.wait(max(seconds, 1.0))
    except subprocess.TimeoutExpired:
        return 124
    finally:
        if running.poll() is None:
            # The launcher ends its ranks, which are in sessions of their own. A rank left behind would go on computing.
            running.terminate()
            try:
                running.wait(SECONDS_TO_END)
            except subprocess.TimeoutExpired:
                os.killpg(running.pid, signal.SIGKILL)
                running.wait()


def _combine(combined: dict[str, Any], framework: str, result: dict[str, Any]) -> None:
    rows = result.pop("rows")
    if "rows" not in combined:
        combined.update(result)
        combined["rows"] = [{**row, framework: row.pop("measured")} for row in rows]
        combined["rows"] = [{"torch": {}, **row} for row in combined["rows"]]
        return
    measured = {row["name"]: row["measured"] for row in rows}
    for row in combined["rows"]:
        row[framework] = measured.get(row["name"], {})


def _chosen(combined: dict[str, Any]) -> dict[str, dict[str, str]]:
    """Returns torch's chosen way of each row and direction, so that JAX runs the same."""
    return {
        row["name"]: {direction: entry["chosen"] for direction, entry in row["torch"].items()}
        for row in combined.get("rows", [])
    }


if __name__ == "__main__":
    sys.exit(main())
