"""The launch that adds the partial results of a call's shares."""

from __future__ import annotations

from functools import cache
from typing import Any

from attn_core.backends.shared.programs.triton import Description, Direct, launch
from attn_core.call.spec import AttentionSpec


def describe(spec: AttentionSpec, operands: tuple[Any, ...], shares: int) -> Description:
    """Returns the grid, the numbers and the constants of ``merge_in_order``; see ``launch_merge``."""
    parts, part_lse, _, out, lse = operands
    by_row = (0, lse.stride(0)) if spec.packed else lse.stride()[:2]
    numbers = (shares, spec.q_len, *parts.stride()[:3], *part_lse.stride()[:2], *out.stride()[:2], *by_row)
    constants = {"VALUE_DIM": spec.value_dim, "SINKS": spec.sinks, "num_warps": 1, "enable_fp_fusion": False}
    return (out.shape[0], spec.num_heads, 1), numbers, constants


@cache
def kernel() -> Any:
    """Returns ``merge_in_order``."""
    from attn_core.backends.shared.in_order import merge_kernel

    return merge_kernel.merge_in_order


def launch_merge(spec: AttentionSpec, operands: tuple[Any, ...], shares: int, device: int) -> Direct | None:
    """Adds partial results into out and lse; see ``shared.programs.triton.launch`` for the result.

    Args:
        operands: parts ``[shares, tokens, heads, dim]`` and their log-sum-exps ``[shares, heads, tokens]``, the sinks,
            out ``[tokens, heads, dim]``, and lse ``[heads, tokens]`` or ``[rows, heads, tokens of a row]``.
        device: the current one.
    """
    _, _, sinks, out, lse = operands
    key = ("merge_in_order", spec, shares, out.stride(), lse.stride(), sinks.dtype, device)
    return launch(kernel(), key, operands, lambda: describe(spec, operands, shares))
