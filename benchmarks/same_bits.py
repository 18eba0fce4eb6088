"""Measures on a GPU what ``invariant`` costs, beside the automatic choice without it.

python -m benchmarks.same_bits --json benchmarks/results/same-bits-h200.json   # minutes; needs a GPU
python -m benchmarks.same_bits --write    # the tables of docs/explanation/reproducibility.md, from the stored results

The candidates of a call take turns of 150 ms in one process, as in ``benchmarks.page_calls``. Training is a forward and
a backward.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.measure import environment

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks/results"
PAGE = ROOT / "docs/explanation/reproducibility.md"
BEGIN, END = "<!-- written by python -m benchmarks.same_bits --write -->\n", "<!-- end -->\n"
DOCUMENTS = 24
ROWS = {"4 rows of 4096": (4, 4096), f"{DOCUMENTS} documents in 16384": (1, 16384), "32 rows of 512": (32, 512)}
"""Rows and tokens of calls in bfloat16 with 32 query heads on 8 kv heads of 128 channels, causal."""
PREFIX_ROWS = tuple(ROWS)[:2]
"""The calls that are also measured with ``invariant="prefix"``."""
CHUNKS = {"4 chunks of 2048, the first": 2048, "4 chunks of 2048, after 6144 tokens": 8192}
"""The tokens of 4 sequences of which 2048 are new, on pages of 16."""


def in_batches(name: str, training: bool) -> dict[str, Any]:
    """A call of ``ROWS``: the automatic choice, and the choices with ``invariant``."""
    import torch

    from benchmarks.page_calls import in_turns
    from torch_frontend import SeqInfo, attention, explain

    rows, tokens = ROWS[name]
    normal = partial(torch.randn, device="cuda", dtype=torch.bfloat16, requires_grad=training)
    q, k, v = (normal(rows, tokens, heads, 128) for heads in (32, 8, 8))
    options: dict[str, Any] = {"causal": True}
    if rows == 1:
        cuts = torch.randperm(tokens // 16 - 1, generator=torch.Generator().manual_seed(0))[: DOCUMENTS - 1] + 1
        ends = [0, *sorted(16 * int(cut) for cut in cuts), tokens]
        lengths = [stop - start for start, stop in pairwise(ends)]
        options["seq_info"] = SeqInfo.from_lengths(lengths, array=lambda each: torch.from_numpy(each).cuda())
    dout = torch.randn_like(q)

    def call(invariant: str | None) -> Callable[[], Any]:
        if not training:
            return partial(attention, q, k, v, **options, invariant=invariant)
        return lambda: torch.autograd.grad(attention(q, k, v, **options, invariant=invariant), (q, k, v), dout)

    promises = (None, "batch", *(["prefix"] if name in PREFIX_ROWS else []))
    chosen = {str(each): explain(q, k, v, **options, invariant=each).backend for each in promises}
    kind = "training" if training else "forward"
    return {
        "call": f"{name}, {kind}",
        "chosen": chosen,
        "seconds": in_turns({str(each): call(each) for each in promises}),
    }


def decoding() -> dict[str, Any]:
    """Decoding of 64 sequences of 4096 tokens from pages of 16."""
    from benchmarks.page_calls import SHAPES, Pool, in_turns

    pool = Pool(SHAPES["64 x 4096"])
    calls = {"None": pool.call(), "prefix": pool.call(invariant="prefix")}
    return {"call": "decoding of 64 x 4096", "bytes": pool.bytes_read(), "seconds": in_turns(calls)}


def chunks(name: str) -> dict[str, Any]:
    """Chunked prefill from pages, beside FlashAttention-3."""
    from benchmarks.page_calls import Pool, Shape, in_turns

    tokens = CHUNKS[name]
    pool = Pool(Shape(4, tokens, 32, 8, 2048))
    calls = {"None": pool.call(causal=True), "prefix": pool.call(causal=True, invariant="prefix")}
    calls["flash3"] = pool.call(causal=True, backend="flash3")
    pairs = 4 * 32 * sum(tokens - 2048 + row + 1 for row in range(2048))
    return {"call": name, "operations": 4 * 128 * pairs, "seconds": in_turns(calls)}


def tables(result: dict[str, Any]) -> str:
    """Returns stored results as Markdown."""
    facts = result["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items() if version)
    text = [f"Measured on {facts['date']}: {result['device']}, {versions}.", ""]
    text += ["| call | backend | with `invariant` | time, of that without |", "|---|---|---|---:|"]
    rates = ["", "| call | | µs | rate |", "|---|---|---:|---:|"]
    for row in result["rows"]:
        seconds = {name: statistics.median(times) for name, times in row["seconds"].items()}
        if "chosen" in row:
            for promise in [each for each in row["chosen"] if each != "None"]:
                share = f"{seconds[promise] / seconds['None']:.2f}" if promise in seconds else "did not run"
                names = [f"`{row['chosen'][each]}`" for each in ("None", promise)]
                text.append(f'| {row["call"]} | {names[0]} | {names[1]}, "{promise}" | {share} |')
            continue
        for name, each in seconds.items():
            label = {"None": "without", "prefix": '"prefix"'}.get(name, f"`{name}`")
            work = row["bytes"] if "bytes" in row else row["operations"]
            unit = "TB/s" if "bytes" in row else "TFLOP/s"
            rates.append(f"| {row['call']} | {label} | {1e6 * each:.0f} | {work / each / 1e12:.2f} {unit} |")
    return "\n".join(text + rates) + "\n"


def stored() -> str:
    """Returns the tables of all stored results."""
    files = sorted(RESULTS.glob("same-bits-*.json"))
    return "\n".join(tables(json.loads(file.read_text(encoding="utf-8"))) for file in files)


def _write() -> None:
    """Writes the tables of stored results into the page."""
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    PAGE.write_text(before + BEGIN + stored() + END + rest.split(END, 1)[1], encoding="utf-8")


def main() -> None:
    """Measures and stores the results, or writes the tables of stored ones."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    if options.json or not options.write:
        result: dict[str, Any] = {"device": None, "environment": environment(), "rows": []}
        for row in _rows(result):
            result["rows"].append(row)
            if options.json:
                options.json.write_text(json.dumps(result) + "\n", encoding="utf-8")
        print(tables(result))
    if options.write:
        _write()


def _rows(result: dict[str, Any]) -> Iterator[dict[str, Any]]:
    import torch

    result["device"] = torch.cuda.get_device_name()
    steps = [decoding, *[partial(chunks, name) for name in CHUNKS]]
    steps += [partial(in_batches, name, training) for name in ROWS for training in (False, True)]
    for step in steps:
        yield step()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
