"""Triton functions for the rows of one sequence and kv head, whose sums over keys have one order in all kernels.

Tiles of keys begin at multiples of KEYS and shares of tiles at multiples of SHARE, counted from a sequence's first
visible key. Tiles are added in order into a share's partial result, and shares in order into the result: by
``attend_rows`` itself, or by ``merge_in_order`` if each share has a program. Both add with ``add_share``.

A tile or share in which a row sees nothing changes none of its bits, because its weights are 0 and its ``fade`` is 1.
So it does not matter which tiles a program visits for the sake of other rows. A row's sums over keys are within one
warp, in the same order for all numbers of rows, if a launch has a warp for each 16 rows. ``tl.fma`` says where a
product and a sum round once; nothing else is fused (``enable_fp_fusion=False``).

This module imports triton, so others import it only when they run.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def raise_maximum(top, other):
    """Returns the new running maximum, the base to subtract, and the factor that rescales the sums so far.

    The base is 0 instead of -inf, because -inf - -inf is NaN. All values are base-2 logarithms.
    """
    new = tl.maximum(top, other)
    base = tl.where(new == float("-inf"), 0.0, new)
    return new, base, tl.exp2(top - base)


@triton.jit
def slot_at(page, slot, by_page, by_slot, NEAR: tl.constexpr, UNIT: tl.constexpr):
    """Returns where slots of pages begin in a pool, in 64 bits; strides are multiples of UNIT.

    NEAR says that the pool's size over UNIT fits 32 bits. Then nothing but the last product has 64 bits, so an address
    costs one or two instructions instead of seven.
    """
    if NEAR:
        at = (page * (by_page // UNIT) + slot * (by_slot // UNIT)).to(tl.int64) * UNIT
    else:
        at = page.to(tl.int64) * by_page + slot * by_slot
    return at


@triton.jit
def read(at, exists, ALL: tl.constexpr):
    """Loads what exists, and 0 elsewhere; ALL says that everything exists."""
    if ALL:
        loaded = tl.load(at)
    else:
        loaded = tl.load(at, mask=exists, other=0.0)  # 0 cannot become a float8
    return loaded


@triton.jit
def key_slots(table, place, is_key, num_pages, ALL: tl.constexpr, PAGE: tl.constexpr):
    """Returns the page and the slot of keys at places of a sequence; page 0 if PAGE is 0, without pages."""
    if PAGE == 0:
        page, slot = 0, place
    else:
        page = read(table + place // PAGE, is_key, ALL)
        page = tl.minimum(tl.maximum(page, 0), num_pages - 1)
        slot = place % PAGE
    return page, slot


@triton.jit
def slots_at(page, slot, by_page, by_slot, NEAR: tl.constexpr, PAGE: tl.constexpr):
    """Returns where slots begin. With pages, or if NEAR, strides are multiples of 8."""
    if PAGE > 0:
        at = slot_at(page, slot, by_page, by_slot, NEAR, 8)
    elif NEAR:
        at = (slot * (by_slot // 8)).to(tl.int64) * 8
    else:
        at = slot.to(tl.int64) * by_slot
    return at


@triton.jit
def read_scales(at, is_key, page, slot, by_page, by_slot, NEAR: tl.constexpr):
    """Loads the scales of keys in slots of pages; ``at`` is the address of the first scale of their head."""
    return tl.load(at + slot_at(page, slot, by_page, by_slot, NEAR, 1), mask=is_key, other=0.0)


@triton.jit
def add_share(top, total, summed, part, part_lse):
    """Adds the partial result of the next share ``[rows, channels]`` and its base-2 log-sum-exp ``[rows]``."""
    top, base, fade = raise_maximum(top, part_lse)
    weight = tl.exp2(part_lse - base)
    total = tl.fma(total, fade, weight)
    summed = tl.fma(summed, tl.broadcast_to(fade[:, None], summed.shape), part * weight[:, None])
    return top, total, summed


@triton.jit
def store_results(top, total, summed, sinks, head, is_row, out_at, lse_at, channel, SINKS: tl.constexpr):
    """Adds the sinks and writes out and lse; a row without keys has output 0 whatever its sink."""
    empty = total == 0.0
    if SINKS:
        sink = tl.load(sinks + head, mask=is_row, other=0.0).to(tl.float32) * LOG2_E
        top, base, fade = raise_maximum(top, sink)
        total = tl.fma(total, fade, tl.exp2(sink - base))
        summed = summed * fade[:, None]
    total = tl.where(empty, 1.0, total)
    # Adding 0 makes -0 to 0: a row that visits a tile in which it sees nothing has no -0.
    result = tl.where(empty[:, None], 0.0, summed * (1.0 / total)[:, None]) + 0.0
    tl.store(out_at[:, None] + channel[None, :], result.to(out_at.dtype.element_ty), mask=is_row[:, None])
    tl.store(lse_at, tl.where(empty, float("-inf"), (top + tl.log2(total)) * LN_2), mask=is_row)


@triton.jit
def attend_to_share(
    queries_tile,
    diagonal,
    slope,
    pools,
    table,
    start,
    border,
    stop,
    numbers,
    PAGE: tl.constexpr,
    NEAR: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    LEFT_OPEN: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Returns the partial result of keys from ``start`` to ``stop``, and its base-2 log-sum-exp, -inf for no keys.

    Args:
        diagonal: the key at each query's own position; it, start, border and stop count from the first visible key.
        pools: the address of a head's keys and their strides by page and slot, and the same of its values. PAGE is 0 if
            keys are not in pages: then slots count from the sequence's first key, and there is no table.
        border: a multiple of KEYS; every row sees the keys from start to there, if LEFT_OPEN.
        numbers: (scale, softcap, left, right, origin, num_pages); origin is the place of the first visible key.
    """
    k_at, k_page, k_slot, v_at, v_page, v_slot = pools
    scale, softcap, left, right, origin, num_pages = numbers
    to_logits = scale * LOG2_E
    channel, value_channel = tl.arange(0, queries_tile.shape[1]), tl.arange(0, VALUE_DIM)
    # For each row the largest base-2 logit so far, the sum of its weights, and the weighted sum of values.
    top = tl.full([queries_tile.shape[0]], float("-inf"), tl.float32)
    total = tl.zeros([queries_tile.shape[0]], tl.float32)
    summed = tl.zeros([queries_tile.shape[0], VALUE_DIM], tl.float32)
    # Two loops, in the order of keys: tiles up to the border, which all rows see, and the others with masks. A window
    # with a left side has none of the former, so the first loop is left out.
    for masked in tl.static_range(0 if LEFT_OPEN else 1, 2):
        for at in range(border if masked and LEFT_OPEN else start, stop if masked else border, KEYS):
            key = at + tl.arange(0, KEYS)
            is_key = key < stop
            page, slot = key_slots(table, origin + key, is_key, num_pages, not masked, PAGE)
            # Keys are read as [channels, keys], so the product needs no transposition.
            keys_at = k_at + slots_at(page, slot, k_page, k_slot, NEAR, PAGE)[None, :] + channel[:, None]
            scores = tl.dot(queries_tile, read(keys_at, is_key[None, :], not masked))
            distance = key[None, :] - diagonal[:, None]
            # What turns scores into base-2 logits; 1 once a softcap or ALiBi has done it.
            factor = to_logits
            if SOFTCAP:
                # tanh(x) = 1 - 2 / (1 + exp(2 x)): exact at both ends, where exp2 is 0 or inf.
                bent = 1.0 - 2.0 / (1.0 + tl.exp2(scores * (to_logits * (2.0 / softcap))))
                scores = bent * (softcap * LOG2_E)
                factor = 1.0
            elif ALIBI:
                scores = scores * to_logits
                factor = 1.0
            if ALIBI:
                scores = scores - slope[:, None] * tl.abs(distance).to(tl.float32)
            if masked:
                seen = is_key[None, :] & (distance <= right) & (distance >= -left)
                scores = tl.where(seen, scores, float("-inf"))
            # The factor is positive, so the largest score becomes the largest base-2 logit, rounded the same way.
            top, base, fade = raise_maximum(top, tl.max(scores, 1) * factor)
            shift = tl.broadcast_to(-base[:, None], scores.shape)
            weights = tl.exp2(tl.fma(scores, tl.full(scores.shape, 1.0, tl.float32) * factor, shift))
            total = tl.fma(total, fade, tl.sum(weights, 1))
            values_at = v_at + slots_at(page, slot, v_page, v_slot, NEAR, PAGE)[:, None]
            values = read(values_at + value_channel[None, :], is_key[:, None], not masked)
            summed = tl.dot(weights.to(values.dtype), values, summed * fade[:, None])
    # Partial results are normalised, so that ``add_share`` needs no maximum of theirs.
    empty = total == 0.0
    divisor = tl.where(empty, 1.0, total)
    part = tl.where(empty[:, None], 0.0, summed * (1.0 / divisor)[:, None])
    return part, tl.where(empty, float("-inf"), top + tl.log2(divisor))


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
    # A row is a query and a head of the group; the heads of a query are neighbours, because they read the same keys.
    row = begin + tl.arange(0, ROWS)
    query = row // GROUP
    head = kv_head * GROUP + row % GROUP
    is_row = query < queries
    token = (first + query).to(tl.int64)
    diagonal = query + own
    # Keys from low to high are seen by some row of the tile; those before by_all by every row, if LEFT_OPEN.
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
        # Shares begin at multiples of SHARE of the sequence, wherever the tile's keys begin: so the sums of a row do
        # not depend on the tile it is in.
        share += tl.program_id(1)
        start, stop = tl.maximum(low, share * SHARE), tl.minimum(high, (share + 1) * SHARE)
        border = tl.maximum(tl.minimum(by_all, (share + 1) * SHARE), start)
        number = tl.program_id(1).to(tl.int64)
        if start >= stop:
            tl.store(lse_at + number * lse_share, tl.full([ROWS], float("-inf"), tl.float32), mask=is_row)
            return
        part, part_lse = attend_to_share(
            queries_tile,
            diagonal,
            slope,
            pools,
            table,
            start,
            border,
            stop,
            numbers,
            PAGE,
            NEAR,
            VALUE_DIM,
            SOFTCAP,
            ALIBI,
            LEFT_OPEN,
            KEYS,
        )
        tl.store((out_at + number * out_share)[:, None] + value_channel[None, :], part, mask=is_row[:, None])
        tl.store(lse_at + number * lse_share, part_lse, mask=is_row)
    else:
        top, total = tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32)
        summed = tl.zeros([ROWS, VALUE_DIM], tl.float32)
        if ONE_SHARE:  # without a loop, in which both sums would need registers at the same time
            part, part_lse = attend_to_share(
                queries_tile,
                diagonal,
                slope,
                pools,
                table,
                low,
                tl.maximum(by_all, low),
                high,
                numbers,
                PAGE,
                NEAR,
                VALUE_DIM,
                SOFTCAP,
                ALIBI,
                LEFT_OPEN,
                KEYS,
            )
            top, total, summed = add_share(top, total, summed, part, part_lse)
        else:
            for at in range(share * SHARE, high, SHARE):
                start, stop = tl.maximum(low, at), tl.minimum(high, at + SHARE)
                border = tl.maximum(tl.minimum(by_all, at + SHARE), start)
                part, part_lse = attend_to_share(
                    queries_tile,
                    diagonal,
                    slope,
                    pools,
                    table,
                    start,
                    border,
                    stop,
                    numbers,
                    PAGE,
                    NEAR,
                    VALUE_DIM,
                    SOFTCAP,
                    ALIBI,
                    LEFT_OPEN,
                    KEYS,
                )
                top, total, summed = add_share(top, total, summed, part, part_lse)
        store_results(top, total, summed, sinks, head, is_row, out_at, lse_at, value_channel, SINKS)


AT_ONCE = tl.constexpr(8)
"""The partial results that ``merge_in_order`` reads before it adds them."""


@triton.jit(do_not_specialize=["shares", "row_tokens"])
def merge_in_order(
    parts,
    part_lse,
    sinks,
    out,
    lse,
    shares,
    row_tokens,
    part_share,
    part_token,
    part_head,
    part_lse_share,
    part_lse_head,
    out_token,
    out_head,
    lse_row,
    lse_head,
    VALUE_DIM: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Adds the partial results of a query and head, share by share; ``row_tokens`` tokens of lse are a row."""
    one = tl.arange(0, 1)
    token, head = tl.program_id(0).to(tl.int64) + one, tl.program_id(1).to(tl.int64) + one
    channel = tl.arange(0, VALUE_DIM)
    parts_at = parts + (token * part_token + head * part_head)[:, None] + channel[None, :]
    lses_at = part_lse + head * part_lse_head + token
    top, total = tl.full([1], float("-inf"), tl.float32), tl.zeros([1], tl.float32)
    summed = tl.zeros([1, VALUE_DIM], tl.float32)
    for first in range(0, shares, AT_ONCE):
        lses, values, share = (), (), (first + one).to(tl.int64)
        # All reads first: they wait for memory together, while the sums wait for each other.
        for i in tl.static_range(AT_ONCE):
            lse_at = lses_at + (share + i) * part_lse_share
            lses += (tl.load(lse_at, mask=share + i < shares, other=float("-inf")),)  # type: ignore[assignment]
        for i in tl.static_range(AT_ONCE):  # a share without keys wrote no values
            part_at = parts_at + (share + i)[:, None] * part_share
            values += (tl.load(part_at, mask=(lses[i] != float("-inf"))[:, None], other=0.0),)  # type: ignore[assignment]
        for i in tl.static_range(AT_ONCE):
            top, total, summed = add_share(top, total, summed, values[i], lses[i])
    out_at = out + token * out_token + head * out_head
    lse_at = lse + token // row_tokens * lse_row + head * lse_head + token % row_tokens
    store_results(top, total, summed, sinks, head, one == 0, out_at, lse_at, channel, SINKS)


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

    ``order.grid_of`` puts them at the end of the grid: the last shares of the keys if there are shares (PARTIAL), else
    the last tiles of rows. If they were anywhere else, multiprocessors that get them would get fewer of the programs
    that attend, and decoding would take up to 1.4 times as long.
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
