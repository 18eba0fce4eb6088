"""The calls of a sweep as jitted JAX functions: on a backend of ours, and on jax.nn.dot_product_attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import Any

import numpy as np

from attn_core.call.masks import band
from attn_core.call.seq_info import SeqInfo
from attn_core.call.spec import AttentionSpec
from attn_core.cli.bench_timing import Run
from attn_core.selection.sweep import SweepCase

JAX_NN, JAX_NN_CUDNN = "jax.nn", "jax.nn cudnn"
"""The names under which a caller runs JAX's own function, in XLA and in cuDNN."""

PAUSE = 0.005
"""Seconds between two backends on a CPU. After a call of torch, OpenMP's threads spin on XLA's cores for some of it."""


def has_jax_nn(spec: AttentionSpec) -> bool:
    """Returns whether jax.nn.dot_product_attention has arguments for the call."""
    if spec.packed or spec.sinks or spec.softcap is not None or spec.alibi_shape is not None:
        return False
    if spec.value_dim != spec.head_dim:
        return False
    # is_causal and local_window_size are aligned top left.
    return spec.q_len == spec.kv_len or band(spec).hides_nothing(spec.q_len, spec.kv_len)


def caller(case: SweepCase, spec: AttentionSpec, names: Sequence[str]) -> Run:
    """Returns a function that runs the call on a backend by name.

    The results are ``(out,)``, with a backward ``(out, dq, dk, dv)``. Under the names JAX_NN and JAX_NN_CUDNN it runs
    JAX's own function, if ``has_jax_nn(spec)``. On a CPU the function waits for its results and has the attribute
    ``pause``, the seconds to wait before another backend's turn; on a GPU it has the attribute ``wait``, which waits
    for results.

    Args:
        names: the backends to compile, at the same time in several threads. The function raises the error of a backend
            that does not compile.
    """
    import jax

    on_cpu = jax.default_backend() == "cpu"
    random = np.random.default_rng(0)

    def normal(*shape: int, dtype: str = spec.dtype) -> Any:
        return jax.numpy.asarray(random.standard_normal(shape, np.float32), dtype)

    row = () if spec.packed else (spec.batch,)
    learned = (
        normal(*row, spec.q_len, spec.num_heads, spec.head_dim),
        normal(*row, spec.kv_len, spec.num_kv_heads, spec.head_dim),
        normal(*row, spec.kv_len, spec.num_kv_heads, spec.value_dim),
    )
    slopes = 2.0 ** (-8.0 * np.arange(1, spec.num_heads + 1, dtype=np.float32) / spec.num_heads)
    constants = {
        "mask": None if spec.mask_shape is None else jax.numpy.asarray(_mask(spec.mask_shape)),
        "bias": None if spec.bias_shape is None else normal(*spec.bias_shape),
        "alibi_slopes": None if spec.alibi_shape is None else jax.numpy.asarray(slopes),
        "sinks": normal(spec.num_heads, dtype="float32") if spec.sinks else None,
        "seq_info": None if case.lengths is None else SeqInfo.from_lengths(case.lengths, array=jax.numpy.asarray),
    }
    dout = normal(*spec.out_shape)

    def compiled(backend: str) -> Any:
        own = backend in (JAX_NN, JAX_NN_CUDNN)
        call = _jax_nn(spec, "xla" if backend == JAX_NN else "cudnn") if own else _ours(spec, backend)

        def forward(learned: Any, constants: Any, dout: Any) -> Any:
            return (call(*learned, **constants),)

        def training(learned: Any, constants: Any, dout: Any) -> Any:
            out, pull = jax.vjp(lambda *tensors: call(*tensors, **constants), *learned)
            return (out, *pull(dout))

        with tracing:
            program = jax.jit(training if spec.needs_backward else forward).lower(learned, constants, dout)
        return program.compile()

    tracing = Lock()  # because backends record or build kernels while they are traced
    with ThreadPoolExecutor() as pool:
        programs = {name: pool.submit(compiled, name) for name in names}

    def run(backend: str) -> tuple[Any, ...]:
        results: tuple[Any, ...] = programs[backend].result()(learned, constants, dout)
        return jax.block_until_ready(results) if on_cpu else results  # type: ignore[no-any-return]

    if on_cpu:
        run.pause = PAUSE  # type: ignore[attr-defined]
    else:
        run.wait = jax.block_until_ready  # type: ignore[attr-defined]
    return run


def _ours(spec: AttentionSpec, backend: str) -> Callable[..., Any]:
    from jax_frontend import attention

    keywords: dict[str, Any] = {
        name: getattr(spec, name) for name in ("causal", "alignment", "window", "softcap", "scale")
    }

    def call(q: Any, k: Any, v: Any, **constants: Any) -> Any:
        return attention(q, k, v, **constants, **keywords, backend=backend)

    return call


def _jax_nn(spec: AttentionSpec, implementation: str) -> Callable[..., Any]:
    import jax

    left, right = spec.window
    bounded = (spec.kv_len if left is None else left, spec.kv_len if right is None else right)
    keywords: dict[str, Any] = {
        "implementation": implementation,
        "scale": spec.scale,
        "is_causal": spec.causal and spec.q_len == spec.kv_len,
        "local_window_size": bounded if spec.window != (None, None) and spec.q_len == spec.kv_len else None,
    }

    def call(q: Any, k: Any, v: Any, mask: Any, bias: Any, **_: Any) -> Any:
        # XLA would round float32 products to TF32 on a GPU. Our backends do not.
        with jax.default_matmul_precision("highest" if spec.dtype == "float32" else "default"):
            return jax.nn.dot_product_attention(q, k, v, mask=mask, bias=bias, **keywords)

    return call


def _mask(shape: tuple[int, int, int, int]) -> Any:
    """Returns a mask that leaves each row a key: padding if all queries share one row of it, else a random fifth."""
    batch, _, rows, keys = shape
    if rows == 1:
        lengths = np.linspace(keys // 2, keys, batch).astype(np.int64)
        return np.arange(keys) < np.maximum(lengths, 1)[:, None, None, None]  # [batch, 1, 1, keys]
    mask = np.random.default_rng(1).random(shape) > 0.2
    return mask | np.eye(rows, keys, dtype=bool)  # the diagonal: no row without keys
