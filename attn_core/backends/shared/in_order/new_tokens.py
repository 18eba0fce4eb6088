"""The tokens of a document or sequence, and the tokens behind the last sequence, which belong to none.

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
        first, queries = document_at(cu_seqlens_q, sequence, tokens)
    return first, queries


@triton.jit
def document_at(offsets, document, tokens):
    """Returns the first token of a document and their number; for offsets that lie, of some document in the tokens."""
    first = tl.minimum(tl.maximum(tl.load(offsets + document), 0), tokens)
    return first, tl.minimum(tl.maximum(tl.load(offsets + document + 1), first), tokens) - first


@triton.jit
def is_behind(PARTIAL: tl.constexpr):
    """Returns whether a program of a call with offsets is one of those that clear tokens behind the last sequence.

    ``order.grid_of`` puts them at the end of the grid. Between the others, they would leave some multiprocessors with
    more of the others than the rest, and decoding takes up to 1.4 times as long then.
    """
    if PARTIAL:
        behind = tl.program_id(1) == tl.num_programs(1) - 1
    else:
        behind = tl.program_id(2) == tl.num_programs(2) - 1
    return behind


@triton.jit
def clear_tail(
    tail, strides, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, VALUE_DIM: tl.constexpr, PARTIAL: tl.constexpr
):
    """Writes out 0 and lse -inf for the tokens from the last offset on, in every share. Programs divide the tokens.

    The host does not know the last offset, so it cannot know whether such tokens exist. Programs of their own do this:
    in a sequence's program it would cost the other loops registers.

    Args:
        tail: (out, lse, cu_seqlens_q, tokens).
        strides: of out by share, token and head, and of lse by share and head.
        PARTIAL: whether there are shares.
    """
    ROWS: tl.constexpr = 8
    out, lse, cu_seqlens_q, tokens = tail
    out_share, out_token, out_head, lse_share, lse_head = strides
    kv_head = (tl.program_id(0) % KV_HEADS).to(tl.int64)
    sequence, sequences = tl.program_id(0) // KV_HEADS, tl.num_programs(0) // KV_HEADS
    shares = 1
    if PARTIAL:
        shares = tl.num_programs(1) - 1
    start = tl.minimum(tl.maximum(tl.load(cu_seqlens_q + sequences), 0), tokens)
    rows = (tokens - start) * GROUP
    for at in range(sequence * ROWS, rows, sequences * ROWS):
        row = at + tl.arange(0, ROWS)
        token, head, is_row = (start + row // GROUP).to(tl.int64), kv_head * GROUP + row % GROUP, row < rows
        out_at = out + (token * out_token + head * out_head)[:, None] + tl.arange(0, VALUE_DIM)[None, :]
        lse_at = lse + head * lse_head + token
        for share in range(shares):
            behind = tl.cast(share, tl.int64)
            zeros = tl.zeros([ROWS, VALUE_DIM], out.dtype.element_ty)
            tl.store(out_at + behind * out_share, zeros, mask=is_row[:, None])
            tl.store(lse_at + behind * lse_share, tl.full([ROWS], float("-inf"), tl.float32), mask=is_row)
