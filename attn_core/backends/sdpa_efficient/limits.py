"""Limits of torch's memory-efficient kernel: windows, sizes and documents that it lacks."""

from __future__ import annotations

from attn_core.backends.sdpa_efficient.operands import ADDRESSES
from attn_core.backends.shared.rewrites import whole_eights
from attn_core.call.masks import Band
from attn_core.call.spec import AttentionSpec

NAME = "the aten memory-efficient kernel"
MOST_PADDING = 16
"""The most elements of a packed, padded log-sum-exp, in multiples of the number of tokens."""


def packed_refusals(spec: AttentionSpec) -> tuple[str, ...]:
    """Refuses documents so unequal that a log-sum-exp padded to the longest would dwarf the tokens."""
    if not spec.documents or spec.documents * (spec.max_len_q or 0) <= MOST_PADDING * max(spec.q_len, 4096):
        return ()
    sizes = f"{spec.documents} documents of up to {spec.max_len_q} queries in {spec.q_len} tokens"
    return (f"{sizes}: {NAME} pads the log-sum-exp of each to the longest",)


def band_refusals(spec: AttentionSpec, edge: Band) -> list[str]:
    """Refuses bands that are no causal windows, and windows of packed documents."""
    if edge.right != 0:
        return [f"window={spec.window}: {NAME} has causal windows only"]
    if edge.left is not None and spec.packed:
        return [f"window={spec.window} with packed documents: {NAME} has none"]
    return []


def size_refusals(spec: AttentionSpec) -> list[str]:
    """Refuses tensors beyond the kernel's int32 addresses."""
    widest = max(whole_eights(spec.head_dim), whole_eights(spec.value_dim))
    if max(spec.q_len, spec.kv_len) * spec.num_heads * widest < ADDRESSES:
        return []
    what = f"q_len {spec.q_len} and kv_len {spec.kv_len} with {spec.num_heads} heads of {widest}"
    return [f"{what}: {NAME} addresses fewer than 2**31 elements"]
