"""Triton kernels for keys and values in pages: attention that splits the keys of a sequence.

``attend`` runs one program for each key/value head of a sequence, block of its queries and share of its keys. The query
heads of a group are rows of one tile, so each key is read once for all of them. A program keeps the running maximum and
sum of FlashAttention (Dao et al. 2022, arXiv:2205.14135). If the keys are split, ``merge`` combines the shares by their
log-sum-exps (flash-decoding) and adds the sinks. A share that saw no key has -inf and so no weight.
``attend_in_order`` adds in one order, whatever the batch, the chunk and the pages are; ``in_order.rows`` says in which.

Tables are on the device and cannot be checked, so pages are clamped to the pool, lengths to the table, and offsets to
the queries. A key past the end of its sequence is never read, so NaN in the rest of its page has no effect.

This module imports triton, so others import it only when they run.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attn_core.backends.shared.in_order.rows import (
    LN_2,
    LOG2_E,
    attend_rows,
    clear_tail,
    is_behind,
    queries_of,
    raise_maximum,
    read,
    read_scales,
    slot_at,
)
from attn_core.backends.triton_splitkv import launches
from attn_core.backends.triton_splitkv.stored_tiles import (
    FLOAT8,
    HEADROOM,
    INT4,
    channel_of_key,
    fit_float16,
    key_numbers,
    scale_weights,
    store_parts,
    value_numbers,
)


# Triton compiles again for arguments that are 1 or a multiple of 16. These change from call to call.
@triton.jit(do_not_specialize=["tokens", "num_pages", "width", "left", "right", "range_head", "slope_row"])
def attend(
    q,
    k_pages,
    v_pages,
    block_table,
    seq_lens,
    cu_seqlens_q,
    sinks,
    key_ranges,
    alibi_slopes,
    kv_starts,
    k_scales,
    v_scales,
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
    out_split,
    out_token,
    out_head,
    lse_split,
    lse_head,
    range_head,
    slope_row,
    k_scale_page,
    k_scale_slot,
    k_scale_head,
    v_scale_page,
    v_scale_slot,
    v_scale_head,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE: tl.constexpr,
    NEAR: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    ONE_QUERY: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    RANGES: tl.constexpr,
    LEFT_OPEN: tl.constexpr,
    FUSED: tl.constexpr,
    ALIBI: tl.constexpr,
    STARTS: tl.constexpr,
    KIND: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Computes out and lse of one share of the keys; with SPLITS > 1 they are float32 partial results, one per split.

    q ``[tokens, heads, head_dim]``; out ``[splits, tokens, heads, value_dim]``; lse ``[splits, heads, tokens]``,
    natural. key_ranges ``[kv_heads or 1, tokens, RANGES, 2]``; range_head is 0 for one head. alibi_slopes float32
    ``[sequences or 1, heads]``; slope_row is 0 for one row. ROWS and KEYS: queries (times GROUP) and keys of a tile.
    LEFT_OPEN: no left window. FUSED: ``scores.weights_of``. NEAR: ``loads.slot_at``. Others are strides in elements.

    KIND: how the pages are quantised (``quantised.KINDS``), 0 if they are not. A scale of a key multiplies its
    score. Weights times the scales of values, over the largest scale so far, are float16, as the stored numbers become.
    Tiles are read as words of two bytes, and become a tile for each place of a number in a word. ASSEMBLY: see
    ``stored_tiles``.
    """
    sequence = tl.program_id(0) // KV_HEADS
    kv_head = (tl.program_id(0) % KV_HEADS).to(tl.int64)  # 64 bits, because a pool's stride times it may exceed 2^31
    split = tl.program_id(1)
    if not ONE_QUERY and is_behind(SPLITS > 1):
        strides = out_split, out_token, out_head, lse_split, lse_head
        clear_tail((out, lse, cu_seqlens_q, tokens), strides, KV_HEADS, GROUP, VALUE_DIM, SPLITS > 1)
        return
    length = tl.load(seq_lens + sequence)
    length = tl.minimum(tl.maximum(length, 0), width * PAGE)
    first, queries = queries_of(cu_seqlens_q, sequence, tokens, ONE_QUERY)
    begin = tl.program_id(2) * ROWS
    if begin >= queries * GROUP:  # the grid is sized for the longest sequence
        return
    row = begin + tl.arange(0, ROWS)
    query, head = row // GROUP, kv_head * GROUP + row % GROUP
    is_row = query < queries
    token = (first + query).to(tl.int64)
    diagonal = query + length - queries  # the key at the query's own position

    where = begin, queries, length, left, right, kv_starts + sequence
    start, end = share_of(where, split, STARTS, GROUP, ROWS, KEYS, SPLITS)
    parts: tl.constexpr = 1 if KIND == 0 else 4 if KIND == INT4 else 2
    place_of_key, place_of_value = tl.arange(0, HEAD_DIM // parts), tl.arange(0, VALUE_DIM // parts)
    rows_at = (q + token * q_token + head * q_head)[:, None]
    queries_tile = ()
    for i in tl.static_range(parts):
        part_at = rows_at + channel_of_key(place_of_key, i, parts, HEAD_DIM, ASSEMBLY)[None, :]
        queries_tile += (tl.load(part_at, mask=is_row[:, None], other=0.0),)  # type: ignore[assignment]
    to_logits, row_scale = scale * LOG2_E, tl.full([ROWS], 1.0, tl.float32) * (scale * LOG2_E)
    if KIND != 0:
        queries_tile, correction, row_scale = fit_float16(queries_tile, to_logits, KIND, parts)
        to_logits = row_scale[:, None]
    slope = tl.zeros([ROWS], tl.float32)
    if ALIBI:
        slope = tl.load(alibi_slopes + sequence * slope_row + head, mask=is_row, other=0.0) * LOG2_E
    top, total = tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32)
    largest_scale = 2.0**-110  # HEADROOM divided by it is finite
    summed = ()
    for _ in tl.static_range(parts):
        summed += (tl.zeros([ROWS, VALUE_DIM // parts], tl.float32),)  # type: ignore[assignment]
    table = block_table + sequence.to(tl.int64) * table_row
    k_at, v_at = k_pages + kv_head * k_head, v_pages + kv_head * v_head
    if KIND != 0:
        # Words of two bytes: pools lie at multiples of 16 bytes, and so does each row of channels.
        k_at, k_page, k_slot = k_at.to(tl.pointer_type(tl.int16)), k_page // 2, k_slot // 2
        v_at, v_page, v_slot = v_at.to(tl.pointer_type(tl.int16)), v_page // 2, v_slot // 2
        k_scale_at, v_scale_at = k_scales + kv_head * k_scale_head, v_scales + kv_head * v_scale_head
    # Whole tiles of keys before the new tokens run first. They need no ranges, and without a window no mask.
    border = end
    if RANGES or LEFT_OPEN:
        old = tl.minimum(tl.maximum(length - queries - start, 0), tl.maximum(end - start, 0))
        border = start + old // KEYS * KEYS
    for part in tl.static_range(2 if RANGES or LEFT_OPEN else 1):
        for at in range(start if part == 0 else border, border if part == 0 else end, KEYS):
            key = at + tl.arange(0, KEYS)
            is_key = key < end
            page = read(table + key // PAGE, is_key, part == 0 and LEFT_OPEN)
            page = tl.minimum(tl.maximum(page, 0), num_pages - 1)
            slot = key % PAGE
            keys_at = slot_at(page, slot, k_page, k_slot, NEAR, 8)
            stored = read_keys(k_at, place_of_key, keys_at, is_key, part == 0 and LEFT_OPEN, ROWS)
            key_parts = key_numbers(stored, KIND, ASSEMBLY)
            scores = tl.zeros([ROWS, KEYS], tl.float32)
            for i in tl.static_range(parts):
                scores = multiply(queries_tile[i], key_parts[i], scores)
            if KIND != 0:
                if KIND != FLOAT8:
                    scores += correction[:, None]
                scores *= read_scales(k_scale_at, is_key, page, slot, k_scale_page, k_scale_slot, NEAR)[None, :]
            if not FUSED or part == 1:
                scores, distance = logits_of(scores, to_logits, softcap, slope, key, diagonal, SOFTCAP, ALIBI)
            if part == 1 or not LEFT_OPEN:
                seen = is_key[None, :] & (distance <= right) & (distance >= -left)
                if part == 1 and RANGES:
                    ranges = key_ranges + kv_head * range_head
                    seen &= is_shown(ranges, key, is_key, token, first, queries, length, tokens, RANGES)
                scores = tl.where(seen, scores, float("-inf"))
            top, weights, fade = weights_of(scores, top, row_scale, FUSED and part == 0)
            total = total * fade + tl.sum(weights, 1)
            if KIND != 0:
                value_scale = read_scales(v_scale_at, is_key, page, slot, v_scale_page, v_scale_slot, NEAR)
                weights, fade, largest_scale = scale_weights(weights, fade, value_scale, largest_scale)
            values_at = slot_at(page, slot, v_page, v_slot, NEAR, 8)
            stored = read_values(v_at, place_of_value, values_at, is_key, part == 0 and LEFT_OPEN, ROWS)
            # The tensor cores take both operands in one dtype. The sum stays float32.
            weights = weights.to(queries_tile[0].dtype)  # type: ignore[misc]
            numbers = value_numbers(stored, KIND, ASSEMBLY)
            added = ()
            for i in tl.static_range(parts):
                added += (multiply(weights, numbers[i], summed[i] * fade[:, None]),)  # type: ignore[assignment]
            summed = added

    empty = total == 0.0  # before the sink is added: a row without keys has output 0 whatever its sink
    fade = tl.full([ROWS], 1.0, tl.float32)
    if SINKS and SPLITS == 1:  # with splits, merge adds the sink once
        sink = tl.load(sinks + head, mask=is_row, other=0.0).to(tl.float32) * LOG2_E
        top, base, fade = raise_maximum(top, sink)
        total = total * fade + tl.exp2(sink - base)
    if KIND != 0:
        fade *= largest_scale / HEADROOM
    divisor = tl.where(empty, 1.0, total)
    row_lse = tl.where(empty, float("-inf"), (top + tl.log2(divisor)) * LN_2)
    out_at = out + split.to(tl.int64) * out_split + token[:, None] * out_token + head[:, None] * out_head
    store_parts(out_at, summed, fade, divisor, empty, is_row, parts, VALUE_DIM)
    tl.store(lse + split.to(tl.int64) * lse_split + head * lse_head + token, row_lse, mask=is_row)


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
        tensors,
        pools,
        table,
        (kv_head, first, queries, begin, keys - queries, keys),
        numbers,
        (q_token, q_head, out_share, out_token, out_head, lse_share, lse_head),
        GROUP,
        PAGE,
        NEAR,
        HEAD_DIM,
        VALUE_DIM,
        SOFTCAP,
        SINKS,
        LEFT_OPEN,
        ALIBI,
        PARTIAL,
        ONE_SHARE,
        SHARE,
        ROWS,
        KEYS,
    )


TURNED_ROWS = tl.constexpr(launches.TURNED_ROWS)


# Products of tiles of queries and keys, and of weights and values, in the orientation that wastes fewest rows. The
# tensor cores multiply 16 rows by 8 columns at once. A tile of 8 queries would leave half of 16 rows empty, so its
# products are turned around: keys and channels are the rows, and queries are the columns. The results are turned back,
# which moves no data.


@triton.jit
def multiply(rows, columns, added):
    """Returns the product of rows ``[n, k]`` and columns ``[k, m]``, plus ``[n, m]``; float32.

    If n is TURNED_ROWS, columns are ``[m, k]``.
    """
    if rows.shape[0] == TURNED_ROWS:
        return tl.trans(tl.dot(columns, tl.trans(rows), tl.trans(added)))
    else:
        return tl.dot(rows, columns, added)


@triton.jit
def read_keys(address, channel, slots, is_key, ALL: tl.constexpr, ROWS: tl.constexpr):
    """Reads channels of keys at slots, as columns of a product with ROWS queries. ALL: every key exists.

    Larger tiles are read like values, so that a thread finds the page of a slot once for both.
    """
    tile = _read_tile(address, channel, slots, is_key, ALL, True)
    return tile if ROWS == TURNED_ROWS else tl.trans(tile)


@triton.jit
def read_values(address, channel, slots, is_key, ALL: tl.constexpr, ROWS: tl.constexpr):
    """Reads channels of values at slots, as columns of a product with the weights of ROWS queries."""
    return _read_tile(address, channel, slots, is_key, ALL, ROWS != TURNED_ROWS)


@triton.jit
def _read_tile(address, channel, slots, is_key, ALL: tl.constexpr, KEYS_FIRST: tl.constexpr):
    """Reads ``[keys, channels]`` with KEYS_FIRST, else ``[channels, keys]``."""
    if KEYS_FIRST:
        tile = read(address + slots[:, None] + channel[None, :], is_key[:, None], ALL)
    else:
        tile = read(address + slots[None, :] + channel[:, None], is_key[None, :], ALL)
    return tile


@triton.jit
def logits_of(scores, to_logits, softcap, slope, key, diagonal, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr):
    """Returns the logits of products of queries and keys, and how far each key lies behind its query's diagonal.

    The logits are to base 2, because GPUs compute exp2 directly; to_logits and slope, one for each row, contain
    log2(e). diagonal is the position of each query.
    """
    if SOFTCAP:
        # tanh(x) = 1 - 2 / (1 + exp(2 x)): exact at both ends, where exp2 is 0 or inf.
        bent = 1.0 - 2.0 / (1.0 + tl.exp2(scores * (to_logits * (2.0 / softcap))))
        scores = bent * (softcap * LOG2_E)
    else:
        scores = scores * to_logits
    distance = key[None, :] - diagonal[:, None]
    if ALIBI:
        scores -= slope[:, None] * tl.abs(distance).to(tl.float32)
    return scores, distance


@triton.jit
def weights_of(scores, top, row_scale, SCALE: tl.constexpr):
    """Returns the new running maximum, the weights, and the factor that rescales the sums so far.

    With SCALE the scores are not logits yet: row_scale, which is not negative, makes them logits. One instruction then
    multiplies and subtracts. No score may be -inf, because 0 times it is NaN.
    """
    if SCALE:
        top, base, fade = raise_maximum(top, tl.max(scores, 1) * row_scale)
        weights = tl.exp2(scores * row_scale[:, None] - base[:, None])
    else:
        top, base, fade = raise_maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - base[:, None])
    return top, weights, fade


@triton.jit
def share_of(
    where,
    split,
    STARTS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Returns the first key of a split, and the end: of the keys that some row of a tile may see, in whole tiles.

    Args:
        where: (begin, queries, length, left, right, first_key): the first row of the tile, the queries and keys of the
            sequence, the window, and the address of the sequence's first key, if STARTS.
    """
    begin, queries, length, left, right, first_key = where
    last_query = tl.minimum((begin + ROWS - 1) // GROUP, queries - 1)
    low = tl.maximum(begin // GROUP + length - queries - left, 0)
    if STARTS:  # no tile begins before it, so no key before it is read
        low = tl.maximum(low, tl.load(first_key))
    high = tl.minimum(last_query + length - queries + right + 1, length)
    tiles = tl.maximum(high - low + KEYS - 1, 0) // KEYS
    # Round up, so that all splits together cover every tile; the last splits may have none.
    share = (tiles + SPLITS - 1) // SPLITS * KEYS
    start = low + split * share
    return start, tl.minimum(start + share, high)


@triton.jit
def is_shown(ranges, key, is_key, token, first, queries, length, tokens, RANGES: tl.constexpr):
    """Returns which tokens (rows) the ranges of each key show: those of new keys; an earlier key is always shown.

    first is the first token of the sequence, ranges the address of the head's ranges.
    """
    # A new token has the same number from the end among the keys as among the queries.
    place = key + queries - length
    is_new = is_key & (place >= 0)
    ranges_at = ranges + (first + place).to(tl.int64) * (2 * RANGES)
    shown = _is_in_range(ranges_at, is_new, tokens, token)
    if RANGES == 2:
        shown |= _is_in_range(ranges_at + 2, is_new, 0, token)
    return shown


@triton.jit
def _is_in_range(at, is_new, stop_of_old, token):
    """Returns which tokens (rows) each key's range at this address shows; the range of an old key ends at a number."""
    start = tl.load(at, mask=is_new, other=0)
    stop = tl.load(at + 1, mask=is_new, other=stop_of_old)
    return (token[:, None] >= start[None, :]) & (token[:, None] < stop[None, :])


@triton.jit
def merge(
    part,
    part_lse,
    sinks,
    out,
    lse,
    part_split,
    part_token,
    part_head,
    part_lse_split,
    part_lse_head,
    out_token,
    out_head,
    lse_head,
    VALUE_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    SINKS: tl.constexpr,
    SHARES: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Merges the partial results of all splits, for one query and HEADS heads. SHARES: splits read at once."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    channel = tl.arange(0, VALUE_DIM)
    lse_at = part_lse + head * part_lse_head + token
    part_at = part + token * part_token + head[:, None] * part_head + channel[None, :]
    top = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    summed = tl.zeros([HEADS, VALUE_DIM], tl.float32)
    for first in range(0, SPLITS, SHARES):
        logs, values = (), ()
        newest = top
        for i in tl.static_range(SHARES):  # every load before the first use, so that one waiting time serves all
            exists = first + i < SPLITS
            log = tl.load(lse_at + (first + i) * part_lse_split, mask=exists, other=float("-inf")) * LOG2_E
            values_at = part_at + tl.cast(first + i, tl.int64) * part_split
            logs += (log,)  # type: ignore[assignment]
            values += (tl.load(values_at, mask=exists, other=0.0),)  # type: ignore[assignment]
            newest = tl.maximum(newest, log)
        top, base, fade = raise_maximum(top, newest)
        total, summed = total * fade, summed * fade[:, None]
        for i in tl.static_range(SHARES):
            weight = tl.exp2(logs[i] - base)
            total, summed = total + weight, summed + values[i] * weight[:, None]
    empty = total == 0.0
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2_E
        top, base, fade = raise_maximum(top, sink)
        total = total * fade + tl.exp2(sink - base)
        summed = summed * fade[:, None]
    total = tl.where(empty, 1.0, total)
    result = tl.where(empty[:, None], 0.0, summed / total[:, None])
    out_at = out + token * out_token + head[:, None] * out_head + channel[None, :]
    tl.store(out_at, result.to(out.dtype.element_ty))
    tl.store(lse + head * lse_head + token, tl.where(empty, float("-inf"), (top + tl.log2(total)) * LN_2))
