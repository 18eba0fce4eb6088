"""Puts the tables of stored results into the pages that show them.

python -m benchmarks.report                     # names the pages whose tables are not those of the stored results
python -m benchmarks.report --write             # writes the tables; needs no GPU and no framework

A page has a table between ``<!-- table: NAME -->`` and ``<!-- end -->``. NAME is the stem of a file in
benchmarks/results, with the kind of table before a colon if the file has several, or one of ``WITHOUT_FILE``.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import tables
from benchmarks.measure import Result, median_ratio, medians
from tools.pages import certificates, reliability

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks/results"
BLOCK = re.compile(r"(<!-- table: ([^>]+) -->\n+)(.*?)(\n+<!-- end -->)", re.S)
Table = Callable[[Result], str]
OF_FILE: dict[str, Table] = {
    "gpu": tables.speeds,
    "jax-first": tables.jax_calls,
    "page-calls": tables.pages,
    "masks": tables.masks,
    "small-calls": tables.small_calls,
    "drawn": tables.drawn,
    "cpu": tables.cpu,
    "grpo": tables.grpo,
    "generate: models": tables.generate,
    "models": tables.models,
    "failures: models": tables.failures,
    "gallery: masks": tables.gallery,
    "context-rows": tables.context,
    "context-scaling": tables.scaling,
}
"""The tables by the beginning of the name of their file, or by the kind of table and this beginning."""
DATED = ("jax-first", "page-calls", "masks", "small-calls", "drawn")
"""Tables that follow a sentence about when and where they were measured."""


def load(stem: str) -> Any:
    """Reads a stored result."""
    return json.loads((RESULTS / f"{stem}.json").read_text(encoding="utf-8"))


def render(name: str) -> str:
    """Returns the table of this name.

    Raises:
        ValueError: if there is none.
    """
    if name in WITHOUT_FILE:
        return WITHOUT_FILE[name]()
    for beginning, table in OF_FILE.items():
        if name.startswith(beginning):
            result = load(name.rpartition(": ")[2])
            return f"{tables.measured_on(result)}\n\n{table(result)}" if beginning in DATED else table(result)
    raise ValueError(f"no table is called {name!r}")


def filled(text: str) -> str:
    """Returns a page with the tables of the stored results."""
    return BLOCK.sub(lambda found: found[1] + render(found[2]) + found[4], text)


def pages() -> Iterator[Path]:
    """Yields the pages that have tables."""
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        if BLOCK.search(page.read_text(encoding="utf-8")):
            yield page


def main(arguments: list[str] | None = None) -> int:
    """Names stale pages, or writes them. Exit code: 1 if a page is stale."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the pages")
    parsed = parser.parse_args(arguments)
    stale = []
    for page in pages():
        before = page.read_text(encoding="utf-8")
        if (after := filled(before)) != before:
            stale.append(page)
            if parsed.write:
                page.write_text(after, encoding="utf-8")
    print("\n".join(f"{'written' if parsed.write else 'stale'}: {page.relative_to(ROOT)}" for page in stale))
    return 1 if stale and not parsed.write else 0


# The headlines, from several files


class Headline(NamedTuple):
    """A row of the table: our candidate of a call in benchmarks/results/gpu-h200.json beside another one.

    Attributes:
        shown: the call in the table's words.
        other: the candidate; "" for the bare kernel of the chosen backend, beside which TFLOP/s are shown.
        words: the other candidate in the table's words, or the name of the bare kernel.
        package: the package whose version stands after these words.
    """

    call: str
    what: str
    shown: str
    ours: str
    other: str
    words: str
    package: str = ""


FLEX = ("FlexAttention", "FlexAttention, compiled")
SHIPPED = ("flash4 as shipped", "FlashAttention-4 as shipped", "flash-attn-4")
JAX_NN, TOKAMAX = ("jax.nn cudnn", "`jax.nn` with cuDNN"), ("tokamax mosaic", "tokamax", "tokamax")
CONTIGUOUS = ("attention, contiguous", "the same keys without pages")
FORWARD, BOTH = "forward", "forward + backward"
PAGES_OF_16 = "decode 64 x 8192 tokens from pages of 16"
HEADLINES = (
    Headline("causal", FORWARD, "torch, causal, forward", "attention", "", "bare flash3"),
    Headline("causal", BOTH, "torch, causal, forward + backward", "attention", "", "bare flash4"),
    Headline("softcap 50", FORWARD, "torch, softcap, forward", "attention flash4", *FLEX),
    Headline("softcap 50", FORWARD, "torch, softcap, forward", "attention flash4", *SHIPPED),
    Headline("softcap 50", BOTH, "torch, softcap, forward + backward", "attention flash4", *FLEX),
    Headline("jax.jit", FORWARD, "`jax.jit`, causal, forward", "attention in JAX", *JAX_NN),
    Headline("jax.jit", FORWARD, "`jax.jit`, causal, forward", "attention in JAX", *TOKAMAX),
    Headline("jax.jit", BOTH, "`jax.jit`, causal, forward + backward", "attention in JAX", *JAX_NN),
    Headline("training step of a Flax model", "jax.jit", "a training step of a Flax model", "attention", *JAX_NN),
    Headline(PAGES_OF_16, FORWARD, PAGES_OF_16, "attention", *CONTIGUOUS),
)


def headlines() -> str:
    """Returns the headline figures of every device."""
    rows = [*_gpu(load("gpu-h200")), *_ranks(load("context-scaling-h200")), *_cpu(load("cpu"))]
    return tables.lines_of(["call", "compared with", "measured", "device", "date"], rows)


def _gpu(result: Result) -> Iterator[list[str]]:
    for line in HEADLINES:
        row = tables.rows_of(result, line.call)[line.what]
        compared, seconds = line.words, row["seconds"]
        if line.other:
            shown = f"{median_ratio(seconds, line.ours, line.other):.2f} times as fast"
        else:
            ours, theirs = (row["flops"] / medians(seconds)[each] / 1e12 for each in (line.ours, line.words))
            compared, shown = f"{line.words}: {theirs:.0f} TFLOP/s", f"{ours:.0f} TFLOP/s"
        if line.package:
            compared += f", {result['environment']['versions'][line.package]}"
        yield [line.shown, compared, shown, result["device"], row.get("date", result["environment"]["date"])]


def _ranks(result: Result) -> Iterator[list[str]]:
    def call(row: dict[str, Any], direction: str) -> str:
        word = BOTH if direction == "training" else FORWARD
        return f"context parallelism, {row['tokens'] // row['ranks']} tokens per rank, {word}"

    first, last = result["rows"][0], {row["ranks"]: row for row in result["rows"]}
    for direction, entry in first["torch"].items():
        times = medians(entry["seconds"])
        theirs = min(seconds for name, seconds in times.items() if name.startswith("torch context_parallel"))
        shown = f"{theirs / times[tables.CHOSEN]:.2f} times as fast"
        where = f"{first['ranks']} × {result['device']}"
        yield [call(first, direction), "torch's own `context_parallel`", shown, where, first["date"]]
    for ranks, row in last.items():
        shown = f"{tables.efficiency(row['torch']['training'], ranks):.1%} of linear speedup"
        yield [call(row, "training"), "one GPU", shown, f"{ranks} × {result['device']}", row["date"]]


def _cpu(result: Result) -> Iterator[list[str]]:
    where = f"{result['environment']['processor']}, {result['cores']} cores"
    for figure in result["figures"]:
        if figure["unit"] == "times jax.nn xla's speed":
            call, shown = figure["name"].replace("jax.jit", "`jax.jit`"), f"{figure['value']:.1f} times as fast"
            yield [call, "`jax.nn` with XLA", shown, where, result["environment"]["date"]]


# The figures of README.md: one row for each subject


def front() -> str:
    """Returns the figures of README.md: rates by length, then speeds beside the function otherwise called."""
    gpu, ranks, cpu = load("gpu-h200"), load("context-scaling-h200"), load("cpu")
    jax_nn = (row for row in _gpu(gpu) if row[0].startswith("`jax.jit`, causal") and row[1] == JAX_NN[1])
    beside_torch = (row for row in _ranks(ranks) if row[1] != "one GPU")
    rows = [
        _by_length(gpu, ranks),
        [*_pair(jax_nn), _versions(gpu, "jax", "cuDNN")],
        [*_pair(beside_torch), _versions(ranks, "torch")],
        [*_pair(_cpu(cpu)), _versions(cpu, "jax")],
    ]
    head = ["call", "compared with", "forward", "forward + backward", "device", "date", "versions"]
    return tables.lines_of(head, rows)


def _by_length(gpu: Result, ranks: Result) -> list[str]:
    """Returns the row of one GPU's TFLOP/s: four rows of 4096 tokens, then one row of each length that ranks share."""
    call, rows = tables.rows_of(gpu, "causal"), {row["tokens"]: row for row in reversed(ranks["rows"])}
    lengths = sorted(rows)
    shown = []
    for what, direction, forwards in ((FORWARD, "forward", 1.0), (BOTH, "training", 3.5)):
        times = [medians(rows[tokens]["torch"][direction]["seconds"])[tables.ONE] for tokens in lengths]
        work = [forwards * tables.WORK * tokens**2 / 2 for tokens in lengths]
        rates = [_rate(call[what], "attention"), *(each / time / 1e12 for each, time in zip(work, times, strict=True))]
        shown.append(f"{', '.join(f'{rate:.0f}' for rate in rates)} TFLOP/s")
    bare = f"{_rate(call[FORWARD], 'bare flash3'):.0f}, {_rate(call[BOTH], 'bare flash4'):.0f}"
    dates = sorted({gpu["environment"]["date"], *(row["date"] for row in rows.values())})
    return [
        f"torch, causal: 4 rows of 4096 tokens; a row of {', '.join(map(str, lengths))}",
        f"bare flash3, flash4 at 4096: {bare}",
        *shown,
        gpu["device"],
        f"{dates[0]} to {dates[-1]}",
        _versions(gpu, "torch", "tokenspeed-fa3", "flash-attn-4"),
    ]


def _rate(row: Any, candidate: str) -> float:
    """Returns a candidate's TFLOP/s."""
    return float(row["flops"] / medians(row["seconds"])[candidate] / 1e12)


def _pair(rows: Iterable[list[str]]) -> list[str]:
    """Returns the row of a forward and that of forward + backward as one."""
    (call, other, forward, device, date), (_, _, both, _, _) = rows
    return [call.replace(f", {FORWARD}", ""), other, forward, both, device, date]


def _versions(result: Result, *names: str) -> str:
    """Returns packages of a run with their versions."""
    return ", ".join(f"{name} {result['environment']['versions'][name]}" for name in names)


WITHOUT_FILE: dict[str, Callable[[], str]] = {
    "headlines": headlines,
    "front": front,
    "choice": lambda: (RESULTS / "choice.md").read_text(encoding="utf-8").rstrip(),  # a fit takes minutes
    "certificates": certificates.render,
    **reliability.TABLES,
}
"""The tables that come from several files, or from data of the repository."""

if __name__ == "__main__":
    sys.exit(main())
