"""A kernel that sorts the blocks of a block table by their work.

This module imports the CuTe DSL, so others import it only when they run. Upstream: nvidia-cutlass-dsl 4.8.
"""

# No "from __future__ import annotations": the DSL reads the annotations of its functions.
import cutlass
from cutlass import Int32, cute

THREADS = 512
MOST_TABLES = 64
"""Of more batch rows and heads, so many are summed."""
PARTLY, FULLY = 2, 1
"""The work of a block that is partly visible, whose pairs are tested one by one, and of one that is whole."""


class WorkOrder:
    """The kernel, of one thread block. most: the most blocks that it sorts; more keep their places."""

    def __init__(self, most: int) -> None:
        self.most = most

    @cute.jit
    def __call__(self, order, partial_count, full_count, rows, heads, stream):  # type: ignore[no-untyped-def]
        """Launches the kernel.

        Args:
            order: int32 ``[blocks]``; receives the blocks' numbers, the one with the most work first.
            partial_count, full_count: of ``block_tables.Table``.
            rows, heads: how many tables differ.
        """
        self.kernel(order, partial_count, full_count, rows, heads).launch(
            grid=[1, 1, 1], block=[THREADS, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, order, partial_count, full_count, rows, heads):  # type: ignore[no-untyped-def]
        thread, _, _ = cute.arch.thread_idx()
        blocks = order.shape[0]
        work = cutlass.utils.SmemAllocator().allocate_tensor(Int32, cute.make_layout(self.most), byte_alignment=16)
        if blocks > self.most:
            for block in cutlass.range(thread, blocks, THREADS):
                order[block] = block
        else:
            tables = rows * heads
            step = (tables + MOST_TABLES - 1) // MOST_TABLES
            for block in cutlass.range(thread, blocks, THREADS):
                total = Int32(0)
                for table in cutlass.range(0, tables, step):
                    row = table // heads
                    place = row, table - row * heads, block
                    total += PARTLY * partial_count[place] + FULLY * full_count[place]
                work[block] = total
            cute.arch.sync_threads()
            for block in cutlass.range(thread, blocks, THREADS):
                own, before = work[block], Int32(0)
                for other in cutlass.range(blocks, unroll=8):
                    its = work[other]
                    before += Int32((its > own) | ((its == own) & (other < block)))
                order[before] = block
