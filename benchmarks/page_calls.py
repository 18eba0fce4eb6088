"""Measures calls on pages on a GPU: drafts, long and uneven sequences, quantised pages, appends, and caches.

python -m benchmarks.page_calls --json page-calls.json      # minutes; needs a GPU; missing packages are skipped
python -m benchmarks.page_calls --report page-calls.json    # prints the tables

The candidates of a group take turns of TURN seconds in one process; each makes its calls in a row and then waits. Bytes
are those of the keys and values that the queries see, as they are stored, with their scales.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch

from attn_core.paged.allocation.sizing import bytes_per_token
from benchmarks.measure import environment, side_by_side
from benchmarks.page_calls_report import JAX_CALLS, lines, report
from torch_frontend import append_kv, attention, explain_paged, flash_attn, paged_attention

ROUNDS, TURN = 5, 0.15
DIM = 128
Calls = dict[str, Callable[[], Any]]
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

    def bytes_read(self, kv_dtype: Dtype = None) -> int:
        """The bytes of all keys and values in use."""
        sizes = {"num_layers": 1, "kv_heads": self.shape.kv_heads, "head_dim": DIM}
        return int(self.lengths.sum()) * bytes_per_token(dtype=kv_dtype or "bfloat16", **sizes)


def in_turns(calls: Calls) -> dict[str, list[float]]:
    """Returns the seconds per call of the calls that run here, in turns of about TURN seconds."""
    turns, counts = {}, {}
    for name, call in calls.items():
        try:
            call()
        except Exception as error:  # a package that is missing, or a call that it does not take
            print(f"    {name}: {type(error).__name__}: {str(error)[:120]}", flush=True)
            continue
        turn = partial(_turn, call)
        once = min(side_by_side({"": lambda turn=turn: turn(10)}, calls=1, rounds=2)[""]) / 10
        counts[name] = max(5, round(TURN / once))
        turns[name] = partial(turn, counts[name])
    seconds = side_by_side(turns, calls=1, rounds=ROUNDS)
    return {name: [each / counts[name] for each in times] for name, times in seconds.items()}


def _turn(call: Callable[[], Any], count: int) -> None:
    for _ in range(count):
        call()
    torch.cuda.synchronize()


def decoding(name: str) -> dict[str, Any]:
    """A shape on pages in bfloat16: automatic choice beside backends by name."""
    pool = Pool(SHAPES[name])
    chosen = explain_paged(pool.q, *pool.pools, **pool.tables, **pool.new).backend
    calls = {"attention": pool.call()} | {each: pool.call(backend=each) for each in ("triton_splitkv", "flash3")}
    return {"call": name, "chosen": chosen, "bytes": pool.bytes_read(), "seconds": in_turns(calls)}


def quantised() -> dict[str, Any]:
    """Decoding from quantised pages beside bfloat16, and the bytes that each reads."""
    calls, read = {}, {}
    for dtype in (None, "float8_e4m3fn", "int8", "int4"):
        pool, name = Pool(QUANTISED, dtype), dtype or "bfloat16"
        calls[name], read[name] = pool.call(), pool.bytes_read(dtype)
    return {"call": "64 x 8192, pages in", "read": read, "seconds": in_turns(calls)}


def appends() -> dict[str, Any]:
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
        calls[name] = _graph(partial(append_kv, *pool.pools, k, v, **pool.tables, **pool.scales, **options))
    return {"call": "append of 64 tokens, 100 in a CUDA graph", "seconds": in_turns(calls)}


def _graph(call: Callable[[], Any], count: int = 100) -> Callable[[], Any]:
    """Returns the replay of a CUDA graph of so many calls, which shows the GPU's time alone."""
    for _ in range(3):
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            call()
    return lambda: (graph.replay(), call)[0]  # ``call`` holds the tensors that the graph's kernels read


def cache(sequences: int, tokens: int) -> dict[str, Any]:
    """flash_attn_with_kvcache on a dense cache, 32/8 heads: ours beside flash-attn 2's and 3's own, one new token
    appended."""
    normal = partial(torch.randn, device="cuda", dtype=torch.bfloat16)
    q, k, v = normal(sequences, 1, 32, DIM), normal(sequences, 1, 8, DIM), normal(sequences, 1, 8, DIM)
    k_cache, v_cache = (normal(sequences, tokens, 8, DIM) for _ in range(2))
    lengths = torch.full((sequences,), tokens - 1, dtype=torch.int32, device="cuda")
    call = (q, k_cache, v_cache, k, v)
    options = {"cache_seqlens": lengths, "causal": True}
    calls: Calls = {"flash_attn_with_kvcache": partial(flash_attn.flash_attn_with_kvcache, *call, **options)}
    for name, package in (("flash-attn 2", "flash_attn"), ("FlashAttention-3", "flash_attn_interface")):
        try:
            calls[name] = partial(import_module(package).flash_attn_with_kvcache, *call, **options)
        except ImportError:
            print(f"    {name}: not installed", flush=True)
    read = 2 * sequences * tokens * 8 * DIM * 2
    return {"call": f"a cache of {sequences} x {tokens}", "bytes": read, "seconds": in_turns(calls)}


def host_time() -> dict[str, Any]:
    """flash_attn_func on a tiny call, whose host time is all: ours beside flash-attn's own and ``attention``."""
    q, k, v = (torch.randn(1, 64, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    calls: Calls = {
        "flash_attn_func": partial(flash_attn.flash_attn_func, q, k, v, causal=True),
        "attention": partial(attention, q, k, v, causal=True),
    }
    try:
        import flash_attn as package

        calls["flash-attn 2"] = partial(package.flash_attn_func, q, k, v, causal=True)
    except ImportError:
        pass
    with torch.no_grad():
        return {"call": "flash_attn_func, 1 x 64 tokens", "seconds": in_turns(calls)}


def in_jax() -> dict[str, Any]:
    """Decoding of 64 x 8192 from bfloat16 and float8 pages in JAX, jitted, beside torch."""
    import jax

    from jax_frontend import paged_attention as in_jax

    calls: Calls = {}
    for dtype in (None, "float8_e4m3fn"):
        pool, name = Pool(QUANTISED, dtype), dtype or "bfloat16"
        calls[f"torch, {name}"] = pool.call()
        tensors = {**pool.tables, **pool.scales}
        arrays = {key: jax.dlpack.from_dlpack(each) for key, each in tensors.items()}
        stored = [jax.dlpack.from_dlpack(each.view(torch.uint8) if dtype else each) for each in pool.pools]
        stored = [jax.lax.bitcast_convert_type(each, dtype) if dtype else each for each in stored]
        program = jax.jit(in_jax)
        run = partial(program, jax.dlpack.from_dlpack(pool.q), *stored, **arrays)
        calls[f"JAX, {name}"] = partial(_in_a_row, run)
    return {"call": "64 x 8192 in JAX", "in_a_row": JAX_CALLS, "seconds": in_turns(calls)}


def _in_a_row(run: Callable[[], Any], count: int = JAX_CALLS) -> None:
    """So many calls of JAX and a wait for the last; the time counts as one call and is divided in the report."""
    for _ in range(count):
        result = run()
    result.block_until_ready()


MEASURES: dict[str, Callable[[], dict[str, Any]]] = {
    **{name: partial(decoding, name) for name in SHAPES},
    "quantised": quantised,
    "appends": appends,
    "cache of 16": partial(cache, 16, 6000),
    "cache of 128": partial(cache, 128, 2048),
    "host": host_time,
    "jax": in_jax,
}


def main() -> None:
    """Measures and writes the results, or prints the report of a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--report", type=Path)
    parser.add_argument("--only", action="append", choices=MEASURES)
    options = parser.parse_args()
    if options.report:
        print(report(json.loads(options.report.read_text(encoding="utf-8"))))
        return
    result: dict[str, Any] = {"device": torch.cuda.get_device_name(), "environment": environment(), "rows": []}
    for name in options.only or MEASURES:
        try:
            result["rows"].append(MEASURES[name]())
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
            continue
        print("\n".join(lines(result["rows"][-1])), flush=True)
        torch.cuda.empty_cache()
        if options.json:
            options.json.write_text(json.dumps(result) + "\n", encoding="utf-8")
    print(report(result))


if __name__ == "__main__":
    main()
