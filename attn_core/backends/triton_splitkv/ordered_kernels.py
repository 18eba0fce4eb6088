"""Triton kernels for keys and values in pages that add in one order, whatever the batch, the chunk and the pages are.

Tiles of keys begin at multiples of KEYS and shares of tiles at multiples of SHARE, counted from a sequence's first
visible key. Tiles are added in order into a share's partial result, and shares in order into the result: by
``attend_in_order`` itself, or by ``merge_in_order`` if each share has a program. Both add with ``add_share``. It does
not matter which tiles a program visits for the sake of other rows, see ``ordered_sums``.

This module imports triton, so others import it only when they run.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attn_core.backends.triton_splitkv.merge_kernel import LOG2_E
from attn_core.backends.triton_splitkv.ordered_sums import add_share, attend_to_share, store_results

AT_ONCE = tl.constexpr(8)
"""The partial results that ``merge_in_order`` reads before it adds them."""


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
    """Computes out and lse; with PARTIAL float32 partial results of one share, which ``merge_in_order`` adds.

    The arguments are those of ``kernels.attend``. A program's first share is the one of the first key that it may see.
    A share without keys writes only its log-sum-exp, -inf. ONE_SHARE: no sequence has more keys than a share.
    """
    sequence = tl.program_id(0) // KV_HEADS
    kv_head = (tl.program_id(0) % KV_HEADS).to(tl.int64)  # 64 bits, because a pool's stride times it may exceed 2^31
    length = tl.minimum(tl.maximum(tl.load(seq_lens + sequence), 0), width * PAGE)
    if ONE_QUERY:
        first = sequence
        queries = 1
    else:
        first = tl.minimum(tl.maximum(tl.load(cu_seqlens_q + sequence), 0), tokens)
        queries = tl.minimum(tl.maximum(tl.load(cu_seqlens_q + sequence + 1), first), tokens) - first
    begin = (tl.num_programs(2) - 1 - tl.program_id(2)) * ROWS  # the last rows see the most keys, so they start first
    if begin >= queries * GROUP:  # the grid is sized for the longest sequence
        return
    origin = 0
    if STARTS:
        origin = tl.minimum(tl.maximum(tl.load(kv_starts + sequence), 0), length)

    row = begin + tl.arange(0, ROWS)
    query = row // GROUP
    head = kv_head * GROUP + row % GROUP
    is_row = query < queries
    token = (first + query).to(tl.int64)
    own = length - queries - origin  # the key at the first query's own position
    diagonal = query + own
    low = tl.maximum(begin // GROUP + own - left, 0) // KEYS * KEYS
    high = tl.minimum(tl.minimum((begin + ROWS - 1) // GROUP, queries - 1) + own + right + 1, length - origin)
    by_all = tl.maximum(tl.minimum(begin // GROUP + own + right + 1, length - origin), 0) // KEYS * KEYS

    channel, value_channel = tl.arange(0, HEAD_DIM), tl.arange(0, VALUE_DIM)
    rows_at = q + token[:, None] * q_token + head[:, None] * q_head
    queries_tile = tl.load(rows_at + channel[None, :], mask=is_row[:, None], other=0.0)
    slope = tl.zeros([ROWS], tl.float32)
    if ALIBI:
        slope = tl.load(alibi_slopes + sequence * slope_row + head, mask=is_row, other=0.0) * LOG2_E
    pools = k_pages + kv_head * k_head, k_page, k_slot, v_pages + kv_head * v_head, v_page, v_slot
    table = block_table + sequence.to(tl.int64) * table_row
    numbers = scale, softcap, left, right, origin, num_pages
    out_at = out + token * out_token + head * out_head
    lse_at = lse + head * lse_head + token

    share = low // SHARE
    if PARTIAL:
        share += tl.program_id(1)
        start, stop = tl.maximum(low, share * SHARE), tl.minimum(high, (share + 1) * SHARE)
        border = tl.maximum(tl.minimum(by_all, (share + 1) * SHARE), start)
        number = tl.program_id(1).to(tl.int64)
        if start >= stop:
            tl.store(lse_at + number * lse_share, tl.full([ROWS], float("-inf"), tl.float32), mask=is_row)
            return
        part, part_lse = attend_to_share(
            *(queries_tile, diagonal, slope, pools, table, start, border, stop, numbers),
            *(PAGE, NEAR, VALUE_DIM, SOFTCAP, ALIBI, LEFT_OPEN, KEYS),
        )
        tl.store((out_at + number * out_share)[:, None] + value_channel[None, :], part, mask=is_row[:, None])
        tl.store(lse_at + number * lse_share, part_lse, mask=is_row)
    else:
        top, total = tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32)
        summed = tl.zeros([ROWS, VALUE_DIM], tl.float32)
        if ONE_SHARE:  # without a loop, in which both sums would need registers at the same time
            part, part_lse = attend_to_share(
                *(queries_tile, diagonal, slope, pools, table, low, tl.maximum(by_all, low), high, numbers),
                *(PAGE, NEAR, VALUE_DIM, SOFTCAP, ALIBI, LEFT_OPEN, KEYS),
            )
            top, total, summed = add_share(top, total, summed, part, part_lse)
        else:
            for at in range(share * SHARE, high, SHARE):
                start, stop = tl.maximum(low, at), tl.minimum(high, at + SHARE)
                border = tl.maximum(tl.minimum(by_all, at + SHARE), start)
                part, part_lse = attend_to_share(
                    *(queries_tile, diagonal, slope, pools, table, start, border, stop, numbers),
                    *(PAGE, NEAR, VALUE_DIM, SOFTCAP, ALIBI, LEFT_OPEN, KEYS),
                )
                top, total, summed = add_share(top, total, summed, part, part_lse)
        store_results(top, total, summed, sinks, head, is_row, out_at, lse_at, value_channel, SINKS)


@triton.jit(do_not_specialize=["shares"])
def merge_in_order(
    parts,
    part_lse,
    sinks,
    out,
    lse,
    shares,
    part_share,
    part_token,
    part_head,
    part_lse_share,
    part_lse_head,
    out_token,
    out_head,
    lse_head,
    VALUE_DIM: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Adds the partial results of a query and head, share by share."""
    one = tl.arange(0, 1)
    token, head = tl.program_id(0).to(tl.int64) + one, tl.program_id(1).to(tl.int64) + one
    channel = tl.arange(0, VALUE_DIM)
    parts_at = parts + (token * part_token + head * part_head)[:, None] + channel[None, :]
    lses_at = part_lse + head * part_lse_head + token
    top, total = tl.full([1], float("-inf"), tl.float32), tl.zeros([1], tl.float32)
    summed = tl.zeros([1, VALUE_DIM], tl.float32)
    for first in range(0, shares, AT_ONCE):
        lses, values, share = (), (), (first + one).to(tl.int64)
        for i in tl.static_range(AT_ONCE):
            lse_at = lses_at + (share + i) * part_lse_share
            lses += (tl.load(lse_at, mask=share + i < shares, other=float("-inf")),)  # type: ignore[assignment]
        for i in tl.static_range(AT_ONCE):  # a share without keys wrote no values
            part_at = parts_at + (share + i)[:, None] * part_share
            values += (tl.load(part_at, mask=(lses[i] != float("-inf"))[:, None], other=0.0),)  # type: ignore[assignment]
        for i in tl.static_range(AT_ONCE):
            top, total, summed = add_share(top, total, summed, values[i], lses[i])
    out_at, lse_at = out + token * out_token + head * out_head, lse + head * lse_head + token
    store_results(top, total, summed, sinks, head, one == 0, out_at, lse_at, channel, SINKS)
