"""Limits that kernels share: the axes of a launch grid, and 32-bit indices; and those of tiles of one size."""

from __future__ import annotations

import math

from attn_core.backends.support import compute_capability
from attn_core.call.spec import AttentionSpec

GRID_LIMIT = 65535
"""The most blocks along the second and third axis of a CUDA grid. Kernels put heads and batch rows there."""

COUNTABLE = 2**31
"""The first element that a signed 32-bit index cannot reach."""


def grid(spec: AttentionSpec, kernel: str, sequences: int | None = None) -> tuple[str, ...]:
    """Returns refusals of more batch rows or heads than a launch grid allows.

    Args:
        sequences: the number of sequences that the kernel sees; by default the batch rows or documents.
    """
    counts = {"batch rows or documents": sequences or spec.documents or spec.batch, "heads": spec.num_heads}
    return tuple(
        f"{count} {name}: {kernel} stops at {GRID_LIMIT}" for name, count in counts.items() if count > GRID_LIMIT
    )


def bfloat16(spec: AttentionSpec, device: str, kernel: str) -> tuple[str, ...]:
    """Returns a refusal of bfloat16 on NVIDIA GPUs before sm80, which have no instructions for it.

    torch's CUTLASS kernel takes float16 and float32 there. Source: ``can_use_mem_efficient_attention`` in
    https://github.com/pytorch/pytorch/blob/001f694a/aten/src/ATen/native/transformers/cuda/sdp_utils.cpp.
    """
    if spec.dtype != "bfloat16" or not 0 < compute_capability(device) < 80:
        return ()
    return (f"dtype bfloat16 on {device}: {kernel} takes float32 and float16 there",)


def tables(spec: AttentionSpec, kernel: str) -> tuple[str, ...]:
    """Returns refusals of a mask or bias with 2**31 elements or more, for kernels that index it with 32 bits.

    Such a kernel reads wrong elements without an error.
    """
    shapes = {"mask": spec.mask_shape, "bias": spec.bias_shape}
    return tuple(
        f"{name} of shape {list(shape)}: {kernel} counts its elements in 32 bits"
        for name, shape in shapes.items()
        if shape is not None and math.prod(shape) >= COUNTABLE
    )


def dq_elements(spec: AttentionSpec) -> int:
    """Returns the elements of the float32 sums of dq of FlashAttention 2, which it indexes with 32 bits before 2.8.3.

    The sums pad each document's rows to multiples of 128, and head dimensions to multiples of 32, or of 64 above 128.
    Source: flash_bwd_kernel.h and block_info.h of 2.8.2; torch has the same code.
    """
    # The kernel itself allocates 128 rows more for each document, whatever the documents' lengths.
    rows = spec.q_len + 128 * spec.documents if spec.documents else spec.batch * -(-spec.q_len // 128) * 128
    width = max(spec.head_dim, spec.value_dim)
    step = 64 if width > 128 else 32
    return rows * spec.num_heads * -(-width // step) * step


def fixed_tiles(spec: AttentionSpec, device: str, kernel: str) -> tuple[str, ...]:
    """Returns why tiles of one size, which keep ``invariant`` on a CPU, cannot compute a call; nothing without it."""
    if spec.invariant is None:
        return ()
    lacks = {
        f"device {device}": device != "cpu",
        "key_ranges": spec.key_ranges_shape is not None,
        "mask_mod": spec.mask_mod is not None,
        "score_mod": spec.score_mod is not None,
        "alibi_slopes of each sequence in pages": spec.paged is not None and len(spec.alibi_shape or ()) == 2,
        "sizes that are symbols": spec.symbolic,
    }
    return tuple(f"{what} with invariant={spec.invariant!r}: {kernel} has none" for what in lacks if lacks[what])
