"""The Triton kernel of the sums of rows that the gradient kernels need.

This module imports triton, so others import it only when they run.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attn_core.backends.shared.in_order.running_maximum import LOG2_E


@triton.jit(do_not_specialize=["tokens", "lse_row", "lse_head"])
def row_sums(
    out,
    dout,
    lse,
    dlse,
    shift,
    delta,
    tokens,
    out_row,
    out_token,
    out_head,
    dout_row,
    dout_token,
    dout_head,
    lse_row,
    lse_head,
    HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    DLSE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Computes delta and the shift of a tile of tokens of one row and head: the lse in base 2.

    For a query that sees no key delta is 0, and the shift inf, so that its weights are 0. out, dout ``[rows, tokens,
    heads, value_dim]``; lse, dlse, shift and delta ``[rows, heads, tokens]`` have the same strides. DLSE: whether there
    is a dlse.
    """
    blocks = (tokens + ROWS - 1) // ROWS
    place = tl.program_id(0) // blocks
    row, head = (place // HEADS).to(tl.int64), (place % HEADS).to(tl.int64)
    token = (tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    channel = tl.arange(0, VALUE_DIM)
    is_row = token < tokens
    lse_at = row * lse_row + head * lse_head + token
    out_at = out + row * out_row + head * out_head + token[:, None] * out_token + channel[None, :]
    dout_at = dout + row * dout_row + head * dout_head + token[:, None] * dout_token + channel[None, :]
    products = tl.load(out_at, mask=is_row[:, None], other=0.0).to(tl.float32)
    products *= tl.load(dout_at, mask=is_row[:, None], other=0.0).to(tl.float32)
    total = tl.sum(products, 1)
    if DLSE:
        total -= tl.load(dlse + lse_at, mask=is_row, other=0.0)
    row_lse = tl.load(lse + lse_at, mask=is_row, other=0.0)
    sees = row_lse != float("-inf")
    tl.store(shift + lse_at, tl.where(sees, row_lse * LOG2_E, float("inf")), mask=is_row)
    tl.store(delta + lse_at, tl.where(sees, total, 0.0), mask=is_row)


@triton.jit(do_not_specialize=["rows", "tokens", "sums_row", "sums_head"])
def sink_sums(
    sinks,
    shift,
    delta,
    dsinks,
    rows,
    tokens,
    sums_row,
    sums_head,
    TILE: tl.constexpr,
):
    """Computes the gradient of one head's sink, the sum over rows of -exp(sink - lse) delta; dsinks float32 [heads]."""
    head = tl.program_id(0).to(tl.int64)
    sink = tl.load(sinks + head).to(tl.float32) * LOG2_E
    total = tl.zeros([TILE], tl.float32)
    for row in range(0, rows):
        for at in range(0, tokens, TILE):
            token = at + tl.arange(0, TILE)
            sums_at = tl.cast(row, tl.int64) * sums_row + head * sums_head + token
            weight = tl.exp2(sink - tl.load(shift + sums_at, mask=token < tokens, other=float("inf")))
            total = tl.fma(weight, tl.load(delta + sums_at, mask=token < tokens, other=0.0), total)
    tl.store(dsinks + head, -tl.sum(total, 0))
