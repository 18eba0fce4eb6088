"""Measures on a CPU: the overhead of calls over torch's own, and the speed of jax.jit(attention) relative to jax.nn.

python -m benchmarks.cpu                  # prints a table
python -m benchmarks.cpu --write          # also writes benchmarks/results/cpu.json, and runs benchmarks.performance

Every figure is a difference or a ratio of candidates that take turns in one process.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import torch
import torch.nn.functional as functional

import jax_frontend
import torch_frontend
from benchmarks import dropins, performance
from benchmarks.measure import environment, median_difference, median_ratio, medians, side_by_side
from benchmarks.performance import TINY, cpu_table

ROOT = Path(__file__).resolve().parent.parent
LARGE = (1, 4096, 8, 64)
MIB = 2**20


def import_time() -> list[dict[str, Any]]:
    """Measures imports in fresh processes: attn_core with numpy, and each frontend after its framework."""
    collected = []
    for after, name, limit in (
        ("sys", "attn_core", 150.0),
        ("torch", "torch_frontend", 150.0),
        ("jax", "jax_frontend", 200.0),
    ):
        script = f"import time, {after}; began = time.perf_counter(); import {name}; print(time.perf_counter() - began)"
        runs = [
            subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True, check=True)
            for _ in range(7)
        ]
        seconds = {f"import {name}": [float(run.stdout) for run in runs]}
        value = medians(seconds)[f"import {name}"] * 1e3
        where = "in a fresh process" if after == "sys" else f"after import {after}"
        collected.append(_figure(f"import {name} {where}", "milliseconds", value, limit, "<=", seconds))
    return collected


def torch_overhead() -> list[dict[str, Any]]:
    """Measures the microseconds of attention above scaled_dot_product_attention, each in its own layout."""
    collected = []
    with _one_thread():
        for mode in ("no gradient", "forward, gradient recorded", "forward + backward"):
            seconds = side_by_side(_torch_candidates(mode), calls=2000, rounds=25)
            extra = median_difference(seconds, "attention", "torch") * 1e6
            limit = {"no gradient": 8.0, "forward, gradient recorded": 13.0}.get(mode)
            collected.append(_figure(f"torch call, {mode}", "microseconds above torch", extra, limit, "<=", seconds))
        seconds = side_by_side(_beside_the_kernel(), calls=2000, rounds=25)
        extra = median_difference(seconds, "attention", "kernel") * 1e6
        name = "torch call, no gradient, on the same tensors"
        collected.append(_figure(name, "microseconds above the kernel's op", extra, 6.0, "<=", seconds))
    return collected


def _beside_the_kernel() -> dict[str, Callable[[], Any]]:
    """Returns attention() and the op in which it ends, both on tensors in the layout of attention()."""
    rows = [torch.randn(TINY) for _ in range(3)]
    kernel, scale = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default, TINY[3] ** -0.5

    def bare() -> Any:
        views = (tensor.transpose(1, 2) for tensor in rows)
        return kernel(*views, 0.0, True, scale=scale)[0].transpose(1, 2)

    return {"kernel": bare, "attention": lambda: torch_frontend.attention(*rows, causal=True)}


@contextmanager
def _one_thread() -> Iterator[None]:
    """Limits torch to one thread, because waking a second thread takes unpredictable time on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _torch_candidates(mode: str) -> dict[str, Callable[[], Any]]:
    needs = mode != "no gradient"
    rows = [torch.randn(TINY, requires_grad=needs) for _ in range(3)]
    heads = [tensor.detach().transpose(1, 2).contiguous().requires_grad_(needs) for tensor in rows]
    dout = torch.randn(TINY)
    dout_heads = dout.transpose(1, 2).contiguous()

    def ours() -> Any:
        return torch_frontend.attention(*rows, causal=True)

    def theirs() -> Any:
        return functional.scaled_dot_product_attention(*heads, is_causal=True)

    if mode != "forward + backward":
        return {"torch": theirs, "attention": ours}
    return {
        "torch": lambda: torch.autograd.grad(theirs(), heads, dout_heads),
        "attention": lambda: torch.autograd.grad(ours(), rows, dout),
    }


def dropin_overhead() -> list[dict[str, Any]]:
    """Measures the microseconds of each drop-in above attention() on views of the same tensors, without gradients."""
    collected = []
    with _one_thread(), torch.no_grad():
        for name, pair in dropins.calls(TINY, "cpu", torch.float32).items():
            runs = {"attention": pair.attention, "drop-in": pair.dropin}
            raw = side_by_side(runs, calls=2000 // pair.times, rounds=25)
            seconds = {key: [value / pair.times for value in values] for key, values in raw.items()}
            extra = median_difference(seconds, "drop-in", "attention") * 1e6
            collected.append(_figure(f"drop-in: {name}", "microseconds above attention", extra, 10.0, "<=", seconds))
    hook, plain = _flax_calls()
    seconds = side_by_side({"attention": plain, "drop-in": hook}, calls=1000, rounds=25)
    extra = median_difference(seconds, "drop-in", "attention") * 1e6
    name = "drop-in: Flax's attention_fn under jax.jit"
    return [*collected, _figure(name, "microseconds above attention", extra, 10.0, "<=", seconds)]


def _flax_calls() -> tuple[Callable[[], Any], Callable[[], Any]]:
    from jax_frontend.flax import hook as flax_hook

    q = jnp.ones(TINY)
    attend = flax_hook.attention_fn(causal=True)
    hook = jax.jit(lambda q: attend(q, q, q))
    plain = jax.jit(lambda q: jax_frontend.attention(q, q, q, causal=True))
    return lambda: hook(q).block_until_ready(), lambda: plain(q).block_until_ready()


def jax_speed() -> list[dict[str, Any]]:
    """Measures the speed of jax.jit(attention) relative to jax.nn.dot_product_attention (xla), causal in float32."""
    generator = np.random.default_rng(0)
    q, k, v, dout = (jnp.asarray(generator.standard_normal(LARGE), jnp.float32) for _ in range(4))
    ours = partial(jax_frontend.attention, causal=True)
    theirs = partial(jax.nn.dot_product_attention, is_causal=True, implementation="xla")
    collected = []
    for what, limit, rounds in (("forward", 4.0, 7), ("forward + backward", 3.0, 5)):
        candidates = {"jax.nn xla": theirs, "attention": ours}
        runs = {name: _jax_run(function, what, (q, k, v, dout)) for name, function in candidates.items()}
        seconds = side_by_side(runs, calls=3, rounds=rounds)
        times = median_ratio(seconds, "attention", "jax.nn xla")
        shape = "1 x 4096, 8 heads x 64, float32, causal"
        collected.append(_figure(f"jax.jit, {what}, {shape}", "times jax.nn xla's speed", times, limit, ">=", seconds))
    return collected


def _jax_run(function: Callable[..., Any], what: str, arrays: tuple[Any, ...]) -> Callable[[], Any]:
    q, k, v, dout = arrays
    if what == "forward":
        compiled = jax.jit(function)
        return lambda: compiled(q, k, v).block_until_ready()

    def gradients(q: Any, k: Any, v: Any, dout: Any) -> Any:
        out, pull = jax.vjp(function, q, k, v)
        return out, pull(dout)

    both = jax.jit(gradients)
    return lambda: jax.block_until_ready(both(q, k, v, dout))


def bridge_cost() -> list[dict[str, Any]]:
    """Measures a jitted call through the bridge above an empty jitted call, and the memory of 10 000 calls."""
    q = jnp.ones(TINY)
    empty = jax.jit(lambda q, k, v: q + 0)
    bridged = jax.jit(partial(jax_frontend.attention, causal=True, backend="sdpa_flash"))
    runs = {
        "empty": lambda: empty(q, q, q).block_until_ready(),
        "attention": lambda: bridged(q, q, q).block_until_ready(),
    }
    with _one_thread():
        seconds = side_by_side(runs, calls=1000, rounds=25)
    extra = median_difference(seconds, "attention", "empty") * 1e6
    collected = [
        _figure("jax.jit call through the bridge", "microseconds above an empty jit call", extra, 40.0, "<=", seconds)
    ]
    process = psutil.Process()
    for _ in range(2000):
        runs["attention"]()
    before = process.memory_info().rss
    for _ in range(10_000):
        runs["attention"]()
    grown = (process.memory_info().rss - before) / MIB
    return [*collected, _figure("resident memory over 10 000 bridged calls", "MiB grown", grown, 1.0, "<=", {})]


def _figure(
    name: str, unit: str, value: float, limit: float | None, sense: str, seconds: dict[str, list[float]]
) -> dict[str, Any]:
    held = limit is None or (value <= limit if sense == "<=" else value >= limit)
    return {
        "name": name,
        "unit": unit,
        "value": value,
        "goal": None if limit is None else f"{sense} {limit:g}",
        "held": held,
        "median_microseconds": {key: value * 1e6 for key, value in medians(seconds).items()},
        "seconds": seconds,
    }


def main() -> int:
    """Measures everything. Exit code: 1 if a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--write", action="store_true", help="write benchmarks/results/cpu.json and docs/explanation/performance.md"
    )
    write = parser.parse_args().write
    figures = [*import_time(), *torch_overhead(), *dropin_overhead(), *bridge_cost(), *jax_speed()]
    result = {"environment": environment(), "cores": psutil.cpu_count(), "figures": figures}
    print(cpu_table(figures))
    if write:
        (ROOT / "benchmarks/results/cpu.json").write_text(json.dumps(result, indent=1) + "\n")
        performance.main(["--write"])
    return 0 if all(figure["held"] for figure in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
