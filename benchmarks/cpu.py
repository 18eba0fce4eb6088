"""Measures on a CPU: imports, the overhead of drop-ins and of the bridge, and jax.jit(attention) beside jax.nn.

python -m benchmarks.cpu                                         # prints a table
python -m benchmarks.cpu --json benchmarks/results/cpu.json      # also writes every round's times

Every figure is a difference or a ratio of candidates that take turns in one process.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import torch

import jax_frontend
import torch_frontend
from benchmarks import tables
from benchmarks.measure import (
    Calls,
    Row,
    Seconds,
    environment,
    measure,
    median_difference,
    median_ratio,
    medians,
    parser,
    write,
)
from jax_frontend.flax import hook as flax_hook
from torch_frontend import finetrainers, unsloth
from torch_frontend.huggingface import attention as huggingface_attention
from torch_frontend.unsloth import softcapping

TINY, LARGE = (1, 5, 2, 16), (1, 4096, 8, 64)
"""Batch, length, heads and head_dim: of small calls, whose time is almost only the call's overhead, and of JAX's."""
IN_A_BLOCK = 100
TURN, ROUNDS = 0.02, 25


def imports() -> Iterator[Row]:
    """Measures imports in fresh processes: attn_core with numpy, and each frontend after its framework."""
    for after, name, limit in (
        ("sys", "attn_core", 150.0),
        ("torch", "torch_frontend", 150.0),
        ("jax", "jax_frontend", 200.0),
    ):
        script = f"import time, {after}; began = time.perf_counter(); import {name}; print(time.perf_counter() - began)"
        command = [sys.executable, "-P", "-c", script]
        runs = [subprocess.run(command, capture_output=True, text=True, check=True).stdout for _ in range(7)]
        seconds = {f"import {name}": [float(each) for each in runs]}
        value = medians(seconds)[f"import {name}"] * 1e3
        where = "in a fresh process" if after == "sys" else f"after import {after}"
        yield figure(f"import {name} {where}", "milliseconds", value, f"<= {limit:g}", seconds)


def drop_ins() -> Iterator[Row]:
    """Measures each drop-in above attention() on views of the same tensors, without gradients."""
    batch, length, heads, dim = TINY
    q, k, v = (torch.randn(TINY).transpose(1, 2) for _ in range(3))  # the hosts' layout
    config = unsloth.AttentionConfig(backend="sdpa", n_kv_heads=heads, n_groups=1)
    context = unsloth.AttentionContext(
        bsz=batch, q_len=length, kv_seq_len=length, n_heads=heads, head_dim=dim, requires_grad=False
    )
    layer = SimpleNamespace(
        is_causal=True,
        training=False,
        config=SimpleNamespace(query_pre_attn_scalar=dim, attn_logit_softcapping=30.0),
    )
    mask = softcapping.create_flex_attention_causal_mask(length)

    def plain(**options: Any) -> Any:  # a direct call on these tensors
        return torch_frontend.attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), causal=True, **options)

    def in_a_block(block: Callable[[], Any], call: Callable[[], Any]) -> None:
        with block():
            for _ in range(IN_A_BLOCK):
                call()

    def dispatch() -> Any:
        return finetrainers.attention_dispatch(q, k, v, is_causal=True)

    def in_the_hosts_layout() -> Any:
        return plain(alignment="top_left").transpose(1, 2)

    kernels = partial(torch_frontend.use_backend, "flash3", "flash4", "flash2", "sdpa_flash")
    provider = partial(finetrainers.attention_provider, "flash")
    run_attention = partial(unsloth.run_attention, config=config, context=context, Q=q, K=k, V=v)
    capped = partial(softcapping.slow_attention_softcapping, q, k, v, mask, layer, batch, length)
    pairs: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "Unsloth's run_attention": (run_attention, plain),
        "Unsloth's softcapped attention": (capped, partial(plain, softcap=30.0)),
        "Finetrainers' attention_dispatch": (dispatch, in_the_hosts_layout),
        "Finetrainers' attention_dispatch in a provider's block": (
            partial(in_a_block, provider, dispatch),
            partial(in_a_block, kernels, in_the_hosts_layout),
        ),
        "transformers' attention interface": (partial(huggingface_attention.attend, layer, q, k, v, None), plain),
    }
    for name, (drop_in, attention) in pairs.items():
        calls = {"attention": attention, "drop-in": drop_in}
        times = IN_A_BLOCK if name.endswith("block") else 1
        with torch.no_grad():
            yield extra(f"drop-in: {name}", "attention", "drop-in", "attention", "<= 10", calls, times)
    x, attend = jnp.ones(TINY), flax_hook.attention_fn(causal=True)
    hook = jax.jit(lambda x: attend(x, x, x))
    bare = jax.jit(lambda x: jax_frontend.attention(x, x, x, causal=True))
    calls = {"attention": _waiting(bare, x), "drop-in": _waiting(hook, x)}
    yield extra("drop-in: Flax's attention_fn under jax.jit", "attention", "drop-in", "attention", "<= 10", calls)


def _waiting(program: Callable[..., Any], *arrays: Any) -> Callable[[], Any]:
    """Returns a call that waits for its result, so that the host's time for it counts."""
    return lambda: jax.block_until_ready(program(*arrays))


def bridge() -> Iterator[Row]:
    """Measures a jitted call through the bridge above an empty jitted call, and the memory of 10 000 calls."""
    q = jnp.ones(TINY)
    bridged = jax.jit(partial(jax_frontend.attention, causal=True, backend="sdpa_flash"))
    calls = {"empty": _waiting(jax.jit(lambda q, k, v: q + 0), q, q, q), "attention": _waiting(bridged, q, q, q)}
    name = "jax.jit call through the bridge"
    yield extra(name, "an empty jit call", "attention", "empty", "<= 40", calls)
    process = psutil.Process()
    for _ in range(2000):
        calls["attention"]()
    before = process.memory_info().rss
    for _ in range(10_000):
        calls["attention"]()
    grown = (process.memory_info().rss - before) / 2**20
    yield figure("resident memory over 10 000 bridged calls", "MiB grown", grown, "<= 1", {})


def jax_speed() -> Iterator[Row]:
    """Measures the speed of jax.jit(attention) relative to jax.nn.dot_product_attention (xla), causal in float32."""
    generator = np.random.default_rng(0)
    arrays = [jnp.asarray(generator.standard_normal(LARGE), jnp.float32) for _ in range(4)]
    candidates = {
        "jax.nn xla": partial(jax.nn.dot_product_attention, is_causal=True, implementation="xla"),
        "attention": partial(jax_frontend.attention, causal=True),
    }

    def both(attend: Callable[..., Any], q: Any, k: Any, v: Any, dout: Any) -> Any:
        out, pull = jax.vjp(attend, q, k, v)
        return out, pull(dout)

    for what, goal in (("forward", ">= 4"), ("forward + backward", ">= 3")):
        calls = {
            name: _waiting(jax.jit(attend), *arrays[:3])
            if what == "forward"
            else _waiting(jax.jit(partial(both, attend)), *arrays)
            for name, attend in candidates.items()
        }
        seconds = measure(calls, turn=1.0, rounds=7)["seconds"]
        name = f"jax.jit, {what}, 1 x 4096, 8 heads x 64, float32, causal"
        times = median_ratio(seconds, "attention", "jax.nn xla")
        yield figure(name, "times jax.nn xla's speed", times, goal, seconds)


def extra(name: str, above: str, candidate: str, baseline: str, goal: str | None, calls: Calls, times: int = 1) -> Row:
    """Measures the microseconds of a candidate above its baseline; a call of both is ``times`` calls of attention."""
    seconds = measure(calls, turn=TURN, rounds=ROUNDS)["seconds"]
    seconds = {key: [each / times for each in values] for key, values in seconds.items()}
    value = median_difference(seconds, candidate, baseline) * 1e6
    return figure(name, f"microseconds above {above}", value, goal, seconds)


def figure(name: str, unit: str, value: float, goal: str | None, seconds: Seconds) -> Row:
    """Returns a figure; the goal is text, such as ``"<= 8"``."""
    microseconds = {key: each * 1e6 for key, each in medians(seconds).items()}
    held = goal is None or (value <= float(goal[3:]) if goal[:2] == "<=" else value >= float(goal[3:]))
    found = {"name": name, "unit": unit, "value": value, "goal": goal, "held": held}
    return {**found, "median_microseconds": microseconds, "seconds": seconds}


def main(arguments: list[str] | None = None) -> int:
    """Measures everything. Exit code: 1 if a goal is missed."""
    parsed = parser(__doc__).parse_args(arguments)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # waking a second thread takes unpredictable time on a busy machine
    figures = [*imports(), *drop_ins(), *bridge()]
    torch.set_num_threads(threads)
    figures += jax_speed()
    result = {"environment": environment(), "cores": psutil.cpu_count(), "figures": figures}
    write(parsed.json, result)
    print(tables.cpu(result))
    return 0 if all(each["held"] for each in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
