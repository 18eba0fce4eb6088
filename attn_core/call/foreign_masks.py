"""Masks that are objects of other libraries, and what to pass instead."""

from __future__ import annotations

from typing import Any

_BLOCKS = "pass seq_info=SeqInfo.from_lengths([...]) with the lengths of its blocks"
_BOTTOM_RIGHT, _TOP_LEFT = "causal=True, alignment='bottom_right'", "causal=True, alignment='top_left'"

REMEDIES = {
    # xformers.ops.fmha.attn_bias
    "BlockDiagonalMask": _BLOCKS,
    "BlockDiagonalCausalMask": f"{_BLOCKS}, {_TOP_LEFT}",
    "BlockDiagonalCausalFromBottomRightMask": f"{_BLOCKS}, {_BOTTOM_RIGHT}",
    "BlockDiagonalCausalLocalAttentionMask": f"{_BLOCKS}, {_TOP_LEFT}, window=W",
    "BlockDiagonalCausalLocalAttentionFromBottomRightMask": f"{_BLOCKS}, {_BOTTOM_RIGHT}, window=W",
    "LowerTriangularMask": f"pass {_TOP_LEFT}",
    "LowerTriangularFromBottomRightMask": f"pass {_BOTTOM_RIGHT}",
    "LowerTriangularFromBottomRightLocalAttentionMask": f"pass {_BOTTOM_RIGHT}, window=W",
    "LowerTriangularMaskWithTensorBias": f"pass {_TOP_LEFT} and the tensor as bias=",
    "LocalAttentionFromBottomRightMask": "pass window=(left, right)",
    # torch.nn.attention
    "BlockMask": "pass causal=, window= or seq_info= if they describe it, else a bool mask",
    "CausalBias": f"pass {_TOP_LEFT} for upper left, {_BOTTOM_RIGHT} for lower right",
}
"""By the name of the class."""


def remedy_of(value: Any) -> str | None:
    """Returns what to pass instead of an object, or None if it is no such mask."""
    return REMEDIES.get(type(value).__name__)
