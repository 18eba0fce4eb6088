"""The Triton kernel for pages that adds in one order, whatever the batch, the chunk and the pages are.

``in_order.rows`` says which order.

This module imports triton, so others import it only when they run.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attn_core.backends.shared.in_order.new_tokens import clear_tail, is_behind, queries_of
from attn_core.backends.shared.in_order.rows import attend_rows


# Triton compiles again for arguments that are 1 or a multiple of 16. These change from call to call.
@triton.jit(do_not_specialize=["tokens", "num_pages", "width", "left", "right", "slope_row"])
def attend_in_order(
    q,
    k_pages,
    v_pages,
    block_table,
    seq_lens,
    cu_seqlens_q,
    sinks,
    alibi_slopes,
    kv_starts,
    out,
    lse,
    scale,
    softcap,
    tokens,
    num_pages,
    width,
    left,
    right,
    q_token,
    q_head,
    k_page,
    k_slot,
    k_head,
    v_page,
    v_slot,
    v_head,
    table_row,
    out_share,
    out_token,
    out_head,
    lse_share,
    lse_head,
    slope_row,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE: tl.constexpr,
    NEAR: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    ONE_QUERY: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    LEFT_OPEN: tl.constexpr,
    ALIBI: tl.constexpr,
    STARTS: tl.constexpr,
    PARTIAL: tl.constexpr,
    ONE_SHARE: tl.constexpr,
    SHARE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Computes a tile of rows of a sequence and kv head, see ``attend_rows``.

    The arguments are those of ``kernels.attend``.
    """
    sequence = tl.program_id(0) // KV_HEADS
    kv_head = (tl.program_id(0) % KV_HEADS).to(tl.int64)  # 64 bits, because a pool's stride times it may exceed 2^31
    blocks = tl.num_programs(2)
    if not ONE_QUERY:
        if is_behind(PARTIAL):
            strides = out_share, out_token, out_head, lse_share, lse_head
            clear_tail((out, lse, cu_seqlens_q, tokens), strides, KV_HEADS, GROUP, VALUE_DIM, PARTIAL)
            return
        if not PARTIAL:
            blocks -= 1
    length = tl.minimum(tl.maximum(tl.load(seq_lens + sequence), 0), width * PAGE)
    first, queries = queries_of(cu_seqlens_q, sequence, tokens, ONE_QUERY)
    begin = (blocks - 1 - tl.program_id(2)) * ROWS  # the last rows see the most keys, so they start first
    if begin >= queries * GROUP:  # the grid is sized for the longest sequence
        return
    origin = 0
    if STARTS:
        origin = tl.minimum(tl.maximum(tl.load(kv_starts + sequence), 0), length)

    tensors = q, sinks, alibi_slopes + sequence * slope_row, out, lse
    pools = k_pages + kv_head * k_head, k_page, k_slot, v_pages + kv_head * v_head, v_page, v_slot
    table = block_table + sequence.to(tl.int64) * table_row
    numbers = scale, softcap, left, right, origin, num_pages
    keys = length - origin
    attend_rows(
        *(tensors, pools, table, (kv_head, first, queries, begin, keys - queries, keys), numbers),
        (q_token, q_head, out_share, out_token, out_head, lse_share, lse_head),
        *(GROUP, PAGE, NEAR, HEAD_DIM, VALUE_DIM, SOFTCAP, SINKS, LEFT_OPEN, ALIBI),
        *(PARTIAL, ONE_SHARE, SHARE, ROWS, KEYS),
    )
