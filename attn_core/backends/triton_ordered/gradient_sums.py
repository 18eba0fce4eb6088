"""What the gradient kernels add for a tile of queries and a tile of keys.

This module imports triton, so others import it only when they run.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attn_core.backends.shared.in_order.running_maximum import LOG2_E


@triton.jit
def _weights_of(scores, shift, distance, slope, scale, softcap, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr):
    """Returns the weights of a tile of products q.k, and the slope of the softcap, 1 without one."""
    to_logits = scale * LOG2_E
    factor, bend = to_logits, 1.0
    if SOFTCAP:  # as in ``in_order.sums``
        bent = 1.0 - 2.0 / (1.0 + tl.exp2(scores * (to_logits * (2.0 / softcap))))
        scores = bent * (softcap * LOG2_E)
        factor, bend = 1.0, 1.0 - bent * bent
    elif ALIBI:
        scores = scores * to_logits
        factor = 1.0
    if ALIBI:
        scores = scores - slope * tl.abs(distance).to(tl.float32)
    ones = tl.full(scores.shape, 1.0, tl.float32)
    return tl.exp2(tl.fma(scores, ones * factor, tl.broadcast_to(-shift, scores.shape))), bend


@triton.jit
def add_queries(sums, tiles, about, numbers, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, ALL: tl.constexpr):
    """Adds a tile of queries to the sums of dk and dv, both ``[keys, channels]``, and returns them.

    Args:
        tiles: keys, values, queries and dout. about: (shift, delta, the key at each query's own position) of queries,
            the keys' places and the slope. numbers: (scale, softcap, left, right).
        ALL: every query sees every key.
    """
    key_sums, value_sums = sums
    keys_tile, values_tile, queries_tile, dout_tile = tiles
    shift, delta, diagonal, key, slope = about
    scale, softcap, left, right = numbers
    scores = tl.dot(keys_tile, tl.trans(queries_tile))
    distance = key[:, None] - diagonal[None, :]
    weights, bend = _weights_of(scores, shift[None, :], distance, slope, scale, softcap, SOFTCAP, ALIBI)
    if not ALL:
        seen = (distance <= right) & (distance >= -left)
        weights = tl.where(seen, weights, 0.0)
    value_sums = tl.dot(weights.to(dout_tile.dtype), dout_tile, value_sums)
    moved = weights * (tl.dot(values_tile, tl.trans(dout_tile)) - delta[None, :])
    if SOFTCAP:
        moved = moved * bend
    if not ALL:  # 0 times the NaN of a hidden value is NaN
        moved = tl.where(seen, moved, 0.0)
    return tl.dot(moved.to(queries_tile.dtype), queries_tile, key_sums), value_sums


@triton.jit
def add_keys(sums, tiles, about, numbers, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, ALL: tl.constexpr):
    """Adds a tile of keys to the sums of dq ``[queries, channels]``, and returns them.

    Args:
        tiles: queries, dout, keys and values. about: as in ``add_queries``.
        numbers: (scale, softcap, left, right, number of keys).
    """
    queries_tile, dout_tile, keys_tile, values_tile = tiles
    shift, delta, diagonal, key, slope = about
    scale, softcap, left, right, keys = numbers
    scores = tl.dot(queries_tile, tl.trans(keys_tile))
    distance = key[None, :] - diagonal[:, None]
    weights, bend = _weights_of(scores, shift[:, None], distance, slope, scale, softcap, SOFTCAP, ALIBI)
    moved = weights * (tl.dot(dout_tile, tl.trans(values_tile)) - delta[:, None])
    if SOFTCAP:
        moved = moved * bend
    if not ALL:
        seen = (distance <= right) & (distance >= -left) & (key < keys)[None, :]
        moved = tl.where(seen, moved, 0.0)
    return tl.dot(moved.to(keys_tile.dtype), keys_tile, sums)
