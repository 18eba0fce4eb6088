"""Triton kernels on block tables: appending keys and values to pages, and clamping tables for third-party kernels.

This module imports triton, so others import it only when they run.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attn_core.paged.quantised.triton_quantise import channel_of, store_row
from attn_core.paged.triton_rotary import rotate_head


# Triton compiles again if an integer becomes 1 or a multiple of 16. These sizes change from call to call.
@triton.jit(do_not_specialize=["num_pages", "width", "batch", "max_positions"])
def append(
    k,
    v,
    k_pages,
    v_pages,
    block_table,
    seq_lens,
    cu_seqlens_q,
    slot_mapping,
    cos,
    sin,
    positions,
    k_scales,
    v_scales,
    grown_lens,
    num_pages,
    width,
    batch,
    max_positions,
    k_token,
    k_head,
    v_token,
    v_head,
    k_page,
    k_slot,
    k_pool_head,
    v_page,
    v_slot,
    v_pool_head,
    table_row,
    cos_row,
    sin_row,
    k_scale_page,
    k_scale_slot,
    k_scale_head,
    v_scale_page,
    v_scale_slot,
    v_scale_head,
    PAGE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    WIDE: tl.constexpr,
    ONE_QUERY: tl.constexpr,
    SEQUENCES: tl.constexpr,
    SLOTS: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    POSITIONS: tl.constexpr,
    DOUBLE: tl.constexpr,
    ADDED: tl.constexpr,
    KIND: tl.constexpr,
    BY_TOKEN: tl.constexpr,
    LARGEST: tl.constexpr,
    NUMERATOR: tl.constexpr,
    PLACES: tl.constexpr,
    EXPONENT: tl.constexpr,
    MOST: tl.constexpr,
    INVERSE: tl.constexpr,
):
    """Writes one head of one token's key and value to its slot by its sequence's table. Slots out of range are skipped.

    WIDE: a power of two that holds both widths; SEQUENCES: how many offsets are read at once. SLOTS: whether
    slot_mapping says the slots, and the tables are not read. ROTARY_DIM: how many channels of the key rotate; 0: none.
    POSITIONS: whether positions says how far, and not the token's place in its sequence. The constants from KIND on are
    those of ``store_row``, which quantises the rotated key before anything rounds it.
    ADDED: 0 if seq_lens count the new tokens. Else they do not count these tokens, so many in every sequence, and the
    lengths that count them are written to grown_lens.
    """
    token = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)  # 64 bits, because a pool's stride times it may exceed 2^31
    # Before the search for the slot, so that both wait for memory at the same time.
    lane = tl.arange(0, WIDE)
    key_channel = channel_of(lane, HEAD_DIM, WIDE, KIND)
    value_channel = channel_of(lane, VALUE_DIM, WIDE, KIND)
    from_token = token.to(tl.int64)
    key_at = k + from_token * k_token + head * k_head
    key = tl.load(key_at + key_channel, mask=key_channel < HEAD_DIM)
    value = tl.load(v + from_token * v_token + head * v_head + value_channel, mask=value_channel < VALUE_DIM)
    position = token
    # Wrong slots and tables are skipped, never followed: a write outside the pool would corrupt other memory.
    if SLOTS:
        place = tl.load(slot_mapping + token).to(tl.int64)
        if place < 0:  # its quotient may be 0
            return
        page = place // PAGE
        slot = place % PAGE
    else:
        sequence = token
        behind = 1  # tokens from this one to the end of its sequence
        if not ONE_QUERY:
            # The token's sequence is the number of sequences that end at or before it.
            sequence = token * 0
            for first in range(0, batch, SEQUENCES):
                at = first + tl.arange(0, SEQUENCES)
                # Offsets past the batch read as the largest int32, so that they end after every token and count 0.
                ends = tl.load(cu_seqlens_q + 1 + at, mask=at < batch, other=2147483647)
                sequence += tl.sum((ends <= token).to(tl.int32), 0)
            # Tokens after the last offset belong to no sequence and must not be written.
            if sequence >= batch:
                return
            behind = tl.load(cu_seqlens_q + 1 + sequence) - token
        length = tl.load(seq_lens + sequence) + ADDED
        if ADDED > 0:
            # One program for each sequence, also if there is no place for its tokens.
            tl.store(grown_lens + sequence, length, mask=(behind == 1) & (head == 0))
        position = length - behind
        if (position < 0) | (position >= width * PAGE):
            return
        page = tl.load(block_table + sequence.to(tl.int64) * table_row + position // PAGE).to(tl.int64)
        slot = (position % PAGE).to(tl.int64)
    in_pool = (page >= 0) & (page < num_pages)
    turned = key
    if ROTARY_DIM > 0:
        at_angle = tl.load(positions + token) if POSITIONS else position
        # fmt: off
        turned = rotate_head(key, key_at, key_channel, at_angle, cos, sin, max_positions, cos_row, sin_row,
                             ROTARY_DIM, INTERLEAVED, DOUBLE)
        # fmt: on
    k_at = k_pages + page * k_page + slot * k_slot + head * k_pool_head
    k_scale = k_scales + page * k_scale_page + slot * k_scale_slot + head * k_scale_head
    # fmt: off
    store_row(turned, key_channel, k_at, k_scale, in_pool, HEAD_DIM, WIDE,
              KIND, BY_TOKEN, LARGEST, NUMERATOR, PLACES, EXPONENT, MOST, INVERSE)
    # fmt: on
    v_at = v_pages + page * v_page + slot * v_slot + head * v_pool_head
    v_scale = v_scales + page * v_scale_page + slot * v_scale_slot + head * v_scale_head
    # fmt: off
    store_row(value, value_channel, v_at, v_scale, in_pool, VALUE_DIM, WIDE,
              KIND, BY_TOKEN, LARGEST, NUMERATOR, PLACES, EXPONENT, MOST, INVERSE)
    # fmt: on


@triton.jit(do_not_specialize=["num_pages", "width", "entries", "batch"])
def sanitise(
    block_table,
    seq_lens,
    safe_table,
    safe_lens,
    table_row,
    num_pages,
    width,
    entries,
    batch,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copies a table and lengths, with pages clamped to the pool and lengths to the table's capacity, in one launch."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    page = tl.load(block_table + (at // width) * table_row + at % width, mask=at < entries, other=0)
    # Third-party kernels follow a table unchecked: a wrong page would read outside the pool.
    tl.store(safe_table + at, tl.minimum(tl.maximum(page, 0), num_pages - 1), mask=at < entries)
    length = tl.load(seq_lens + at, mask=at < batch, other=0)
    tl.store(safe_lens + at, tl.minimum(tl.maximum(length, 0), width * PAGE), mask=at < batch)
