"""Turns products of queries and keys into base-2 logits, and says which of the new tokens a query sees.

This module imports triton, so others import it only when they run.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attn_core.backends.shared.in_order.running_maximum import LOG2_E, raise_maximum


@triton.jit
def logits_of(scores, to_logits, softcap, slope, key, diagonal, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr):
    """Returns the logits of products of queries and keys, and how far each key lies behind its query's diagonal.

    The logits are to base 2, because GPUs compute exp2 directly; to_logits and slope, one for each row, contain
    log2(e). diagonal is the position of each query.
    """
    if SOFTCAP:
        # tanh(x) = 1 - 2 / (1 + exp(2 x)): exact at both ends, where exp2 is 0 or inf.
        bent = 1.0 - 2.0 / (1.0 + tl.exp2(scores * (to_logits * (2.0 / softcap))))
        scores = bent * (softcap * LOG2_E)
    else:
        scores = scores * to_logits
    distance = key[None, :] - diagonal[:, None]
    if ALIBI:
        scores -= slope[:, None] * tl.abs(distance).to(tl.float32)
    return scores, distance


@triton.jit
def weights_of(scores, top, row_scale, SCALE: tl.constexpr):
    """Returns the new running maximum, the weights, and the factor that rescales the sums so far.

    With SCALE the scores are not logits yet: row_scale, which is not negative, makes them logits. One instruction then
    multiplies and subtracts. No score may be -inf, because 0 times it is NaN.
    """
    if SCALE:
        top, base, fade = raise_maximum(top, tl.max(scores, 1) * row_scale)
        weights = tl.exp2(scores * row_scale[:, None] - base[:, None])
    else:
        top, base, fade = raise_maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - base[:, None])
    return top, weights, fade


@triton.jit
def share_of(
    where,
    split,
    STARTS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Returns the first key of a split, and the end: of the keys that some row of a tile may see, in whole tiles.

    Args:
        where: (begin, queries, length, left, right, first_key): the first row of the tile, the queries and keys of the
            sequence, the window, and the address of the sequence's first key, if STARTS.
    """
    begin, queries, length, left, right, first_key = where
    last_query = tl.minimum((begin + ROWS - 1) // GROUP, queries - 1)
    low = tl.maximum(begin // GROUP + length - queries - left, 0)
    if STARTS:  # no tile begins before it, so no key before it is read
        low = tl.maximum(low, tl.load(first_key))
    high = tl.minimum(last_query + length - queries + right + 1, length)
    tiles = tl.maximum(high - low + KEYS - 1, 0) // KEYS
    # Round up, so that all splits together cover every tile; the last splits may have none.
    share = (tiles + SPLITS - 1) // SPLITS * KEYS
    start = low + split * share
    return start, tl.minimum(start + share, high)


@triton.jit
def is_shown(ranges, key, is_key, token, first, queries, length, tokens, RANGES: tl.constexpr):
    """Returns which tokens (rows) the ranges of each key show: those of new keys; an earlier key is always shown.

    first is the first token of the sequence, ranges the address of the head's ranges.
    """
    # A new token has the same number from the end among the keys as among the queries.
    place = key + queries - length
    is_new = is_key & (place >= 0)
    ranges_at = ranges + (first + place).to(tl.int64) * (2 * RANGES)
    shown = _is_in_range(ranges_at, is_new, tokens, token)
    if RANGES == 2:
        shown |= _is_in_range(ranges_at + 2, is_new, 0, token)
    return shown


@triton.jit
def _is_in_range(at, is_new, stop_of_old, token):
    """Returns which tokens (rows) each key's range at this address shows; the range of an old key ends at a number."""
    start = tl.load(at, mask=is_new, other=0)
    stop = tl.load(at + 1, mask=is_new, other=stop_of_old)
    return (token[:, None] >= start[None, :]) & (token[:, None] < stop[None, :])
