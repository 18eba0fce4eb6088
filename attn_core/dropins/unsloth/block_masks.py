"""What xformers' block-diagonal masks say: documents, whether each is causal, and a window. Read by name and attribute.

Blocks that are the rows of the batch say nothing about documents. That is how Unsloth's Mistral tells its window.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

from attn_core.call.seq_info import SeqInfo
from attn_core.dropins.unsloth.arguments import AttentionContext
from attn_core.errors import SpecError

_TOP_LEFT = ("BlockDiagonalCausalMask", "BlockDiagonalCausalLocalAttentionMask")
_IN_ROWS = "LowerTriangularFromBottomRightLocalAttentionMask"
NAMES = (
    "BlockDiagonalMask",
    *_TOP_LEFT,
    "BlockDiagonalCausalFromBottomRightMask",
    "BlockDiagonalCausalLocalAttentionFromBottomRightMask",
    _IN_ROWS,
)
"""xformers' classes that documents, causal and a window say in full."""


class Blocks(NamedTuple):
    """A mask in this library's words. keys: how many a query sees, itself included; None for all."""

    causal: bool
    keys: int | None
    documents: SeqInfo | None


def blocks(mask: Any, where: str, context: AttentionContext) -> Blocks:
    """What such a mask says of a call.

    Raises:
        SpecError: for documents beside those of ``context.seq_info``, and for a diagonal that begins at the upper left
            of documents with other lengths of queries than of keys.
    """
    name = type(mask).__name__
    documents = None if name == _IN_ROWS else _documents(mask, f"{where} is {name}", context)
    return Blocks(name != "BlockDiagonalMask", getattr(mask, "_window_size", None), documents)


def _documents(mask: Any, shown: str, context: AttentionContext) -> SeqInfo | None:
    sides = (mask.q_seqinfo, mask.k_seqinfo)
    starts, key_starts = (list(side.seqstart_py) for side in sides)
    if type(mask).__name__ in _TOP_LEFT and starts != key_starts:
        raise SpecError(
            f"{shown}: expected as many keys as queries in each block; for new queries at the end of the keys take "
            f"{type(mask).__name__.removesuffix('Mask')}FromBottomRightMask"
        )
    if not starts:  # some callers fill in what the kernels read alone
        found = SeqInfo(*(side.seqstart for side in sides), *(side.max_seqlen for side in sides))
    elif (starts, key_starts) == (_rows(context.bsz, context.q_len), _rows(context.bsz, context.kv_seq_len)):
        if context.seq_info is None or context.bsz == 1:
            return None
        found = None
    else:
        found = SeqInfo.from_lengths(_lengths(starts), _lengths(key_starts))
    if context.seq_info is not None:
        raise SpecError(f"{shown}: expected no blocks but one row beside context.seq_info, whose documents may differ")
    return found


def _rows(bsz: int, length: int) -> list[int]:
    return [row * length for row in range(bsz + 1)]


def _lengths(starts: list[int]) -> list[int]:
    return [end - start for start, end in pairwise(starts)]
