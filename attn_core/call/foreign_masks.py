"""Masks that are objects of other libraries, and what to pass instead."""

from __future__ import annotations

from typing import Any

_BLOCKS = "pass seq_info=SeqInfo.from_lengths([...]) with the lengths of its blocks"
_BOTTOM_RIGHT, _TOP_LEFT = "causal=True, alignment='bottom_right'", "causal=True, alignment='top_left'"
_GAPS = "gather the used keys, because documents have no gaps between them, and pass seq_info="
_PAGES = "paged_attention() reads keys and values in pages"

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
    "BlockDiagonalPaddedKeysMask": _GAPS,
    "BlockDiagonalCausalWithOffsetPaddedKeysMask": f"{_GAPS}, {_BOTTOM_RIGHT}",
    "BlockDiagonalLocalAttentionPaddedKeysMask": f"{_GAPS}, window=(left, right)",
    "BlockDiagonalCausalLocalAttentionPaddedKeysMask": f"{_GAPS}, {_BOTTOM_RIGHT}, window=W",
    "BlockDiagonalGappyKeysMask": _GAPS,
    "BlockDiagonalCausalWithOffsetGappyKeysMask": f"{_GAPS}, {_BOTTOM_RIGHT}",
    "PagedBlockDiagonalPaddedKeysMask": _PAGES,
    "PagedBlockDiagonalCausalWithOffsetPaddedKeysMask": _PAGES,
    "PagedBlockDiagonalGappyKeysMask": _PAGES,
    "PagedBlockDiagonalCausalWithOffsetGappyKeysMask": _PAGES,
    # torch.nn.attention
    "BlockMask": "pass it as mask_mod= in torch, or its mask_mod; causal=, window= or seq_info= if they describe it",
    "CausalBias": f"pass {_TOP_LEFT} for upper left, {_BOTTOM_RIGHT} for lower right",
    # splash attention, of JAX and of tokamax
    "CausalMask": f"pass {_TOP_LEFT}",
    "LocalMask": "pass window=(left, right), alignment='top_left'",
    "ChunkedCausalMask": f"{_BLOCKS}, {_TOP_LEFT}",
    "FullMask": "leave mask= away",
    "NumpyMask": "pass its array as a bool mask [1, 1, q_len, kv_len]",
    "MultiHeadMask": "pass a bool mask [1, heads, q_len, kv_len], or causal= and window= if they describe it",
    "LogicalAnd": "pass causal= and window= if they describe it, else key_ranges= or a bool mask",
    "LogicalOr": "pass key_ranges= or a bool mask",
    "SegmentIds": "pass seq_info=SeqInfo.from_lengths([...]) with the lengths of the segments",
}
"""By the name of the class: what to pass if an object cannot be read."""


def remedy_of(value: Any) -> str | None:
    """Returns what to pass instead of an object, or None if it is no such mask."""
    return REMEDIES.get(type(value).__name__)
