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
    HEADS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Merges the partial results of all splits, for one query and HEADS heads. SHARES: splits read at once.

    DEPENDENT: the programs may start while ``attend`` still runs, and wait for it here (programmatic dependent launch).
    """
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
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
