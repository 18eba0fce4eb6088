"""Measures JAX's calls on a CPU: our own XLA operations, torch's kernels through the bridge, and jax.nn.

taskset -c 1 python -m benchmarks.jax_cpu            # prints a table
taskset -c 1 python -m benchmarks.jax_cpu --write    # also writes benchmarks/results/jax_cpu.json

On one core, because torch and XLA count their threads in different ways.

Each figure is a jitted call, the time of the call in Python included. The candidates of a call take turns in one
process. The rule in ``attn_core.selection.jax_on_cpu`` was set with a look at all of these calls, in an earlier run on
a busy machine. So its regret on them is no estimate for other calls.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jax_frontend
from attn_core import NoBackendError
from benchmarks.measure import environment, medians, side_by_side

RESULTS = Path(__file__).resolve().parent / "results" / "jax_cpu.json"
BRIDGED = ("sdpa_flash", "math", "flex")


class Shape(NamedTuple):
    """The shape of a call."""

    batch: int
    q_len: int
    kv_len: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str = "float32"


class Call(NamedTuple):
    """A measured call: its kind is a name in KINDS."""

    kind: str
    shape: Shape

    def __str__(self) -> str:
        batch, queries, keys, heads, kv_heads, width, dtype = self.shape
        lengths = f"{queries}" if queries == keys else f"{queries}:{keys}"
        return f"{self.kind} {batch}x{lengths} {heads}/{kv_heads}x{width} {dtype}"


def _documents(shape: Shape) -> dict[str, Any]:
    count = max(2, shape.q_len // 128)
    ends = np.linspace(0, shape.q_len, count + 1).astype(np.int32)
    longest = int(np.diff(ends).max())
    return {"seq_info": jax_frontend.SeqInfo(jnp.asarray(ends), jnp.asarray(ends), longest, longest), "causal": True}


KINDS: dict[str, Callable[[Shape], dict[str, Any]]] = {
    "full": lambda shape: {},
    "causal": lambda shape: {"causal": True},
    "window": lambda shape: {"causal": True, "window": max(8, shape.kv_len // 8)},
    "softcap": lambda shape: {"causal": True, "softcap": 30.0},
    "alibi": lambda shape: {"causal": True, "alibi_slopes": jnp.linspace(0.1, 1, shape.heads)},
    "sinks": lambda shape: {"causal": True, "sinks": jnp.linspace(-1, 1, shape.heads)},
    "padding": lambda shape: {"mask": jnp.arange(shape.kv_len)[None, None, None] < shape.kv_len - shape.kv_len // 8},
    "bias": lambda shape: {"bias": jnp.ones((1, shape.heads, shape.q_len, shape.kv_len), shape.dtype)},
    "packed": _documents,
}
JAX_NN = {"full": {}, "causal": {"is_causal": True}}


def calls() -> Iterator[Call]:
    """Yields the measured calls, small ones first in each kind."""
    for tokens, dtype in product((16, 64, 256, 512, 1024, 2048), ("float32", "bfloat16")):
        yield Call("causal", Shape(1, tokens, tokens, 8, 8, 64, dtype))
    for tokens in (32, 128, 384, 768):
        yield Call("causal", Shape(4, tokens, tokens, 8, 2, 64))
        yield Call("full", Shape(2, tokens, tokens, 12, 12, 64, "bfloat16" if tokens == 384 else "float32"))
    yield Call("causal", Shape(8, 512, 512, 8, 8, 64, "float32"))
    yield Call("causal", Shape(8, 512, 512, 8, 8, 64, "bfloat16"))
    yield Call("full", Shape(2, 1024, 77, 10, 10, 64))
    for (batch, keys), (heads, kv_heads, width), dtype in product(
        ((1, 512), (8, 2048)), ((8, 8, 64), (32, 8, 128)), ("float32", "bfloat16")
    ):
        yield Call("full", Shape(batch, 1, keys, heads, kv_heads, width, dtype))
    for kind, tokens in product(("window", "softcap", "alibi", "sinks", "padding", "bias", "packed"), (64, 512, 2048)):
        # Packed documents live in one row.
        yield Call(kind, Shape(1 if kind == "packed" or tokens > 512 else 2, tokens, tokens, 8, 8, 64))
        if tokens == 512:
            yield Call(kind, Shape(1, tokens, tokens, 16, 4, 128, "bfloat16"))


def candidates(call: Call, training: bool) -> dict[str, Callable[[], Any]]:
    """Returns functions that run the call once and wait for it, compiled, by the name of a backend or "jax.nn"."""
    shape, options = call.shape, KINDS[call.kind](call.shape)
    random = np.random.default_rng(0)
    rows = () if call.kind == "packed" else (shape.batch,)

    def normal(length: int, heads: int) -> Any:
        return jnp.asarray(random.standard_normal((*rows, length, heads, shape.head_dim)), shape.dtype)

    q, dout = normal(shape.q_len, shape.heads), normal(shape.q_len, shape.heads)
    k, v = normal(shape.kv_len, shape.kv_heads), normal(shape.kv_len, shape.kv_heads)
    functions: dict[str, Callable[..., Any]] = {}
    for backend in ("jax_xla", *BRIDGED):
        try:
            jax_frontend.explain(q, k, v, **options, backend=backend, needs_backward=training)
        except NoBackendError:
            continue
        if jax_frontend.explain(q, k, v, **options, backend=backend, needs_backward=training).backend is None:
            continue
        functions[backend] = lambda q, k, v, name=backend: jax_frontend.attention(q, k, v, **options, backend=name)
        if backend in BRIDGED:  # the choice among torch's kernels is their own order's
            break
    if call.kind in JAX_NN:
        functions["jax.nn"] = lambda q, k, v: jax.nn.dot_product_attention(q, k, v, **JAX_NN[call.kind])
    return {name: _runner(function, (q, k, v), dout if training else None) for name, function in functions.items()}


def _runner(function: Callable[..., Any], arrays: tuple[Any, ...], dout: Any) -> Callable[[], Any]:
    def gradients(arrays: tuple[Any, ...], dout: Any) -> Any:
        return jax.vjp(function, *arrays)[1](dout)

    if dout is None:
        run = jax.jit(function)
        return lambda: jax.block_until_ready(run(*arrays))
    train = jax.jit(gradients)
    return lambda: jax.block_until_ready(train(arrays, dout))


def measure(call: Call, training: bool) -> dict[str, Any]:
    """Returns the call's fields, and every candidate's seconds in each round."""
    runs = candidates(call, training)
    slowest = max(_seconds(run) for run in runs.values())
    repeats = max(1, min(200, int(0.004 / slowest)))
    seconds = side_by_side(runs, calls=repeats, rounds=5 if slowest > 0.05 else 9)
    return {"kind": call.kind, **call.shape._asdict(), "training": training, "name": str(call), "seconds": seconds}


def _seconds(run: Callable[[], Any]) -> float:
    run()
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def judge(measured: list[dict[str, Any]]) -> None:
    """Prints how far the automatic choice is from the fastest backend, in each direction."""
    for direction in (False, True):
        regrets = []
        for entry in measured:
            if entry["training"] is direction:
                times = {key: value for key, value in medians(entry["seconds"]).items() if key != "jax.nn"}
                regrets.append(times[chosen(entry)] / min(times.values()))
        mean = math.exp(statistics.fmean(map(math.log, regrets)))
        name = "training" if direction else "forward"
        print(f"{name}: {len(regrets)} calls, geomean {mean:.3f}, worst {max(regrets):.2f}")


def chosen(entry: dict[str, Any]) -> str:
    """Returns the backend that automatic choice takes for a measured call."""
    call = Call(entry["kind"], Shape(*(entry[field] for field in Shape._fields)))
    shape, options = call.shape, KINDS[call.kind](call.shape)
    rows = () if call.kind == "packed" else (shape.batch,)
    q, k = (
        jax.ShapeDtypeStruct((*rows, length, heads, shape.head_dim), shape.dtype)
        for length, heads in ((shape.q_len, shape.heads), (shape.kv_len, shape.kv_heads))
    )
    selection = jax_frontend.explain(q, k, k, **options, needs_backward=entry["training"])
    assert selection.backend is not None
    return selection.backend


def main() -> None:
    """Measures every call, or judges the last result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.name}")
    parser.add_argument("--judge", action="store_true", help="measure nothing; judge the choice on the written result")
    arguments = parser.parse_args()
    if arguments.judge:
        judge(json.loads(RESULTS.read_text())["calls"])
        return
    measured = []
    for training in (False, True):
        for call in calls():
            measured.append(measure(call, training))
            times = medians(measured[-1]["seconds"])
            print(f"{'training' if training else 'forward':8} {call!s:45}", end=" ")
            print(*(f"{name} {value * 1e6:.0f}" for name, value in times.items()), flush=True)
    judge(measured)
    if arguments.write:
        machine = {**environment(), "cores": len(os.sched_getaffinity(0))}
        RESULTS.write_text(json.dumps({"environment": machine, "calls": measured}, indent=1) + "\n")


if __name__ == "__main__":
    main()
