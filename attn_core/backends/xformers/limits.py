"""Limits of xformers' CUTLASS operator: dtypes, biases and sizes.

From 0.0.29 to 0.0.35 its wheels are compiled for sm75, too: ``TORCH_CUDA_ARCH_LIST`` in
https://github.com/facebookresearch/xformers/blob/v0.0.35/.github/workflows/wheels_build.yml. We ran it on sm90 alone.
"""

from __future__ import annotations

from collections.abc import Iterator

from attn_core.backends.shared import kernel_limits
from attn_core.call.spec import AttentionSpec


def cutlass_refusals(spec: AttentionSpec, device: str, kernel: str) -> Iterator[str]:
    """Refuses bfloat16 on old GPUs, biases that it would round, and rows beyond its 32-bit counts."""
    yield from kernel_limits.bfloat16(spec, device, kernel)
    elements = max(spec.q_len, spec.kv_len) * spec.num_heads * max(spec.head_dim, spec.value_dim)
    if spec.rounds_bias:
        yield f"bias in {spec.bias_dtype} with {spec.dtype}: {kernel} rounds a bias to q's dtype"
    if elements >= kernel_limits.COUNTABLE:
        yield f"{elements} elements in a row of q, k or v: {kernel} counts them in 32 bits"
