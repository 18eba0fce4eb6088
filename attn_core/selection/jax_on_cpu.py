"""Which calls JAX runs faster on a CPU by XLA's operations (``jax_xla``) than by torch's kernels.

A torch kernel is reached through a callback into Python, which costs tens of microseconds, and XLA cannot overlap it
with other operations. It wins if it skips work: blocks of scores that stay in the cache, and documents shorter than
XLA's blocks. The limits follow the calls of ``benchmarks/results/jax_cpu.json``, all of them: no calls were held out.
``python -m benchmarks.jax_cpu --judge`` compares the choice with the fastest backend of each.
"""

from __future__ import annotations

from attn_core.backends.jax_xla.few_queries import FEW_QUERIES
from attn_core.call.masks import band
from attn_core.call.spec import AttentionSpec

SMALL = {"band": 2**23, "window": 2**19}
"""Scores (batch * heads * q_len * kv_len) up to which XLA is faster in any case, without a window and with one."""

LONG_WINDOW = 1024
"""Queries from which XLA's blocks skip enough outside of a window, in the forward."""

MANY_HEADS = 32
"""Heads of all batch rows from which XLA's blocks of bfloat16 scores no longer fit into a cache."""

SHORT_DOCUMENT, FEW_TOKENS = 128, 64
"""Torch's kernels win for rows of more than FEW_TOKENS tokens with documents of at most SHORT_DOCUMENT queries."""


def xla_is_faster(spec: AttentionSpec) -> bool:
    """Returns whether ``jax_xla`` comes first for a call with numbers as sizes."""
    if spec.packed:
        return spec.q_len <= FEW_TOKENS or (spec.max_len_q or spec.q_len) > SHORT_DOCUMENT
    extras = (spec.mask_shape, spec.bias_shape, spec.alibi_shape, spec.softcap)
    if spec.sinks or any(extra is not None for extra in extras) or spec.q_len <= FEW_QUERIES:
        return True  # torch's kernels need further passes for the extras
    heads = spec.batch * spec.num_heads
    scores = heads * spec.q_len * spec.kv_len
    edge = band(spec)
    if edge.left is not None and not edge.hides_nothing(spec.q_len, spec.kv_len):
        long_forward = spec.q_len > LONG_WINDOW and not spec.needs_backward
        return long_forward or scores <= SMALL["window"]
    if spec.dtype in ("bfloat16", "float16") and (spec.needs_backward or heads < MANY_HEADS):
        return True  # torch's kernel is slow for these, above all its gradient
    return scores <= SMALL["band"]
