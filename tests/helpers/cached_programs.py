"""Programs of JAX calls for its persistent compilation cache, built alike in every process.

python -m cached_programs FOLDER BACKEND      # compiles and runs all of them with a cache in FOLDER
prints a line for each program: its name, the cache's misses and hits, and the sum of the results.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import cpu_meshes
import jax
import jax.numpy as jnp
import numpy as np

from attn_core import SeqInfo
from jax_frontend import append_kv, attention, context_parallel_attention, linen, paged_attention

Program = tuple[Callable[..., Any], tuple[Any, ...]]


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


def rows(length: int = 10) -> tuple[jax.Array, ...]:
    return tuple(normal(at, 2, length, heads, 8) for at, heads in enumerate((4, 2, 2)))


def gradients(call: Callable[..., Any], *more: Any) -> Program:
    """The outputs and gradients of a call of q, k and v, and of further arguments without a gradient."""

    def run(q: Any, k: Any, v: Any, *more: Any) -> Any:
        results, pull = jax.vjp(lambda *qkv: call(*qkv, *more), q, k, v)
        return results, pull(jax.tree.map(jnp.cos, results))

    return run, (*rows(), *more)


def tangents(call: Callable[..., Any], *more: Any) -> Program:
    def run(q: Any, k: Any, v: Any, *more: Any) -> Any:
        return jax.jvp(lambda *qkv: call(*qkv, *more), (q, k, v), (k[:, :, [0, 1, 0, 1]], v, k))

    return run, (*rows(), *more)


def of_documents(backend: str) -> Program:
    """Packed rows whose offsets are traced."""

    def call(q: Any, k: Any, v: Any, offsets: Any) -> Any:
        flat = (each.reshape(20, *each.shape[2:]) for each in (q, k, v))
        return attention(*flat, causal=True, seq_info=SeqInfo(offsets, offsets, 12, 12), backend=backend)

    return gradients(call, jnp.asarray([0, 7, 12, 20], jnp.int32))


def of_pages(backend: str) -> Program:
    """A step of decoding: one new token of each sequence, then attention."""

    def run(q: Any, k: Any, v: Any, table: Any, lengths: Any) -> Any:
        tables = {"block_table": table, "seq_lens": lengths}
        pools = append_kv(jnp.zeros((4, 4, 2, 8)), jnp.zeros((4, 4, 2, 8)), k[:, 0], v[:, 0], **tables)
        return pools, paged_attention(q[:, 0], *pools, **tables, backend=backend)

    return run, (*rows(), jnp.asarray([[0, 2], [3, 1]], jnp.int32), jnp.asarray([5, 3], jnp.int32))


def of_a_layer(backend: str) -> Program:
    """A step of Flax's ``decode`` cache."""
    layer = linen.Attention(4, num_kv_heads=2, head_dim=8, causal=True, decode=True, backend=backend, parent=None)
    variables = jax.jit(layer.init)(jax.random.key(0), normal(0, 2, 6, 16))
    return partial(layer.apply, mutable=["cache"]), (variables, normal(1, 2, 1, 16))


def over_devices(backend: str) -> Program:
    """Context parallelism over two devices, forward and gradients."""
    mesh = cpu_meshes.mesh((2,), ("x",))
    shared = {"mesh": mesh, "axis_name": "x", "strategy": "ring", "layout": "zigzag", "causal": True, "window": 4}

    def call(q: Any, k: Any, v: Any) -> Any:
        return context_parallel_attention(q, k, v, **shared, backend=backend)

    return gradients(call)


def programs(backend: str) -> dict[str, Program]:
    """The programs by name, each a function and its arguments."""
    numbers = np.random.default_rng(5).integers(0, 3, (2, 10), np.int32)
    weights, call = abs(normal(8, 2, 10)), partial(attention, backend=backend)
    by_row = lambda s, b, h, i, j, weights: s * weights[b, j]  # noqa: E731
    sinks = normal(9, 4)
    return {
        "sinks and largest logits": gradients(
            lambda q, k, v, sinks: call(q, k, v, causal=True, sinks=sinks, return_max_logit=True), sinks
        ),
        "segments": gradients(
            lambda q, k, v, ids: call(q, k, v, q_segment_ids=ids, q_positions=ids, window=(1, 1)), jnp.asarray(numbers)
        ),
        "a traced window": tangents(lambda q, k, v, window: call(q, k, v, causal=True, window=window), jnp.int32(3)),
        "a traced scale": gradients(lambda q, k, v, scale: call(q, k, v, softcap=3.0, scale=scale), jnp.float32(0.3)),
        "arrays of a score function": gradients(
            lambda q, k, v, weights: call(q, k, v, score_mod=by_row, aux=(weights,)), weights
        ),
        "forward mode": tangents(lambda *qkv: call(*qkv, causal=True, return_lse=True)),
        "documents": of_documents(backend),
        "pages": of_pages(backend),
        "a layer's cache": of_a_layer(backend),
        "context parallelism": over_devices(backend),
    }


def main(folder: str, backend: str) -> None:
    events: list[str] = []
    built = programs(backend)
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    jax.monitoring.register_event_listener(lambda event, **_: events.append(event))
    for name, (function, arguments) in built.items():
        events.clear()
        results = jax.block_until_ready(jax.jit(function)(*arguments))
        counts = [events.count(f"/jax/compilation_cache/cache_{what}") for what in ("misses", "hits")]
        print(name, *counts, sum(float(abs(np.asarray(leaf)).sum()) for leaf in jax.tree.leaves(results)), sep="|")


if __name__ == "__main__":
    main(*sys.argv[1:])
