"""Which calls JAX runs faster on a CPU by XLA's operations (``jax_xla``) than by torch's kernels.

torch's kernels share the heads of a call among all cores and skip hidden blocks. XLA multiplies the heads' matrices one
after another, so it is slower from a few heads on: up to nine times on two cores. It wins for calls so small that the
callback into Python counts, and for small gradients of half precision, for which torch's kernel is slow.

The limits follow random calls on two cores of an Intel Xeon, and ``benchmarks/results/sweep-jax-cpu.json`` judges them
on other calls. On a single core XLA is faster for more calls; ``attn tune --framework jax`` measures a machine.
"""

from __future__ import annotations

from attn_core.call.spec import AttentionSpec

TINY_HEADS, TINY_SCORES = 24, 2**12
"""Heads of all rows, and scores, up to which a call takes as long as the callback into Python."""

SMALL_SCORES = 2**18
"""Scores (batch * heads * q_len * kv_len) up to which XLA is faster than the math backend, which skips blocks."""

SMALL_GRADIENT = 2**21
"""The same for gradients of half precision, compared with torch's flash kernel."""


def xla_is_faster(spec: AttentionSpec) -> bool:
    """Returns whether ``jax_xla`` comes first for a call with numbers as sizes."""
    heads = spec.batch * spec.num_heads
    scores = heads * spec.q_len * spec.kv_len
    if heads <= TINY_HEADS and scores <= TINY_SCORES:
        return True
    if spec.packed:
        return False  # XLA computes the pairs of different documents, too
    if spec.softcap is not None or spec.value_dim != spec.head_dim:  # torch's flash kernel has neither
        return scores <= SMALL_SCORES
    return spec.needs_backward and spec.dtype in ("bfloat16", "float16") and scores <= SMALL_GRADIENT
