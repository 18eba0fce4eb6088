"""A tile of rows of one sequence and kv head: out and lse, or the partial result of one share of the keys.

Tiles of keys begin at multiples of KEYS and shares of tiles at multiples of SHARE, counted from a sequence's first
visible key. Tiles are added in order into a share's partial result, and shares in order into the result: by
``attend_rows`` itself, or by ``merge_in_order`` if each share has a program. Both add with ``add_share``. It does not
matter which tiles a program visits for the sake of other rows, see ``sums``.

This module imports triton, so others import it only when they run.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attn_core.backends.shared.in_order.running_maximum import LOG2_E
from attn_core.backends.shared.in_order.sums import add_share, attend_to_share, store_results


@triton.jit
def attend_rows(
    tensors,
    pools,
    table,
    sequence,
    numbers,
    strides,
    GROUP: tl.constexpr,
    PAGE: tl.constexpr,
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

    A program's first share is the one of the first key that it may see. A share without keys writes only its
    log-sum-exp, -inf. ONE_SHARE: no sequence has more keys than a share.

    Args:
        tensors: (q, sinks, slopes, out, lse); slopes begin at the sequence's.
        pools, table, numbers: as in ``attend_to_share``; PAGE is 0 without a table.
        sequence: (kv_head, first, queries, begin, own, keys): the kv head in 64 bits, the place of the first query, the
            number of queries, the first row of the tile, the key at the first query's own position, and the keys.
        strides: of q by token and head, of out by share, token and head, and of lse by share and head.
    """
    q, sinks, slopes, out, lse = tensors
    kv_head, first, queries, begin, own, keys = sequence
    _, _, left, right, _, _ = numbers
    q_token, q_head, out_share, out_token, out_head, lse_share, lse_head = strides
    row = begin + tl.arange(0, ROWS)
    query = row // GROUP
    head = kv_head * GROUP + row % GROUP
    is_row = query < queries
    token = (first + query).to(tl.int64)
    diagonal = query + own
    low = tl.maximum(begin // GROUP + own - left, 0) // KEYS * KEYS
    high = tl.minimum(tl.minimum((begin + ROWS - 1) // GROUP, queries - 1) + own + right + 1, keys)
    by_all = tl.maximum(tl.minimum(begin // GROUP + own + right + 1, keys), 0) // KEYS * KEYS

    channel, value_channel = tl.arange(0, HEAD_DIM), tl.arange(0, VALUE_DIM)
    rows_at = q + token[:, None] * q_token + head[:, None] * q_head
    queries_tile = tl.load(rows_at + channel[None, :], mask=is_row[:, None], other=0.0)
    slope = tl.zeros([ROWS], tl.float32)
    if ALIBI:
        slope = tl.load(slopes + head, mask=is_row, other=0.0) * LOG2_E
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
