"""The kernel that makes the block table of one side of a call, from key ranges, a band and a mask function.

This module imports the CuTe DSL, so others import it only when they run. Upstream: nvidia-cutlass-dsl 4.8.
"""

# No "from __future__ import annotations": the DSL reads the annotations of its functions.
from typing import Any

import cutlass
from cutlass import Boolean, Int32, cute

LANES = 32
"""Threads of a warp."""
WARPS = 16
AT_ONCE = 2048
"""The blocks of the other side whose states are in shared memory at once."""


class BlockTable:
    """The kernel: a thread block makes the entries of one block, and its warps examine the blocks of the other side.

    Args:
        size: queries and keys of a block.
        of_queries: whether the table is that of the queries.
        ranges: how many ranges a key has; 0 if only the function hides pairs.
        with_ranges: whether the call has ranges; else the range of each key is the whole row.
        with_states: whether the call has a mask function.
    """

    def __init__(self, size: int, of_queries: bool, ranges: int, with_ranges: bool, with_states: bool) -> None:
        self.size, self.of_queries = size, of_queries
        self.ranges, self.with_ranges, self.with_states = ranges, with_ranges, with_states

    @cute.jit
    def __call__(  # type: ignore[no-untyped-def]
        self, key_ranges, states, spans, partial_count, partial, full_count, full,
        q_len, kv_len, left, right, offset, rows, heads, group, stream,
    ):  # fmt: skip
        """Launches the kernel.

        Args:
            key_ranges: int32 ``[batch or 1, kv_heads or 1, kv_len, ranges, 2]`` with any values, or None; at a multiple
                of 16 bytes.
            states: int8 ``[batch or 1, heads or 1, q blocks, kv blocks]``: 0 for a block of which a mask function shows
                nothing, 1 for some pairs, 2 for all; or None.
            spans: int32 ``[batch or 1, kv_heads or 1, kv blocks * 128, 2 * ranges]``: receives starts and lengths in
                turn, cut at band and row, 0 and 0 for an empty range; or None. At a multiple of 16 bytes.
            partial_count, full_count: int32 ``[batch or rows, all heads or heads, blocks]``; partial, full: with one
                more axis for the blocks of the other side. They receive ``block_tables.Table``.
            left, right, offset: key k is within the band of query q if ``-left <= k - (q + offset) <= right``.
            rows, heads: how many tables differ. Further batch rows and heads of the tensors receive copies.
            group: query heads for each kv head.
        """
        blocks = partial_count.shape[2]
        self.kernel(
            key_ranges, states, spans, partial_count, partial, full_count, full,
            q_len, kv_len, left, right, offset, rows, heads, group,
        ).launch(grid=[blocks, rows * heads, 1], block=[WARPS * LANES, 1, 1], stream=stream)  # fmt: skip

    @cute.kernel
    def kernel(  # type: ignore[no-untyped-def]
        self, key_ranges, states, spans, partial_count, partial, full_count, full,
        q_len, kv_len, left, right, offset, rows, heads, group,
    ):  # fmt: skip
        """Lists the partial and the full blocks of the other side for one block of one row and head.

        In passes of AT_ONCE blocks: first each warp finds the states of some of them, then warps append them to lists.
        """
        thread, _, _ = cute.arch.thread_idx()
        block, row, _ = cute.arch.block_idx()
        warp = thread // LANES
        lane = thread - warp * LANES
        b = row // heads
        h = row - b * heads
        # "Other": blocks of keys in a table of queries, and blocks of queries in a table of keys.
        blocks, others = partial.shape[2], partial.shape[3]
        block_states = cutlass.utils.SmemAllocator().allocate_tensor(
            Int32, cute.make_layout(AT_ONCE), byte_alignment=16
        )
        # The table of row b and head h also goes to rows b + rows, b + 2 rows, ... and to heads h + heads, ...
        to_heads = partial.shape[1] // heads
        copies = partial.shape[0] // rows * to_heads
        partly, fully = Int32(0), Int32(0)  # entries so far, of the passes before this one
        for first in cutlass.range(0, others, AT_ONCE):
            count = cutlass.min(others - first, AT_ONCE)
            for at in cutlass.range(warp, count, WARPS):
                other = first + at
                q_block, kv_block = (block, other) if cutlass.const_expr(self.of_queries) else (other, block)
                state = Int32(2)  # as in ``states``: 0 hidden, 1 partial, 2 full; the smaller of both sources counts
                if cutlass.const_expr(self.ranges > 0):
                    # Each block of keys is written once in a row of thread blocks.
                    writes = other % blocks == block if cutlass.const_expr(self.of_queries) else other == 0
                    edges = q_len, kv_len, left, right, offset
                    state = self.by_ranges(key_ranges, spans, (b, h // group), q_block, kv_block, lane, writes, edges)
                if cutlass.const_expr(self.with_states):
                    place = cutlass.min(b, states.shape[0] - 1), cutlass.min(h, states.shape[1] - 1), q_block, kv_block
                    state = cutlass.min(state, Int32(states[place]))
                if lane == 0:
                    block_states[at] = state
            cute.arch.sync_threads()  # every warp reads the states that other warps found
            for copy in cutlass.range(warp, copies, WARPS):
                to_row = copy // to_heads
                to = b + to_row * rows, h + (copy - to_row * to_heads) * heads, block
                self.write(block_states, first, count, lane, partly, partial, to, 1)
                self.write(block_states, first, count, lane, fully, full, to, 2)
            partly += self.number_of(block_states, count, lane, 1)
            fully += self.number_of(block_states, count, lane, 2)
            cute.arch.sync_threads()  # the next pass overwrites them
        for copy in cutlass.range(thread, copies, WARPS * LANES):
            to_row = copy // to_heads
            to = b + to_row * rows, h + (copy - to_row * to_heads) * heads, block
            partial_count[to] = partly
            full_count[to] = fully

    @cute.jit
    def by_ranges(  # type: ignore[no-untyped-def]
        self, key_ranges, spans, row, q_block, kv_block, lane, writes, edges
    ):
        """Returns the state of a block to every thread of a warp. writes: whether to write the spans of its keys.

        A lane examines one key at a time: its ranges, cut at the band, against the block's queries from low to high.
        """
        q_len, kv_len, left, right, offset = edges
        low = q_block * self.size
        high = cutlass.min(low + self.size, q_len)
        width = 2 * self.ranges
        # Whether a key of the lane is seen by some query of the block, and whether one is not seen by all of them.
        touched, uncovered = Boolean(False), Boolean(False)
        for part in cutlass.range_constexpr(self.size // LANES):
            key = kv_block * self.size + part * LANES + lane
            exists = key < kv_len
            # The band, seen from the key: queries from lowest to highest (exclusive).
            lowest = cutlass.max(key - offset - right, 0)
            highest = cutlass.min(key - offset + left + 1, q_len)
            cut = cute.make_rmem_tensor(width, Int32)
            if cutlass.const_expr(self.with_ranges):
                inside = cutlass.min(key, kv_len - 1)  # of a key that does not exist, those of the last one: unused
                cut.store(self.of_key(key_ranges, row, kv_len, inside, width).load())
            covered = Boolean(False)
            for which in cutlass.range_constexpr(self.ranges):
                start, stop = lowest, highest
                if cutlass.const_expr(self.with_ranges):
                    start, stop = cutlass.max(cut[2 * which], lowest), cutlass.min(cut[2 * which + 1], highest)
                some = exists & (start < stop)
                start = Int32(cutlass.select_(some, start, Int32(0)))
                stop = Int32(cutlass.select_(some, stop, Int32(0)))
                touched = touched | (some & (start < high) & (stop > low))
                # By one range alone: a block that two ranges cover only together is partial, which is right, but slow.
                covered = covered | ((start <= low) & (stop >= high))
                cut[2 * which], cut[2 * which + 1] = start, stop - start
            uncovered = uncovered | (exists & (covered == Boolean(False)))
            if writes:
                self.of_key(spans, row, spans.shape[2], key, width).store(cut.load())
        some = Int32(cute.arch.vote_any_sync(touched))
        missing = Int32(cute.arch.vote_any_sync(uncovered))
        return some * (2 - missing)  # no votes: 0; some pairs: 1; every pair: 2

    @cute.jit
    def of_key(self, tensor: Any, row, keys, key, width: cutlass.Constexpr):  # type: ignore[no-untyped-def]
        """Returns the numbers of a key, which one instruction reads or writes."""
        batch, head = (cutlass.min(index, size - 1) for index, size in zip(row, tensor.shape[:2]))
        place = ((batch * tensor.shape[1] + head) * keys + key) * width
        return cute.make_tensor((tensor.iterator + place).align(4 * width), cute.make_layout(width))

    @cute.jit
    def write(self, block_states, first, count, lane, behind, numbers, to, kind: cutlass.Constexpr):  # type: ignore[no-untyped-def]
        """Appends the blocks of a kind to a list that has ``behind`` entries; a warp does it."""
        for start in cutlass.range(0, count, LANES):
            is_kind = self.is_of(block_states, count, start + lane, kind)
            kinds = cute.arch.vote_ballot_sync(is_kind)
            if is_kind:
                # Lanes keep their order: each counts those before it, so the list ascends without atomics.
                before = cute.arch.popc(kinds & ((1 << lane) - 1))
                numbers[(*to, behind + before)] = first + start + lane
            behind += cute.arch.popc(kinds)

    @cute.jit
    def number_of(self, block_states, count, lane, kind: cutlass.Constexpr):  # type: ignore[no-untyped-def]
        """Returns how many of the blocks are of a kind, to every thread of a warp."""
        number = Int32(0)
        for start in cutlass.range(0, count, LANES):
            number += cute.arch.popc(cute.arch.vote_ballot_sync(self.is_of(block_states, count, start + lane, kind)))
        return number

    @cute.jit
    def is_of(self, block_states, count, at, kind: cutlass.Constexpr):  # type: ignore[no-untyped-def]
        return (at < count) & (block_states[cutlass.min(at, AT_ONCE - 1)] == kind)
