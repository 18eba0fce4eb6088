"""Measures calls on pages on a GPU: drafts, long and uneven sequences, chunks, quantised pages, appends and caches.

python -m benchmarks.pages --json page-calls.json      # minutes; needs a GPU; missing packages are named and skipped

Bytes are those of the keys and values that the queries see, as they are stored, with their scales.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import torch

from attn_core.paged.pools import bytes_per_token
from benchmarks.measure import Calls, Jobs, Row, graphed, measure, run
from benchmarks.tables import pages
from torch_frontend import append_kv, explain_paged, flash_attn, paged_attention

TURN, ROUNDS, DIM = 0.15, 5, 128
in_turns = partial(measure, turn=TURN, rounds=ROUNDS)
GRAPH = 100
"""Calls in a CUDA graph, which shows the GPU's time alone."""
Dtype = str | None


class Shape(NamedTuple):
    """Sequences of at most ``tokens`` tokens with ``queries`` new ones each; uneven: lengths are drawn."""

    sequences: int
    tokens: int
    heads: int
    kv_heads: int
    queries: int = 1
    uneven: bool = False


SHAPES: dict[str, Shape] = {
    **{f"{n} drafts": Shape(8, 8192, 64, 8, n) for n in (2, 4, 8, 16)},
    "one sequence of 65536": Shape(1, 65536, 64, 8),
    "one kv head": Shape(16, 16384, 16, 1),
    "uneven lengths": Shape(64, 8192, 28, 4, uneven=True),
    "64 x 8192": Shape(64, 8192, 32, 8),
    "64 x 4096": Shape(64, 4096, 32, 8),
    "8 x 1024": Shape(8, 1024, 32, 8),
    "chunks of 512": Shape(4, 8192, 32, 8, 512),
}
QUANTISED = Shape(64, 8192, 32, 8)


class Pool:
    """A pool of random pages of 16 tokens, its tables and queries; quantised by ``append_kv`` if kv_dtype says so."""

    def __init__(self, shape: Shape, kv_dtype: Dtype = None) -> None:
        generator = torch.Generator("cuda").manual_seed(0)
        self.shape, width = shape, shape.tokens // 16
        pages = shape.sequences * width
        lengths = torch.full((shape.sequences,), shape.tokens)
        if shape.uneven:
            lengths = torch.randint(64, shape.tokens + 1, lengths.shape, generator=torch.Generator().manual_seed(1))
        self.lengths = lengths
        table = torch.randperm(pages, generator=generator, device="cuda").int().view(shape.sequences, width)
        self.tables: dict[str, Any] = {"block_table": table, "seq_lens": lengths.int().cuda()}
        self.new: dict[str, Any] = {}
        if shape.queries > 1:
            offsets = torch.arange(shape.sequences + 1, dtype=torch.int32, device="cuda") * shape.queries
            self.new = {"cu_seqlens_q": offsets, "max_len_q": shape.queries}
        normal = partial(torch.randn, generator=generator, device="cuda", dtype=torch.bfloat16)
        self.q = normal(shape.sequences * shape.queries, shape.heads, DIM)
        size = (pages, 16, shape.kv_heads, DIM)
        if kv_dtype is None:
            self.pools, self.scales = (normal(size), normal(size)), {}
            return
        stored = {"int4": torch.uint8, "int8": torch.int8}.get(kv_dtype, torch.float8_e4m3fn)
        narrow = (*size[:3], DIM // 2 if kv_dtype == "int4" else DIM)
        k_pages, v_pages = (torch.zeros(narrow, dtype=stored, device="cuda") for _ in range(2))
        k_scales, v_scales = (torch.ones(size[:3], device="cuda") for _ in range(2))
        self.scales = {"k_scales": k_scales, "v_scales": v_scales}
        slots = torch.arange(pages * 16, device="cuda").split(2**18)
        for part in slots:
            k, v = (normal(len(part), shape.kv_heads, DIM) for _ in range(2))
            append_kv(k_pages, v_pages, k, v, slot_mapping=part, **self.scales)
        self.pools = k_pages, v_pages

    def call(self, **options: Any) -> Callable[[], Any]:
        """Attention of the new tokens."""
        return partial(paged_attention, self.q, *self.pools, **self.tables, **self.new, **self.scales, **options)

    def bytes_read(self, kv_dtype: Dtype = None) -> float:
        """The bytes of all keys and values in use."""
        sizes = {"num_layers": 1, "kv_heads": self.shape.kv_heads, "head_dim": DIM}
        return int(self.lengths.sum()) * bytes_per_token(dtype=kv_dtype or "bfloat16", **sizes)


def attending(name: str) -> Row:
    """A shape on pages in bfloat16: automatic choice beside backends by name, and with the promise of equal bits."""
    pool = Pool(SHAPES[name])
    chosen = explain_paged(pool.q, *pool.pools, **pool.tables, **pool.new).backend
    calls = {"attention": pool.call()} | {each: pool.call(backend=each) for each in ("triton_splitkv", "flash3")}
    calls["attention, invariant"] = pool.call(invariant="prefix")
    return {"chosen": chosen, "bytes": pool.bytes_read(), **in_turns(calls)}


def quantised() -> Row:
    """Decoding from quantised pages beside bfloat16, and the bytes that each reads."""
    calls, read = {}, {}
    for dtype in (None, "float8_e4m3fn", "int8", "int4"):
        pool, name = Pool(QUANTISED, dtype), dtype or "bfloat16"
        calls[name], read[name] = pool.call(), pool.bytes_read(dtype)
    return {"read": read, **in_turns(calls)}


def appends() -> Row:
    """Appending a token to each of 64 sequences: plain, rotated, and rotated and quantised."""
    calls: Calls = {}
    angles = torch.arange(8192, device="cuda")[:, None] / 10000 ** (torch.arange(0, DIM, 2, device="cuda") / DIM)
    rotary = angles.cos().bfloat16(), angles.sin().bfloat16()
    for name, dtype, options in (
        ("plain", None, {}),
        ("rotated", None, {"rotary": rotary}),
        ("rotated, float8_e4m3fn", "float8_e4m3fn", {"rotary": rotary}),
        ("rotated, int8", "int8", {"rotary": rotary}),
    ):
        pool = Pool(QUANTISED, dtype)
        k, v = (torch.randn(64, QUANTISED.kv_heads, DIM, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        append = partial(append_kv, *pool.pools, k, v, **pool.tables, **pool.scales, **options)
        calls[name] = graphed(append, GRAPH)
    return in_turns(calls)


def cache(sequences: int, tokens: int) -> Row:
    """flash_attn_with_kvcache on a dense cache, 32/8 heads: ours beside flash-attn 2's and 3's own, one new token
    appended."""
    normal = partial(torch.randn, device="cuda", dtype=torch.bfloat16)
    q, k, v = normal(sequences, 1, 32, DIM), normal(sequences, 1, 8, DIM), normal(sequences, 1, 8, DIM)
    k_cache, v_cache = (normal(sequences, tokens, 8, DIM) for _ in range(2))
    lengths = torch.full((sequences,), tokens - 1, dtype=torch.int32, device="cuda")

    def attend(module: Any) -> Any:
        package = import_module(module) if isinstance(module, str) else module
        return package.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lengths, causal=True)

    calls = {
        "flash_attn_with_kvcache": partial(attend, flash_attn),
        "flash-attn 2": partial(attend, "flash_attn"),
        "FlashAttention-3": partial(attend, "flash_attn_interface"),
    }
    return {"bytes": 2 * sequences * tokens * 8 * DIM * 2, **in_turns(calls)}


JOBS: Jobs = {
    **{(name, ""): partial(attending, name) for name in SHAPES},
    ("64 x 8192, pages in", ""): quantised,
    ("append of 64 tokens, 100 in a CUDA graph", ""): appends,
    ("a cache of 16 x 6000", ""): partial(cache, 16, 6000),
    ("a cache of 128 x 2048", ""): partial(cache, 128, 2048),
}

if __name__ == "__main__":
    sys.exit(run(__doc__, JOBS, pages))
