"""The Triton kernel of the forward: dense and packed tensors, added in the order of calls on pages.

A program computes a tile of rows, queries times the heads of a group, of one sequence and kv head; ``in_order.rows``
says in which order it adds. A key past the end of its sequence is never read.

This module imports triton, so others import it only when they run.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attn_core.backends.shared.in_order.rows import attend_rows
from attn_core.backends.triton_ordered.sequences import sequence_at


# Triton compiles again for arguments that are 1 or a multiple of 16. These change from call to call.
@triton.jit(
    do_not_specialize=[
        *("q_tokens", "k_tokens", "left", "right", "slope_row"),
        *("lse_row", "lse_share", "lse_head"),
    ]
)
def attend(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    sinks,
    alibi_slopes,
    out,
    lse,
    scale,
    softcap,
    q_tokens,
    k_tokens,
    left,
    right,
    q_row,
    q_token,
    q_head,
    k_row,
    k_token,
    k_head,
    v_row,
    v_token,
    v_head,
    out_row,
    out_share,
    out_token,
    out_head,
    lse_row,
    lse_share,
    lse_head,
    slope_row,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PACKED: tl.constexpr,
    BOTTOM_RIGHT: tl.constexpr,
    NEAR: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    LEFT_OPEN: tl.constexpr,
    ALIBI: tl.constexpr,
    PARTIAL: tl.constexpr,
    ONE_SHARE: tl.constexpr,
    SHARE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Computes out and lse; with PARTIAL float32 partial results of one share, which ``merge_in_order`` adds.

    q, out ``[rows, q_tokens, heads, dim]``, k, v ``[rows, k_tokens, kv_heads, dim]``, lse ``[rows, heads, q_tokens]``;
    a packed call has one row. Channels and the tokens of lse are contiguous; the other numbers are strides in elements.
    cu_seqlens int32 ``[documents + 1]``, sinks ``[heads]``, alibi_slopes float32 ``[heads]`` or ``[rows, heads]``; the
    kernel does not read absent ones. NEAR: an offset of a key in its sequence, in units of 16 bytes, fits int32.
    """
    sequence = tl.program_id(0) // KV_HEADS
    kv_head = (tl.program_id(0) % KV_HEADS).to(tl.int64)
    place = sequence_at(sequence, cu_seqlens_q, cu_seqlens_k, q_tokens, k_tokens, PACKED)
    row, first_query, queries, first_key, keys = place
    begin = (tl.num_programs(2) - 1 - tl.program_id(2)) * ROWS  # the last rows see the most keys, so they start first
    if begin >= queries * GROUP:  # the grid is sized for the longest sequence
        return
    own = keys - queries if BOTTOM_RIGHT else 0
    tensors = q + row * q_row, sinks, alibi_slopes + row * slope_row, out + row * out_row, lse + row * lse_row
    k += row * k_row + first_key * k_token + kv_head * k_head
    v += row * v_row + first_key * v_token + kv_head * v_head
    attend_rows(
        *(tensors, (k, 0, k_token, v, 0, v_token), k, (kv_head, first_query, queries, begin, own, keys)),
        (scale, softcap, left, right, 0, 0),
        (q_token, q_head, out_share, out_token, out_head, lse_share, lse_head),
        *(GROUP, 0, NEAR, HEAD_DIM, VALUE_DIM, SOFTCAP, SINKS, LEFT_OPEN, ALIBI),
        *(PARTIAL, ONE_SHARE, SHARE, ROWS, KEYS),
    )
