"""Reads documents, causal and window from xformers' block-diagonal masks, by class name and attributes.

Blocks that are just the rows of the batch define no documents. Unsloth's Mistral passes its window that way.
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
"""xformers' classes that documents, causal and a window describe completely."""


class BlockMask(NamedTuple):
    """A mask in our terms. keys: the number of keys that a query sees, including its own; None for all."""

    causal: bool
    keys: int | None
    documents: SeqInfo | None


def read_block_mask(mask: Any, where: str, context: AttentionContext) -> BlockMask:
    """Interprets a block-diagonal mask.

    Raises:
        SpecError: if both the mask and ``context.seq_info`` define documents, or if the diagonal is top-left and the
            documents have different numbers of queries and keys.
    """
    name = type(mask).__name__
    documents = None if name == _IN_ROWS else _documents(mask, f"{where} is {name}", context)
    return BlockMask(name != "BlockDiagonalMask", getattr(mask, "_window_size", None), documents)


def _documents(mask: Any, shown: str, context: AttentionContext) -> SeqInfo | None:
    sides = (mask.q_seqinfo, mask.k_seqinfo)
    starts, key_starts = (list(side.seqstart_py) for side in sides)
    # ``attention`` has one alignment for a call, and here it is bottom-right. Equal lengths make both agree.
    if type(mask).__name__ in _TOP_LEFT and starts != key_starts:
        raise SpecError(
            f"{shown}: expected as many keys as queries in each block; for new queries at the end of the keys use "
            f"{type(mask).__name__.removesuffix('Mask')}FromBottomRightMask"
        )
    if not starts:  # some callers fill in only the fields that kernels read
        info = SeqInfo(*(side.seqstart for side in sides), *(side.max_seqlen for side in sides))
    elif (starts, key_starts) == (_rows(context.bsz, context.q_len), _rows(context.bsz, context.kv_seq_len)):
        if context.seq_info is None or context.bsz == 1:
            return None
        info = None  # the blocks are rows, but seq_info has documents in them: a contradiction
    else:
        info = SeqInfo.from_lengths(_lengths(starts), _lengths(key_starts))
    if context.seq_info is not None:
        raise SpecError(
            f"{shown}: expected one block for the whole row, because context.seq_info already has the documents"
        )
    return info


def _rows(bsz: int, length: int) -> list[int]:
    """Returns the offsets of batch rows laid end to end."""
    return [row * length for row in range(bsz + 1)]


def _lengths(starts: list[int]) -> list[int]:
    return [end - start for start, end in pairwise(starts)]
