"""The order in which a kernel's thread blocks start: those with the most work first.

A thread block of the forward computes a block of queries, one of the backward a block of keys. A row of a mask may have
far more work than others, as global tokens have. If its thread block starts last, the GPU waits for it alone. A small
kernel sorts the blocks by their counts in the block table, and ``ordered_tiles`` reads that order.
Upstream: flash-attn-4 4.0.0b36, ``flash_attn.cute``: tile_scheduler.py.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from attn_core.backends.flash4.own_kernels import OwnKernel

NEEDED = "_attn_core_ordered"
"""The attribute of a mask function whose call has an order: the last two of ``aux_scalars`` are ``scalars_of`` it."""
MOST_BLOCKS = 8192
"""The most blocks that are sorted, in shared memory. More run in their own order."""


def of_table(table: Any, differ: tuple[int, int], lane: Any) -> Any:
    """Returns the blocks of a table in the order of their work, int32 ``[blocks]``.

    Tables of batch rows and heads that differ get one order, by the sum of their counts.

    Args:
        table: a ``block_tables.Table`` of queries or keys. differ: how many batch rows and heads of it differ.
        lane: launches the kernel, see ``own_kernels``.
    """
    import torch

    counts = table.partial_count
    order = torch.empty(counts.shape[2], dtype=torch.int32, device=counts.device)
    lane.launch(_kernel(), (order, counts, table.full_count, *differ))
    return order


def scalars_of(order: Any, lane: Any) -> tuple[Any, Any]:
    """Returns the address and the length of an order as a kernel takes them, behind the other scalars of its call."""
    from cutlass import Int32

    return lane.address(order), Int32(order.shape[0])


@lru_cache(maxsize=1)
def _kernel() -> OwnKernel:
    def code() -> Any:
        from attn_core.backends.flash4.table_kernel import WorkOrder

        return WorkOrder(MOST_BLOCKS)

    return OwnKernel(f"attn_core.work_order({MOST_BLOCKS})", code)
