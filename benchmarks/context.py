"""Measures the rows that people train over several ranks of one host, in torch and in JAX, in one run.

python -m benchmarks.context --json rows.json                    # on 2 GPUs, in at most 10 minutes
python -m benchmarks.context --only packed gemma --json part.json
python -m benchmarks.context --device cpu --json dry.json        # tiny rows over gloo, to try the program

Rows are named, some with goals, or drawn by a seed. ``context_torch`` and ``context_jax`` are the processes of a rank.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from attn_core.context_parallel.choose import CANDIDATES
from attn_core.context_parallel.layout import LAYOUTS, layout_for_window
from benchmarks import tables
from benchmarks.measure import environment, parser, write

ROOT = Path(__file__).resolve().parent.parent
SECONDS = 560.0
"""The time of a whole run. JAX has a share; ways for which there is no time are left out."""
JAX_SHARE = 0.45
SECONDS_TO_END = 40.0
"""The launcher gives its ranks 30 s to end, and then kills them."""
STRATEGIES = CANDIDATES[1]
REST = 0.03
"""The seconds between turns, in both frameworks."""
DRAWN = 10
"""The number of rows that the seed draws."""


class Row(NamedTuple):
    """A causal row of one batch.

    Attributes:
        lengths: of packed documents; None for one document.
        window: the keys that a query sees, itself included; None for all.
        goals: the least efficiency of (a forward, forward + backward); None for a row without a goal.
    """

    name: str
    tokens: int
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    lengths: tuple[int, ...] | None = None
    window: int | None = None
    softcap: float | None = None
    goals: tuple[float, float] | None = None

    @property
    def options(self) -> dict[str, Any]:
        """The keywords of ``attention``, without the documents."""
        return {"causal": True, "window": self.window, "softcap": self.softcap}

    @property
    def ways(self) -> tuple[tuple[str, str], ...]:
        """Every (strategy, layout). One that cannot run the row is shown as refused."""
        shared = [layout_for_window(self.window)] if self.window is not None and not self.lengths else []
        layouts = (*LAYOUTS, *shared)
        return tuple(product(STRATEGIES, layouts))

    @property
    def words(self) -> str:
        """The row in words."""
        parts = [f"{self.tokens} tokens", f"{self.heads}/{self.kv_heads} heads of {self.head_dim}"]
        parts += [f"{len(self.lengths)} documents"] if self.lengths else []
        parts += [f"window {self.window}"] if self.window else []
        parts += [f"softcap {self.softcap:g}"] if self.softcap else []
        return ", ".join(parts)

    def shortened(self, tokens: int = 96) -> Row:
        """Returns a row of the same kind that a CPU computes at once."""
        factor, lengths = tokens / self.tokens, None
        if self.lengths:
            lengths = tuple(max(1, int(length * factor)) for length in self.lengths)
            tokens = sum(lengths)
        elif self.tokens % 2:
            tokens += 1 - tokens % 2
        window = None if self.window is None else max(2, int(self.window * factor))
        ratio = self.heads // self.kv_heads
        sizes = {"heads": 2 * ratio, "kv_heads": 2, "head_dim": self.head_dim // 8}
        return self._replace(tokens=tokens, lengths=lengths, window=window, **sizes)


SEVEN = (9000, 8168, 6000, 4400, 3000, 2000, 200)
NAMED = (
    Row("packed", sum(SEVEN), lengths=SEVEN, goals=(0.85, 0.88)),
    Row("window", 32768, window=4096, goals=(0.90, 0.92)),
    Row("softcap", 16384, 32, 16, softcap=50.0, goals=(0.90, 0.88)),
    Row("gemma", 16384, 16, 8, 256, window=4096, softcap=50.0, goals=(0.85, 0.88)),
    Row("forty heads", 24576, 40, 40, goals=(0.94, 0.91)),
    Row("odd", 10007, goals=(0.80, 0.88)),
    Row("plain", 32768),
    Row("plain of 16384", 16384),
    Row("window of 16384", 16384, window=1024),
)
"""Rows with goals, those of an earlier measurement of shapes outside the benchmark; and rows that show other things."""


def drawn(seed: int, count: int = DRAWN) -> tuple[Row, ...]:
    """Returns rows drawn by a seed: packed, windowed, softcapped and plain, of three widths and odd lengths."""
    generator = random.Random(seed)
    rows = []
    for number in range(count):
        heads, kv_heads = generator.choice(((32, 8), (16, 8), (24, 24), (28, 4), (32, 32)))
        dim = generator.choice((64, 128, 256))
        # A row of 256 channels has half of the tokens, so that each row takes about as long.
        tokens = 2 * generator.randrange(4000, 18000) // (2 if dim == 256 else 1) + 1
        kind = ("packed", "window", "softcap", "plain")[number % 4]
        more: dict[str, Any] = {}
        if kind == "packed":
            cuts = sorted(generator.sample(range(1, tokens), generator.randrange(2, 24)))
            more["lengths"] = tuple(end - start for start, end in zip((0, *cuts), (*cuts, tokens), strict=True))
        if kind == "window" or generator.random() < 0.2:
            more["window"] = generator.choice((512, 1024, 4096))
        if kind == "softcap":
            more["softcap"] = generator.choice((30.0, 50.0))
        rows.append(Row(f"drawn {number + 1}", tokens, heads, kv_heads, dim, **more))
    return tuple(rows)


def rows_of(seed: int, only: list[str] | None = None, *, small: bool = False) -> tuple[Row, ...]:
    """Returns the named rows and the drawn ones; ``only`` those whose names begin with one of the words.

    Raises:
        ValueError: for a word that begins no name.
    """
    rows = (*NAMED, *drawn(seed))
    for word in only or ():
        if not any(row.name.startswith(word) for row in rows):
            raise ValueError(f"--only {word}: expected the beginning of one of {', '.join(row.name for row in rows)}")
    chosen = [row for row in rows if not only or row.name.startswith(tuple(only))]
    return tuple(row.shortened() if small else row for row in chosen)


def way_of(name: str) -> tuple[str, str]:
    """Returns the strategy and the layout of a way by its name, such as "ring, zigzag"."""
    strategy, _, layout = name.partition(", ")
    return strategy, layout


def described(row: Row) -> dict[str, Any]:
    """Returns a row as plain data, which was not measured so far."""
    return {**row._asdict(), "words": row.words, "measured": {}, "error": ""}


def store(task: dict[str, Any], rows: list[dict[str, Any]], device: str) -> None:
    """Writes what a framework's processes measured so far, because the launcher may end them."""
    result = {"rows": rows, "device": device, "dtype": "bfloat16" if task["device"] == "cuda" else "float32"}
    Path(task["out"]).write_text(json.dumps(result), encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    """Measures and prints the tables; returns an exit code: 1 if no row was measured."""
    options = parser(__doc__)
    options.add_argument("--only", nargs="+", help="rows whose names begin with one of these words")
    options.add_argument("--seed", type=int, default=1, help="of the drawn rows")
    options.add_argument("--ranks", type=int, default=2)
    options.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: tiny rows, to try the program")
    options.add_argument("--seconds", type=float, default=SECONDS, help="of the whole run")
    parsed = options.parse_args(arguments)
    try:
        rows_of(parsed.seed, parsed.only)
    except ValueError as error:
        options.error(str(error))
    result = _measure(parsed)
    if result is None:
        return 1
    write(parsed.json, result)
    print(tables.context(result))
    return 0


def _measure(options: argparse.Namespace) -> dict[str, Any] | None:
    """Runs the processes of each framework, one after the other; returns the combined result."""
    ends = time.time() + options.seconds
    launched = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(options.ranks), "-m"]
    commands = {"torch": [*launched, "benchmarks.context_torch"], "jax": ["benchmarks.context_jax"]}
    combined: dict[str, Any] = {}
    with TemporaryDirectory() as name:
        for framework in commands:
            later = options.seconds * JAX_SHARE if framework == "torch" else 0.0
            task = {"rows": options.only, "seed": options.seed, "device": options.device, "ranks": options.ranks}
            task |= {"ends": ends - later, "out": str(Path(name) / f"{framework}.json"), "chosen": _chosen(combined)}
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
