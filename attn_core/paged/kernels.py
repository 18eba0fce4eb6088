"""Triton kernels on pools and block tables: appends, rotary embeddings, and tables clamped for third-party kernels.

The steps of an append are those of ``quantised``. Each one is exact, or one addition that rounds half to even, so no
GPU can round in another way. ``constants`` returns the numbers of a dtype. Launch kernels that rotate with
``enable_fp_fusion=False``: see ``attn_core.paged.rotary`` for the rounding.

This module imports triton, so others import it only when they run.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton
import triton.language as tl

from attn_core.paged.quantised import HIGHEST_SCALE, KINDS, LARGEST, OF_PAGES, OF_TOKENS, SMALLEST

INFINITY = tl.constexpr(0x7F800000)
SMALLEST_BITS = tl.constexpr(int(np.float32(SMALLEST).view(np.int32)))


def constants(dtype: str | None, scales: str | None) -> dict[str, Any]:
    """Returns the constants of ``store_row`` for pages of a dtype, with scales by page or by token."""
    if dtype is None:
        names = ("KIND", "BY_TOKEN", "LARGEST", "NUMERATOR", "PLACES", "EXPONENT", "MOST")
        return {**dict.fromkeys(names, 0), "INVERSE": 0.0}
    by_token = scales == "token"
    by = OF_TOKENS[dtype] if by_token else OF_PAGES
    return {
        **{"KIND": KINDS[dtype], "BY_TOKEN": int(by_token), "LARGEST": LARGEST[dtype]},
        **{"NUMERATOR": by.numerator, "PLACES": by.places, "EXPONENT": by.exponent},
        "MOST": by.most if by_token else int(np.float32(HIGHEST_SCALE).view(np.int32)),
        "INVERSE": float(np.float32(1 / LARGEST[dtype])),
    }


@triton.jit
def channel_of(lane, DIM: tl.constexpr, WIDE: tl.constexpr, KIND: tl.constexpr):
    """Returns the channel of each of WIDE lanes, DIM for a lane without one. For int4 each half of the lanes has half
    of the channels."""
    channel = lane
    if KIND == 3:
        place = lane % (WIDE // 2)
        channel = tl.where(place < DIM // 2, place + (lane // (WIDE // 2)) * (DIM // 2), DIM)
    return channel


@triton.jit
def store_row(
    row,
    channel,
    pool,
    scale,
    in_pool,
    DIM: tl.constexpr,
    WIDE: tl.constexpr,
    KIND: tl.constexpr,
    BY_TOKEN: tl.constexpr,
    LARGEST: tl.constexpr,
    NUMERATOR: tl.constexpr,
    PLACES: tl.constexpr,
    EXPONENT: tl.constexpr,
    MOST: tl.constexpr,
    INVERSE: tl.constexpr,
):
    """Stores the channels of one token and head, quantised unless KIND is 0.

    pool and scale: the addresses of the token's first channel, and of its scale, which is written if BY_TOKEN; valid
    if in_pool. A branch instead would make the compiler load the row and its angles after the page, not beside it.
    """
    if KIND == 0:
        tl.store(pool + channel, row, mask=(channel < DIM) & in_pool)
    else:
        number = tl.where(channel < DIM, row.to(tl.float32), 0.0)
        if BY_TOKEN:
            # Of the bits, because a maximum of floats may drop a NaN.
            magnitude = tl.max(number.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0)
        else:
            magnitude = tl.load(scale, mask=in_pool, other=1.0).to(tl.int32, bitcast=True)
        usable = magnitude < INFINITY
        if not BY_TOKEN:
            usable = usable & (magnitude > 0)
        dropped: tl.constexpr = (1 << (23 - PLACES)) - 1
        rounded = tl.minimum(tl.maximum(tl.where(usable, magnitude, SMALLEST_BITS), SMALLEST_BITS), MOST)
        rounded = (rounded + dropped) & ~dropped
        digits = ((rounded >> (23 - PLACES)) & ((1 << PLACES) - 1)) | (1 << PLACES)
        quotient = _divide(NUMERATOR, digits).to(tl.float32).to(tl.int32, bitcast=True)
        factor = (quotient + ((EXPONENT - (rounded >> 23)) << 23)).to(tl.float32, bitcast=True)
        if BY_TOKEN:
            new_scale = rounded.to(tl.float32, bitcast=True) * INVERSE
            tl.store(scale, tl.where(usable, new_scale, float("nan")), mask=in_pool)
        stored = tl.where(usable, _stored(number * factor, KIND, LARGEST), 0)
        if KIND == 3:
            low, high = tl.split(tl.trans(tl.reshape(stored & 15, (2, WIDE // 2))))
            byte = tl.arange(0, WIDE // 2)
            tl.store(pool + byte, (low | (high << 4)).to(pool.dtype.element_ty), mask=(byte < DIM // 2) & in_pool)
        else:
            tl.store(pool + channel, stored.to(pool.dtype.element_ty), mask=(channel < DIM) & in_pool)


@triton.jit
def _divide(NUMERATOR: tl.constexpr, digits):
    """Returns the integer quotient, which is below 2**20, in half the time of an integer division."""
    guess = ((NUMERATOR * 1.0) / digits.to(tl.float32)).to(tl.int32)  # wrong by one at most
    rest = NUMERATOR - guess * digits
    return guess + (rest >= digits).to(tl.int32) - (rest < 0).to(tl.int32)


@triton.jit
def _stored(product, KIND: tl.constexpr, LARGEST: tl.constexpr):
    """Returns stored numbers as int32, e4m3 as its bits: saturated, rounded half to even."""
    bits = product.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    is_nan = magnitude > INFINITY
    magnitude = tl.minimum(magnitude, tl.full(magnitude.shape, LARGEST, tl.float32).to(tl.int32, bitcast=True))
    exponent = tl.full(magnitude.shape, 3, tl.int32)
    if KIND == 1:  # three bits behind the leading one, fewer below 2**-6
        exponent = tl.maximum((magnitude >> 23) - 127, -6)
    # The last bit of 1.5 * 2**(exponent + 20) is a step of the stored numbers, so the sum is rounded to steps.
    large = ((exponent + 147) << 23) | 0x400000
    rounded = magnitude.to(tl.float32, bitcast=True) + large.to(tl.float32, bitcast=True)
    stored = rounded.to(tl.int32, bitcast=True) - large
    if KIND == 1:
        # A leading one counts as 1 in the exponent's field, which therefore begins at 0 for 2**-6.
        stored += (exponent + 6) << 3
        return tl.where(is_nan, 127, stored | ((bits >> 24) & 128))
    return tl.where(is_nan, 0, tl.where(bits < 0, -stored, stored))


@triton.jit
def rotate_head(
    x,
    head,
    channel,
    position,
    cos,
    sin,
    max_positions,
    cos_row,
    sin_row,
    ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    DOUBLE: tl.constexpr,
):
    """Returns a head's channels, turned by the angles of a position; float32, or float64 if DOUBLE.

    x: the channels, as loaded; head: their address, from which the other channel of each pair is loaded again.
    """
    kind: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    turns = channel < ROTARY_DIM
    if INTERLEAVED:
        is_first = channel % 2 == 0
        pair = channel // 2
        other = tl.where(is_first, channel + 1, channel - 1)
    else:
        is_first = channel < ROTARY_DIM // 2
        pair = tl.where(is_first, channel, channel - ROTARY_DIM // 2)
        other = tl.where(is_first, channel + ROTARY_DIM // 2, channel - ROTARY_DIM // 2)
    # 64 bits, because a position times a stride may exceed 2^31. A wrong position must not read outside of the tables.
    row = tl.minimum(tl.maximum(position, 0), max_positions - 1).to(tl.int64)
    partner = tl.load(head + other, mask=turns, other=0.0).to(kind)
    cosine = tl.load(cos + row * cos_row + pair, mask=turns, other=1.0).to(kind)
    sine = tl.load(sin + row * sin_row + pair, mask=turns, other=0.0).to(kind)
    wide = x.to(kind)
    # Rounding is symmetric, so adding the product with -sine equals subtracting the product.
    turned = wide * cosine + partner * tl.where(is_first, -sine, sine)
    return tl.where(turns, turned, wide)


@triton.jit(do_not_specialize=["max_positions"])
def rotate(
    x,
    cos,
    sin,
    positions,
    out,
    max_positions,
    x_token,
    x_head,
    cos_row,
    sin_row,
    out_token,
    out_head,
    HEAD_DIM: tl.constexpr,
    WIDE: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    DOUBLE: tl.constexpr,
):
    """Writes one rotated head of one token. WIDE: a power of two that holds its channels."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    channel = tl.arange(0, WIDE)
    start = x + token * x_token + head * x_head
    here = tl.load(start + channel, mask=channel < HEAD_DIM)
    position = tl.load(positions + token)
    turned = rotate_head(
        here, start, channel, position, cos, sin, max_positions, cos_row, sin_row, ROTARY_DIM, INTERLEAVED, DOUBLE
    )
    tl.store(out + token * out_token + head * out_head + channel, turned, mask=channel < HEAD_DIM)


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
