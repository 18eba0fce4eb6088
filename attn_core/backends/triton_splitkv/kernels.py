"""Triton kernels for keys and values in pages: attention that splits the keys of a sequence.

``attend`` runs one program for each key/value head of a sequence, block of its queries and share of its keys. The query
heads of a group are rows of one tile, so each key is read once for all of them. A program keeps the running maximum and
sum of FlashAttention (Dao et al. 2022, arXiv:2205.14135). If the keys are split, ``merge`` combines the shares by their
log-sum-exps (flash-decoding) and adds the sinks. A share that saw no key has -inf and so no weight.

Tables are on the device and cannot be checked, so pages are clamped to the pool, lengths to the table, and offsets to
the queries. A key past the end of its sequence is never read, so NaN in the rest of its page has no effect.

This module imports triton, so others import it only when they run.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attn_core.backends.shared.in_order.loads import read, read_scales, slot_at
from attn_core.backends.shared.in_order.new_tokens import clear_tail, is_behind, queries_of
from attn_core.backends.shared.in_order.running_maximum import LN_2, LOG2_E, raise_maximum
from attn_core.backends.triton_splitkv.merge_kernel import merge  # noqa: F401
from attn_core.backends.triton_splitkv.products import multiply, read_keys, read_values
from attn_core.backends.triton_splitkv.scores import is_shown, logits_of, share_of, weights_of
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
    DEPENDENT: tl.constexpr,
):
    """Computes out and lse of one share of the keys; with SPLITS > 1 they are float32 partial results, one per split.

    q ``[tokens, heads, head_dim]``; out ``[splits, tokens, heads, value_dim]``; lse ``[splits, heads, tokens]``,
    natural. key_ranges ``[kv_heads or 1, tokens, RANGES, 2]``; range_head is 0 for one head. alibi_slopes float32
    ``[sequences or 1, heads]``; slope_row is 0 for one row. ROWS and KEYS: queries (times GROUP) and keys of a tile.
    LEFT_OPEN: no left window. FUSED: ``scores.weights_of``. NEAR: ``loads.slot_at``. Others are strides in elements.

    KIND: how the pages are quantised (``quantised.numbers.KINDS``), 0 if they are not. A scale of a key multiplies its
    score. Weights times the scales of values, over the largest scale so far, are float16, as the stored numbers become.
    Tiles are read as words of two bytes, and become a tile for each place of a number in a word. ASSEMBLY: see
    ``stored_tiles``. DEPENDENT: see ``merge``.
    """
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
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
