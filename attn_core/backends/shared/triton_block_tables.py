"""A Triton kernel that makes the block table of one side of a call from key ranges, a band and a mask function.

This module imports triton, so others import it only when they run.
"""

from __future__ import annotations

import triton
import triton.language as tl

BLOCK = tl.constexpr(128)


@triton.jit(
    do_not_specialize=[
        *("q_len", "kv_len", "left", "right", "offset", "blocks", "others", "heads", "group"),
        *("range_batch", "range_head", "shown_batch", "shown_head", "shown_step", "shown_other_step"),
    ]
)
def table(
    key_ranges,
    shown,
    ends,
    partial_count,
    partial,
    full_count,
    full,
    q_len,
    kv_len,
    left,
    right,
    offset,
    blocks,
    others,
    heads,
    group,
    range_batch,
    range_head,
    shown_batch,
    shown_head,
    shown_step,
    shown_other_step,
    OF_QUERIES: tl.constexpr,
    RANGES: tl.constexpr,
    GIVEN: tl.constexpr,
    WITH_SHOWN: tl.constexpr,
    OTHERS: tl.constexpr,
):
    """Writes, for one block, the numbers of the blocks of the other side that are partly and fully visible.

    A program makes the entries of one block; it also writes the ends of the ranges of a block of keys, or of all keys.

    key_ranges: int32 ``[rows, kv_len, RANGES, 2]`` with any values; read if GIVEN, else each key's range is the row.
    shown: int8, 0 for a block of which a mask function shows nothing, 1 for some pairs, 2 for all; read if WITH_SHOWN.
    ends: int32 ``[rows, kv blocks * 128, 2 * RANGES]``: starts and stops in turn, cut at band and row; 0 and 0 for an
    empty range. Not written if RANGES is 0, which says that only the function hides pairs.
    partial_count, full_count: int32 ``[batch * heads, blocks]``; partial, full: int32 with one more axis of length
    ``others``, whose entries beyond the count are not written.
    left, right, offset: key k is within the band of query q if ``-left <= k - (q + offset) <= right``.
    group: heads of the table for each kv head of the ranges.
    range_batch, range_head: the rows of ranges from batch row to batch row, and from kv head to kv head.
    shown_batch, shown_head, shown_step, shown_other_step: strides of ``shown``, the last two along the two sides.
    OF_QUERIES: whether blocks are of queries. OTHERS: how many blocks of the other side are examined at once.
    """
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    batch, head = row // heads, row % heads
    at_range = batch * range_batch + head // group * range_head
    key_ranges += at_range * kv_len * (2 * RANGES)
    kv_blocks = others if OF_QUERIES else blocks
    ends += at_range * kv_blocks * (BLOCK * 2 * RANGES)
    shown += batch * shown_batch + head * shown_head + block * shown_step
    place = row * blocks + block
    partial += place * others
    full += place * others
    partly, fully = place * 0, place * 0
    for first in range(0, others, OTHERS):
        other = first + tl.arange(0, OTHERS)
        exists = other < others
        state = tl.full([OTHERS], 2, tl.int32)
        if RANGES > 0:
            kv_block, q_block = (other, block) if OF_QUERIES else (block, other)
            writes = block == 0 if OF_QUERIES else first == 0
            state = _state(
                key_ranges, ends, kv_block, q_block, writes, q_len, kv_len, left, right, offset, RANGES, GIVEN
            )
        if WITH_SHOWN:
            by_function = tl.load(shown + other * shown_other_step, mask=exists, other=0)
            state = tl.minimum(state, by_function.to(tl.int32))
        is_partial, is_full = (state == 1) & exists, (state == 2) & exists
        tl.store(partial + partly + tl.cumsum(is_partial.to(tl.int32), 0) - 1, other, mask=is_partial)
        tl.store(full + fully + tl.cumsum(is_full.to(tl.int32), 0) - 1, other, mask=is_full)
        partly += tl.sum(is_partial.to(tl.int32), 0)
        fully += tl.sum(is_full.to(tl.int32), 0)
    tl.store(partial_count + place, partly.to(tl.int32))
    tl.store(full_count + place, fully.to(tl.int32))


@triton.jit
def _state(
    key_ranges, ends, kv_block, q_block, writes, q_len, kv_len, left, right, offset,
    RANGES: tl.constexpr, GIVEN: tl.constexpr,
):  # fmt: skip
    """Returns how much is visible of the blocks of one side, of which the other block number is a scalar.

    ``writes`` says whether to write the ends of the keys.
    """
    # [blocks, 128]; one side has one block, which broadcasts
    key = (kv_block * BLOCK + tl.zeros_like(q_block))[:, None] + tl.arange(0, BLOCK)[None, :]
    low = (q_block * BLOCK + tl.zeros_like(kv_block))[:, None]
    high = tl.minimum(low + BLOCK, q_len)
    exists = key < kv_len
    lowest = tl.maximum(key - offset - right, 0)
    highest = tl.minimum(key - offset + left + 1, q_len)
    padded = (kv_len + BLOCK - 1) // BLOCK * BLOCK
    start, stop = _cut(key_ranges + key * (2 * RANGES), lowest, highest, exists, GIVEN)
    tl.store(ends + key * (2 * RANGES), start, mask=writes & (key < padded))
    tl.store(ends + key * (2 * RANGES) + 1, stop, mask=writes & (key < padded))
    touched = (start < high) & (stop > low) & (start < stop)
    covered = (start <= low) & (stop >= high)
    if RANGES == 2:
        start, stop = _cut(key_ranges + key * (2 * RANGES) + 2, lowest, highest, exists, GIVEN)
        tl.store(ends + key * (2 * RANGES) + 2, start, mask=writes & (key < padded))
        tl.store(ends + key * (2 * RANGES) + 3, stop, mask=writes & (key < padded))
        touched = touched | ((start < high) & (stop > low) & (start < stop))
        covered = covered | ((start <= low) & (stop >= high))
    some = tl.max(touched.to(tl.int32), 1)
    every = tl.min((covered | ~exists).to(tl.int32), 1)
    return some + some * every


@triton.jit
def _cut(ranges, lowest, highest, exists, GIVEN: tl.constexpr):
    """Returns the starts and stops of ranges within the band and the row; 0 and 0 for one that is empty."""
    start, stop = lowest, highest
    if GIVEN:
        start = tl.maximum(tl.load(ranges, mask=exists, other=0), lowest)
        stop = tl.minimum(tl.load(ranges + 1, mask=exists, other=0), highest)
    some = exists & (start < stop)
    return tl.where(some, start, 0), tl.where(some, stop, 0)
