"""Measures forward mode on a GPU: the fused kernel beside plain operations, in torch and in JAX.

python -m benchmarks.forward_mode --json forward_mode.json     # minutes; needs a GPU. JAX is measured if it has the GPU
python -m benchmarks.forward_mode --json forward_mode.json --only "8 documents"    # measures it anew, keeps other rows
python -m benchmarks.forward_mode --tiles                      # the fused kernel alone, with other tiles

The candidates of a call take turns in one process. Each makes a few calls before it waits, so the host's time hides
behind the device's. Rates count visible pairs alone: 4 operations per pair and channel for a forward, 12 for a forward
with the tangents of q, k and v. Candidates:

    kernel                  ``triton_jvp``: out, lse, dout and dlse in one pass
    tangents                the same kernel, without out and lse, as the frontends call it
    forward                 the same kernel without tangents
    FlexAttention           the forward of torch's compiled FlexAttention, another Triton kernel
    torch.func.jvp          of ``attention``: the usual forward kernel, then the tangents
    jax.jvp                 of ``attention``, jitted

and in rows of at most LONGEST_OF_PLAIN tokens:

    math                    ``torch.func.jvp`` of ``attention(backend="math")``, block by block
    plain torch             ``torch.func.jvp`` of matrix products and a softmax
    jax_xla                 ``jax.jvp`` of ``attention(backend="jax_xla")``, jitted
    jax.nn                  ``jax.jvp`` of ``jax.nn.dot_product_attention``, jitted
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import torch

from attn_core.backends.shared.programs import triton as triton_launches
from attn_core.backends.triton_jvp import backend as triton_jvp
from attn_core.backends.triton_jvp import launches
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Inputs, Tangents
from benchmarks.measure import environment, median_ratio, medians, side_by_side
from benchmarks.stored_rows import continued, put
from torch_frontend import SeqInfo, attention, explain

CALLS, ROUNDS = 6, 5
LONGEST_OF_PLAIN = 2048
"""The most tokens of a row in which plain operations are measured, too: they take up to a hundred times as long."""
BESIDE_FLEX = 4096
"""The tokens of the rows in which FlexAttention is compiled, which takes many seconds."""
Calls = dict[str, Callable[[], Any]]
COMMON = {"heads": 16, "kv_heads": 16, "dim": 128, "batch": 2, "tokens": 2048, "dtype": "bfloat16"}
ROWS: dict[str, dict[str, Any]] = {
    **{f"causal, {tokens}": {"tokens": tokens, "causal": True} for tokens in (1024, 2048, 4096, 8192, 16384)},
    "whole, 4096": {"tokens": 4096},
    "head_dim 64": {"dim": 64, "heads": 32, "kv_heads": 32, "causal": True, "tokens": 4096},
    "head_dim 256": {"dim": 256, "heads": 8, "kv_heads": 8, "causal": True, "tokens": 4096},
    "grouped heads": {"kv_heads": 4, "causal": True, "tokens": 4096},
    "window of 1024": {"causal": True, "window": 1024, "tokens": 8192},
    "softcap": {"causal": True, "softcap": 30.0, "tokens": 4096},
    "8 documents": {"causal": True, "documents": 8, "tokens": 8192, "batch": 1},
    "float32": {"causal": True, "dtype": "float32", "tokens": 2048, "dim": 64},
}
FEWEST = {"tokens": 64, "batch": 1, "heads": 2, "kv_heads": 2, "dim": 16}
"""Sizes for a trial on a CPU."""


def call_of(row: dict[str, Any], device: str) -> tuple[list[torch.Tensor], list[torch.Tensor], dict[str, Any]]:
    """q, k and v, their tangents, and the options of ``attention``."""
    generator = torch.Generator(device).manual_seed(0)
    packed = row.get("documents")
    rows = (1,) if packed else (row["batch"],)

    def tensors() -> list[torch.Tensor]:
        shapes = [(*rows, row["tokens"], row[heads], row["dim"]) for heads in ("heads", "kv_heads", "kv_heads")]
        return [
            torch.randn(shape, generator=generator, device=device).to(getattr(torch, row["dtype"])) for shape in shapes
        ]

    options = {name: row[name] for name in ("causal", "window", "softcap") if name in row}
    if packed:
        options["seq_info"] = SeqInfo.from_lengths([row["tokens"] // packed] * packed)
    return tensors(), tensors(), options


def visible_pairs(row: dict[str, Any]) -> int:
    """The visible pairs of all batch rows and heads."""
    documents = row.get("documents", 1)
    length = row["tokens"] // documents
    keys = [min(at + 1, row.get("window", length)) if row.get("causal") else length for at in range(length)]
    return int(row["batch"]) * int(row["heads"]) * documents * sum(keys)


def operations(row: dict[str, Any], name: str) -> int:
    """The floating-point operations of a candidate, of which every other operation of plain code is left out."""
    per_channel = 4 if name in ("forward", "FlexAttention") else 12
    return per_channel * int(row["dim"]) * visible_pairs(row)


def of_kernel(qkv: list[torch.Tensor], moved: list[torch.Tensor], options: dict[str, Any]) -> Calls:
    """The kernel by itself; no candidates if it cannot run here."""
    selection = explain(*qkv, **options, return_lse=True, backend="triton_jvp")
    if selection.backend is None:
        return {}
    spec, inputs, tangents = _operands(selection.spec, qkv, moved, options)
    return {
        "kernel": lambda: triton_jvp.jvp(spec, inputs, tangents, primals=True),
        "tangents": lambda: triton_jvp.jvp(spec, inputs, tangents),
        "forward": lambda: triton_jvp.forward(spec, inputs),
    }


def _operands(
    spec: AttentionSpec, qkv: list[torch.Tensor], moved: list[torch.Tensor], options: dict[str, Any]
) -> tuple[AttentionSpec, Inputs, Tangents]:
    if not spec.packed:
        return spec, Inputs(*qkv), Tangents(*moved)
    offsets = torch.from_numpy(options["seq_info"].cu_seqlens_q).to(qkv[0].device)
    inputs = Inputs(*(each[0] for each in qkv), cu_seqlens_q=offsets, cu_seqlens_k=offsets)
    return spec, inputs, Tangents(*(each[0] for each in moved))


def of_flex(qkv: list[torch.Tensor], options: dict[str, Any]) -> Calls:
    """torch's FlexAttention, compiled, for causal calls and calls without a mask."""
    if not qkv[0].is_cuda or set(options) - {"causal"} or qkv[0].shape[1] != BESIDE_FLEX:
        return {}
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.reset()
    compiled, blocks = torch.compile(flex_attention), None
    q, k, v = (tensor.transpose(1, 2) for tensor in qkv)
    if options.get("causal"):
        causal = lambda b, h, q, k: q >= k  # noqa: E731
        blocks = create_block_mask(causal, None, None, q.shape[2], k.shape[2], device="cuda")
    return {"FlexAttention": lambda: compiled(q, k, v, block_mask=blocks, enable_gqa=True)}


def of_torch(row: dict[str, Any], qkv: list[torch.Tensor], moved: list[torch.Tensor], options: dict[str, Any]) -> Calls:
    """``torch.func.jvp`` of ``attention`` and of plain operations."""

    def along(function: Callable[..., Any]) -> Callable[[], Any]:
        return lambda: torch.func.jvp(function, tuple(qkv), tuple(moved))

    calls = {"torch.func.jvp": along(lambda *a: attention(*a, **options, return_lse=True))}
    if row["tokens"] > LONGEST_OF_PLAIN:
        return calls
    calls["math"] = along(lambda *a: attention(*a, **options, return_lse=True, backend="math"))
    if not set(options) - {"causal"}:
        calls["plain torch"] = along(lambda *a: plain(*a, causal=bool(options.get("causal"))))
    return calls


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse in matrix products and a softmax, of ``[batch, tokens, heads, dim]``."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (each.transpose(1, 2) for each in (q, k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)))
    scores = (q @ k.mT).float() * q.shape[-1] ** -0.5
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    lse = scores.logsumexp(-1)
    return ((scores - lse[..., None]).exp().to(v.dtype) @ v).transpose(1, 2), lse


def of_jax(row: dict[str, Any], qkv: list[torch.Tensor], moved: list[torch.Tensor], options: dict[str, Any]) -> Calls:
    """``jax.jvp`` of ``attention`` and of ``jax.nn``, jitted; no candidates if JAX has no such device."""
    try:
        import jax

        import jax_frontend
    except ImportError:
        return {}
    if jax.default_backend() != {"cuda": "gpu"}.get(qkv[0].device.type, "cpu"):
        return {}
    arrays, ways = (tuple(jax.dlpack.from_dlpack(each) for each in group) for group in (qkv, moved))

    def along(function: Callable[..., Any]) -> Callable[[], Any]:
        program = jax.jit(lambda primals, tangents: jax.jvp(function, primals, tangents))
        return lambda: program(arrays, ways)

    calls = {"jax.jvp": along(lambda *a: jax_frontend.attention(*a, **options, return_lse=True))}
    if row["tokens"] > LONGEST_OF_PLAIN:
        return calls
    calls["jax_xla"] = along(lambda *a: jax_frontend.attention(*a, **options, return_lse=True, backend="jax_xla"))
    if not set(options) - {"causal"}:
        causal = bool(options.get("causal"))
        calls["jax.nn"] = along(lambda *a: jax.nn.dot_product_attention(*a, is_causal=causal))
    return calls


def in_a_row(name: str, call: Callable[[], Any], device: str, count: int) -> Callable[[], None]:
    """So many calls, and then a wait for the last one."""
    of_jax_too = name in ("jax.jvp", "jax_xla", "jax.nn")

    def run() -> None:
        for _ in range(count):
            result = call()
        if of_jax_too:
            import jax

            jax.block_until_ready(result)
        elif device == "cuda":
            torch.cuda.synchronize()

    return run


def peak(call: Callable[[], Any]) -> int | None:
    """The bytes that a call of torch allocates at most beside its operands; None on a CPU."""
    if not torch.cuda.is_available():
        return None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def measured(name: str, row: dict[str, Any], device: str, count: int) -> dict[str, Any]:
    """Times the candidates of a row."""
    qkv, moved, options = call_of(row, device)
    with torch.no_grad():
        of_torchs = of_kernel(qkv, moved, options) | of_flex(qkv, options) | of_torch(row, qkv, moved, options)
        calls = of_torchs | of_jax(row, qkv, moved, options)
        memory = {each: peak(call) for each, call in of_torchs.items()}
        turns = {each: in_a_row(each, call, device, count) for each, call in calls.items()}
        seconds = side_by_side(turns, calls=1, rounds=ROUNDS)
    selection = explain(*qkv, **options)
    seconds = {each: [time / count for time in times] for each, times in seconds.items()}
    facts = {"call": name, "row": row, "forward": selection.backend, "forward mode": selection.forward_mode}
    return facts | {"operations": {each: operations(row, each) for each in calls}, "seconds": seconds, "bytes": memory}


def shown(result: dict[str, Any]) -> str:
    """A line for each candidate of a row: its time, its rate and its memory."""
    lines = [f"{result['call']} (forward: {result['forward']}, tangents: {result['forward mode']})"]
    for name, seconds in medians(result["seconds"]).items():
        rate, memory = result["operations"][name] / seconds / 1e12, result["bytes"].get(name)
        beside = "" if memory is None else f"  {memory / 2**20:8.0f} MiB"
        lines.append(f"    {name:<16}{1e3 * seconds:9.3f} ms {rate:7.1f} TFLOP/s{beside}")
    for other in ("forward", "FlexAttention"):
        if {"kernel", other} <= set(result["seconds"]):
            times = median_ratio(result["seconds"], "kernel", other)
            share = times * result["operations"]["kernel"] / result["operations"][other]
            lines.append(f"    kernel at {share:.2f} of the rate of {other}")
    return "\n".join(lines)


def tiles_of(row: dict[str, Any], device: str, count: int) -> list[dict[str, Any]]:
    """Times the kernel with other tiles, the fastest first; tiles that do not fit are left out."""
    qkv, moved, options = call_of(row, device)
    spec = explain(*qkv, **options, return_lse=True, backend="triton_jvp").spec
    spec, inputs, tangents = _operands(spec, qkv, moved, options)
    usual, found = launches.tiles, []
    channels = launches.width(row["dim"])
    sizes = product((64, 128), (32, 64, 128), {min(channels, 128), 64}, (4, 8), (1, 2, 3))
    for queries, keys, values, warps, stages in sizes:
        tile = launches.Tiles(queries, keys, values, warps, stages, 0)
        launches.tiles = lambda spec, shared, tile=tile: tile  # type: ignore[misc]
        triton_jvp._settings.cache_clear()
        triton_launches._launches.clear()
        call = in_a_row("kernel", lambda: triton_jvp.jvp(spec, inputs, tangents), device, count)
        try:
            seconds = side_by_side({"kernel": call}, calls=1, rounds=3)["kernel"]
        except Exception as error:  # too much shared memory, or a layout that Triton cannot compile
            print(f"    {tuple(tile)[:5]}: {type(error).__name__}", flush=True)
            continue
        rate = operations(row, "tangents") / (min(seconds) / count) / 1e12
        found.append({"tile": tile._asdict(), "tflops": rate})
    launches.tiles = usual
    triton_jvp._settings.cache_clear()
    triton_launches._launches.clear()
    return sorted(found, key=lambda each: -each["tflops"])


def main(arguments: list[str] | None = None) -> None:
    """Measures every row, and prints or writes the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="writes the times of every round")
    parser.add_argument("--only", action="append", help="measures this row, and keeps other rows of --json; repeatable")
    parser.add_argument("--tiles", action="store_true", help="measures the kernel with other tiles instead")
    parser.add_argument("--trial", action="store_true", help="tiny sizes, on a CPU: shows that the script runs")
    parsed = parser.parse_args(arguments)
    device, count = ("cpu", 1) if parsed.trial else ("cuda", CALLS)
    where = "cpu" if parsed.trial else torch.cuda.get_device_name()
    now = environment()
    result: dict[str, Any] = {"device": where, "environment": now, "calls": []}
    if parsed.only and not parsed.tiles and parsed.json is not None and parsed.json.exists():
        result = continued(parsed.json, result)
    for name in parsed.only or ():
        if name not in ROWS:
            parser.error(f"--only {name!r}: rows are {', '.join(ROWS)}")
    for name, fields in ROWS.items():
        if parsed.only and name not in parsed.only:
            continue
        row = {**COMMON, **fields, **(FEWEST if parsed.trial else {})}
        if parsed.tiles:
            tiled = {"call": name, "row": row, "tiles": tiles_of(row, device, count)}
            put(result, tiled, now["date"])
            best = [f"    {tuple(each['tile'].values())[:5]} {each['tflops']:.1f}" for each in tiled["tiles"][:5]]
            print("\n".join([name, *best]), flush=True)
            continue
        times = measured(name, row, device, count)
        put(result, times, now["date"])
        print(shown(times), flush=True)
        _write(parsed.json, result)
        if device == "cuda":
            torch.cuda.empty_cache()
    _write(parsed.json, result)


def _write(path: Path | None, result: dict[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(result) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
