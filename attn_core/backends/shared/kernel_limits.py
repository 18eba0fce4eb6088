"""Limits that CUDA kernels of several packages share: the axes of a launch grid, and what 32 bits can count."""

from __future__ import annotations

import math

from attn_core.call.spec import AttentionSpec

GRID_LIMIT = 65535
"""Blocks that CUDA launches along the second and the third axis of a grid: those of heads and of batch rows."""

COUNTABLE = 2**31
"""What a signed 32-bit index cannot reach."""


def grid(spec: AttentionSpec, kernel: str, sequences: int | None = None) -> tuple[str, ...]:
    """Refusals of more batch rows or heads than a grid has room for.

    sequences: how many the kernel sees; the batch rows or documents where it is not given.
    """
    counts = {"batch rows or documents": sequences or spec.documents or spec.batch, "heads": spec.num_heads}
    return tuple(
        f"{count} {name}: {kernel} stops at {GRID_LIMIT}" for name, count in counts.items() if count > GRID_LIMIT
    )


def tables(spec: AttentionSpec, kernel: str) -> tuple[str, ...]:
    """Refusals of a mask or bias whose elements a kernel counts in 32 bits: beyond that it reads at wrong places."""
    shapes = {"mask": spec.mask_shape, "bias": spec.bias_shape}
    return tuple(
        f"{name} of shape {list(shape)}: {kernel} counts its elements in 32 bits"
        for name, shape in shapes.items()
        if shape is not None and math.prod(shape) >= COUNTABLE
    )


def sums_of_dq(spec: AttentionSpec, kernel: str) -> tuple[str, ...]:
    """Refusals of a gradient whose float32 sums of dq FlashAttention 2 counts in 32 bits, before 2.8.3.

    The sums have rows padded to 128 (for each document) and head dimensions to 32, from 128 on to 64. Source:
    flash_bwd_kernel.h and block_info.h of 2.8.2; torch has the same code.
    """
    if not spec.needs_backward:
        return ()
    rows = spec.q_len + 128 * spec.documents if spec.documents else spec.batch * -(-spec.q_len // 128) * 128
    width = max(spec.head_dim, spec.value_dim)
    step = 64 if width > 128 else 32
    if rows * spec.num_heads * -(-width // step) * step < COUNTABLE:
        return ()
    what = f"q_len={spec.q_len} with {spec.documents or spec.batch} rows or documents and {spec.num_heads} heads"
    return (f"backward: {what}: {kernel} counts the sums of dq in 32 bits",)
