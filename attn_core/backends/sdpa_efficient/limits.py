"""Limits of torch's memory-efficient kernel: windows, sizes and documents that it lacks or computes wrongly."""

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
    """Refuses bands that are no causal windows, and windows that the kernel or its gradient misplaces."""
    if edge.right != 0:
        return [f"window={spec.window}: {NAME} has causal windows only"]
    if edge.left is None:
        return []
    if spec.packed:
        return [f"window={spec.window} with packed documents: {NAME} has none"]
    if spec.needs_backward and edge.offset > 0:
        what = f"window={spec.window} with q_len {spec.q_len} and kv_len {spec.kv_len}, bottom_right"
        return [f"backward: {what}: {NAME} puts the gradient's window top_left"]
    return []


def size_refusals(spec: AttentionSpec) -> list[str]:
    """Refuses tensors beyond the kernel's int32 addresses."""
    reasons = []
    widest = max(whole_eights(spec.head_dim), whole_eights(spec.value_dim))
    if max(spec.q_len, spec.kv_len) * spec.num_heads * widest >= ADDRESSES:
        reasons.append(
            f"q_len {spec.q_len} and kv_len {spec.kv_len} with {spec.num_heads} heads of {widest}: "
            f"{NAME} addresses fewer than 2**31 elements"
        )
    rows = max((shape[2] for shape in (spec.mask_shape, spec.bias_shape) if shape), default=1)
    if rows > 1 and rows * whole_eights(spec.kv_len) >= ADDRESSES:
        reasons.append(
            f"mask or bias with q_len {spec.q_len} and kv_len {spec.kv_len}: {NAME} reads the wrong rows of one "
            "that large (pytorch#162588)"
        )
    return reasons
