"""The sums of ``rows``: tiles of keys into a share's partial result, and shares into the result.

A tile or share in which a row sees nothing changes none of its bits, because its weights are 0 and its ``fade`` is 1.
A row's sums over keys are within one warp, in the same order for all numbers of rows, if a launch has a warp for each
16 rows. ``tl.fma`` says where a product and a sum round once; nothing else is fused (``enable_fp_fusion=False``).

This module imports triton, so others import it only when they run.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attn_core.backends.shared.in_order.loads import key_slots, read, slots_at
from attn_core.backends.shared.in_order.running_maximum import LN_2, LOG2_E, raise_maximum


@triton.jit
def add_share(top, total, summed, part, part_lse):
    """Adds the partial result of the next share ``[rows, channels]`` and its base-2 log-sum-exp ``[rows]``."""
    top, base, fade = raise_maximum(top, part_lse)
    weight = tl.exp2(part_lse - base)
    total = tl.fma(total, fade, weight)
    summed = tl.fma(summed, tl.broadcast_to(fade[:, None], summed.shape), part * weight[:, None])
    return top, total, summed


@triton.jit
def store_results(top, total, summed, sinks, head, is_row, out_at, lse_at, channel, SINKS: tl.constexpr):
    """Adds the sinks and writes out and lse; a row without keys has output 0 whatever its sink."""
    empty = total == 0.0
    if SINKS:
        sink = tl.load(sinks + head, mask=is_row, other=0.0).to(tl.float32) * LOG2_E
        top, base, fade = raise_maximum(top, sink)
        total = tl.fma(total, fade, tl.exp2(sink - base))
        summed = summed * fade[:, None]
    total = tl.where(empty, 1.0, total)
    # Adding 0 makes -0 to 0: a row that visits a tile in which it sees nothing has no -0.
    result = tl.where(empty[:, None], 0.0, summed * (1.0 / total)[:, None]) + 0.0
    tl.store(out_at[:, None] + channel[None, :], result.to(out_at.dtype.element_ty), mask=is_row[:, None])
    tl.store(lse_at, tl.where(empty, float("-inf"), (top + tl.log2(total)) * LN_2), mask=is_row)


@triton.jit
def attend_to_share(
    queries_tile,
    diagonal,
    slope,
    pools,
    table,
    start,
    border,
    stop,
    numbers,
    PAGE: tl.constexpr,
    NEAR: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    LEFT_OPEN: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Returns the partial result of keys from ``start`` to ``stop``, and its base-2 log-sum-exp, -inf for no keys.

    Args:
        diagonal: the key at each query's own position; it, start, border and stop count from the first visible key.
        pools: the address of a head's keys and their strides by page and slot, and the same of its values. PAGE is 0 if
            keys are not in pages: then slots count from the sequence's first key, and there is no table.
        border: a multiple of KEYS; every row sees the keys from start to there, if LEFT_OPEN.
        numbers: (scale, softcap, left, right, origin, num_pages); origin is the place of the first visible key.
    """
    k_at, k_page, k_slot, v_at, v_page, v_slot = pools
    scale, softcap, left, right, origin, num_pages = numbers
    to_logits = scale * LOG2_E
    channel, value_channel = tl.arange(0, queries_tile.shape[1]), tl.arange(0, VALUE_DIM)
    top = tl.full([queries_tile.shape[0]], float("-inf"), tl.float32)
    total = tl.zeros([queries_tile.shape[0]], tl.float32)
    summed = tl.zeros([queries_tile.shape[0], VALUE_DIM], tl.float32)
    for masked in tl.static_range(0 if LEFT_OPEN else 1, 2):
        for at in range(border if masked and LEFT_OPEN else start, stop if masked else border, KEYS):
            key = at + tl.arange(0, KEYS)
            is_key = key < stop
            page, slot = key_slots(table, origin + key, is_key, num_pages, not masked, PAGE)
            keys_at = k_at + slots_at(page, slot, k_page, k_slot, NEAR, PAGE)[None, :] + channel[:, None]
            scores = tl.dot(queries_tile, read(keys_at, is_key[None, :], not masked))
            distance = key[None, :] - diagonal[:, None]
            factor = to_logits
            if SOFTCAP:
                # tanh(x) = 1 - 2 / (1 + exp(2 x)): exact at both ends, where exp2 is 0 or inf.
                bent = 1.0 - 2.0 / (1.0 + tl.exp2(scores * (to_logits * (2.0 / softcap))))
                scores = bent * (softcap * LOG2_E)
                factor = 1.0
            elif ALIBI:
                scores = scores * to_logits
                factor = 1.0
            if ALIBI:
                scores = scores - slope[:, None] * tl.abs(distance).to(tl.float32)
            if masked:
                seen = is_key[None, :] & (distance <= right) & (distance >= -left)
                scores = tl.where(seen, scores, float("-inf"))
            # The factor is positive, so the largest score becomes the largest base-2 logit, rounded the same way.
            top, base, fade = raise_maximum(top, tl.max(scores, 1) * factor)
            shift = tl.broadcast_to(-base[:, None], scores.shape)
            weights = tl.exp2(tl.fma(scores, tl.full(scores.shape, 1.0, tl.float32) * factor, shift))
            total = tl.fma(total, fade, tl.sum(weights, 1))
            values_at = v_at + slots_at(page, slot, v_page, v_slot, NEAR, PAGE)[:, None]
            values = read(values_at + value_channel[None, :], is_key[:, None], not masked)
            summed = tl.dot(weights.to(values.dtype), values, summed * fade[:, None])
    empty = total == 0.0
    divisor = tl.where(empty, 1.0, total)
    part = tl.where(empty[:, None], 0.0, summed * (1.0 / divisor)[:, None])
    return part, tl.where(empty, float("-inf"), top + tl.log2(divisor))
