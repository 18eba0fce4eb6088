"""Triton functions for rotary embeddings: of one head in registers, and of all heads of an array.

Launch kernels that use them with ``enable_fp_fusion=False``: see ``attn_core.paged.rotary`` for the rounding.
This module imports triton, so others import it only when they run.
"""

from __future__ import annotations

import triton
import triton.language as tl


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
