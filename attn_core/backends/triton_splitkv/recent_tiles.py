"""The newest keys of a sequence, which the kernel for quantised pages reads from a ring in the dtype of the queries.

``paged.recent`` explains rings. Their tables are on the device and cannot be checked: a ring that does not exist counts
as none, and every slot is below the ring's number of slots, so no value reads outside of the rings.

This module imports triton, so others import it only when they run.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attn_core.backends.triton_splitkv.products import multiply, read_keys, read_values
from attn_core.backends.triton_splitkv.scores import is_shown, logits_of, weights_of
from attn_core.backends.triton_splitkv.stored_tiles import HEADROOM, INT4

KEYS = tl.constexpr(32)
"""Keys of a tile. Rings are short; larger tiles would need more shared memory than those of the pages."""


@triton.jit
def ring_of(recent_rows, sequence, rings, length, start, stop, RECENT: tl.constexpr):
    """Returns the ring of a sequence, and where its keys begin among those from start to stop; at stop without any."""
    ring = tl.load(recent_rows + 2 * sequence)
    good_from = tl.maximum(tl.load(recent_rows + 2 * sequence + 1), length - RECENT)
    begin = tl.where((ring >= 0) & (ring < rings), good_from, stop)
    return ring.to(tl.int64), tl.minimum(tl.maximum(begin, start), stop)


@triton.jit
def attend_to_ring(
    state,
    share,
    tensors,
    tile,
    about,
    numbers,
    VALUE_DIM: tl.constexpr,
    KIND: tl.constexpr,
    RECENT: tl.constexpr,
    RANGES: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
):
    """Adds the keys of a ring to the sums of a tile of queries. Returns (top, total, summed); summed is in real units.

    Names are those of ``kernels.attend``.

    Args:
        state: (top, total, summed, largest_scale) of the keys in pages.
        share: where the keys begin and end in their sequence.
        tensors: the queries in their own dtype ``[rows, head_dim]``; for keys and for values the address of the ring's
            first slot of this head, and the stride of slots; and the address of the head's ranges.
        tile: (token, diagonal, slope) of each row. about: (first, queries, length, tokens) of the sequence.
        numbers: (to_logits, softcap, left, right).
    """
    top, total, summed, largest_scale = state
    begin, end = share
    queries_tile, keys, values, ranges = tensors
    token, diagonal, slope = tile
    first, queries, length, tokens = about
    to_logits, softcap, left, right = numbers
    half: tl.constexpr = 2 if KIND == INT4 else 1
    scaled = ()
    for i in tl.static_range(2 * half):
        scaled += (summed[i] * (largest_scale / HEADROOM),)  # type: ignore[assignment]
    summed = scaled
    channel = tl.arange(0, queries_tile.shape[1])
    word = tl.arange(0, VALUE_DIM // (2 * half))
    words = values[0].to(tl.pointer_type(tl.int32))
    for at in tl.range(begin, end, KEYS, num_stages=1):
        key = at + tl.arange(0, KEYS)
        is_key = key < end
        slot = (key % RECENT).to(tl.int64)
        keys_tile = read_keys(keys[0], channel, slot * keys[1], is_key, False, queries_tile.shape[0])
        scores = multiply(queries_tile, keys_tile, tl.zeros([queries_tile.shape[0], KEYS], tl.float32))
        scores, distance = logits_of(scores, to_logits, softcap, slope, key, diagonal, SOFTCAP, ALIBI)
        seen = is_key[None, :] & (distance <= right) & (distance >= -left)
        if RANGES:
            seen &= is_shown(ranges, key, is_key, token, first, queries, length, tokens, RANGES)
        scores = tl.where(seen, scores, float("-inf"))
        top, weights, fade = weights_of(scores, top, to_logits, False)
        total = total * fade + tl.sum(weights, 1)
        weights = weights.to(queries_tile.dtype)
        added = ()
        for i in tl.static_range(half):
            # Two neighbouring channels at once; of int4 pages, first those of the lower half.
            part_of_words, words_at = word + i * (VALUE_DIM // 4), slot * (values[1] // 2)
            pair = read_values(words, part_of_words, words_at, is_key, False, queries_tile.shape[0])
            for part in tl.static_range(2):
                of_part = (pair >> (16 * part)).to(tl.int16).to(queries_tile.dtype, bitcast=True)
                added += (multiply(weights, of_part, summed[2 * i + part] * fade[:, None]),)  # type: ignore[assignment]
        summed = added
    return top, total, summed
