"""The Triton kernel that merges the shares of a sequence's keys.

This module imports triton, so others import it only when they run.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attn_core.backends.shared.in_order.running_maximum import LN_2, LOG2_E, raise_maximum


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
):
    """Merges the partial results of all splits, for one query and one head. SHARES: splits read at once."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    channel = tl.arange(0, VALUE_DIM)
    top = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    summed = tl.zeros([VALUE_DIM], tl.float32)
    for first in range(0, SPLITS, SHARES):
        split = first + tl.arange(0, SHARES)
        exists = split < SPLITS
        lse_at = part_lse + split * part_lse_split + head * part_lse_head + token
        share_lse = tl.load(lse_at, mask=exists, other=float("-inf")) * LOG2_E
        top, base, fade = raise_maximum(top, tl.max(share_lse, 0))
        weights = tl.exp2(share_lse - base)
        part_at = part + split.to(tl.int64)[:, None] * part_split + token * part_token + head * part_head
        values = tl.load(part_at + channel[None, :], mask=exists[:, None], other=0.0)
        total = total * fade + tl.sum(weights, 0)
        summed = summed * fade + tl.sum(values * weights[:, None], 0)
    empty = total == 0.0
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2_E
        top, base, fade = raise_maximum(top, sink)
        total = total * fade + tl.exp2(sink - base)
        summed = summed * fade
    total = tl.where(empty, 1.0, total)
    result = tl.where(empty, 0.0, summed / total)
    tl.store(out + token * out_token + head * out_head + channel, result.to(out.dtype.element_ty))
    one = tl.arange(0, 1)  # top and total are blocks of one element, so the address must be one, too
    tl.store(lse + head * lse_head + token + one, tl.where(empty, float("-inf"), (top + tl.log2(total)) * LN_2))
