"""The new tokens of a sequence, and the tokens behind the last sequence, which belong to none.

This module imports triton, so others import it only when they run.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def queries_of(cu_seqlens_q, sequence, tokens, ONE_QUERY: tl.constexpr):
    """Returns the first query of a sequence and the number of its queries. Offsets are clamped to the tokens."""
    if ONE_QUERY:
        first = sequence
        queries = 1
    else:
        first = tl.minimum(tl.maximum(tl.load(cu_seqlens_q + sequence), 0), tokens)
        queries = tl.minimum(tl.maximum(tl.load(cu_seqlens_q + sequence + 1), first), tokens) - first
    return first, queries


@triton.jit
def clear_tail(tail, kv_head, strides, GROUP: tl.constexpr, VALUE_DIM: tl.constexpr):
    """Writes out 0 and lse -inf for the tokens from the last offset on. The programs of the last grid axis share them.

    The host does not know the last offset, so it cannot know whether such tokens exist. Programs of their own do this:
    in a sequence's program it would cost the other loops registers.

    Args:
        tail: (out, lse, last, tokens); last is the address of the last offset.
        strides: of out by token and head, and of lse by head.
    """
    ROWS: tl.constexpr = 8
    out, lse, last, tokens = tail
    start = tl.minimum(tl.maximum(tl.load(last), 0), tokens)
    out_token, out_head, lse_head = strides
    rows = (tokens - start) * GROUP
    for at in range(tl.program_id(2) * ROWS, rows, tl.num_programs(2) * ROWS):
        row = at + tl.arange(0, ROWS)
        token, head, is_row = (start + row // GROUP).to(tl.int64), kv_head * GROUP + row % GROUP, row < rows
        out_at = out + (token * out_token + head * out_head)[:, None] + tl.arange(0, VALUE_DIM)[None, :]
        tl.store(out_at, tl.zeros([ROWS, VALUE_DIM], out.dtype.element_ty), mask=is_row[:, None])
        tl.store(lse + head * lse_head + token, tl.full([ROWS], float("-inf"), tl.float32), mask=is_row)
