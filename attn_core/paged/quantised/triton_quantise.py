"""Stores rows of keys and values in a pool, quantised or as they are: the part of Triton's append that writes.

The steps are those of ``quantised.numbers``. Each one is exact, or one addition that rounds half to even, so no GPU can
round in another way. ``constants`` returns the numbers of a dtype.

This module imports triton, so others import it only when they run.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton
import triton.language as tl

from attn_core.paged.quantised.numbers import HIGHEST_SCALE, KINDS, LARGEST, OF_PAGES, OF_TOKENS, SMALLEST

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
