"""The Triton kernel that adds the partial results of ``rows`` in order.

This module imports triton, so others import it only when they run.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attn_core.backends.shared.in_order.sums import add_share, store_results

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
