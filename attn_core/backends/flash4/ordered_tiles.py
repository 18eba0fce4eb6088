"""A schedule for FlashAttention-4's kernels on sm90 that takes the blocks of a head in an order of our own.

It replaces the schedule of calls whose mask function asks for it. Heads vary fastest, as in the kernels' own schedule
of causal calls, so that the heavy blocks of all heads start first. Heads are taken in groups whose keys and values fit
in the L2 cache. The results of a thread block do not depend on when it runs.
This module imports the CuTe DSL, so others import it only when they run.
Upstream: flash-attn-4 4.0.0b36, ``flash_attn.cute``: tile_scheduler.py, flash_fwd_sm90.py, flash_bwd_sm90.py.
"""

# No "from __future__ import annotations": the DSL reads the annotations of its functions.
import inspect
from dataclasses import dataclass
from functools import wraps
from typing import Any

import cutlass
from cutlass import Int32, Int64, cute
from flash_attn.cute import flash_bwd_sm90, flash_fwd_sm90  # type: ignore[import-not-found]
from flash_attn.cute.tile_scheduler import (  # type: ignore[import-not-found]
    SingleTileLPTScheduler,
    SingleTileScheduler,
    TileSchedulerArguments,
    WorkTileInfo,
)
from quack.cute_dsl_utils import ParamsBase  # type: ignore[import-not-found]

from attn_core.backends.flash4.work_order import NEEDED


@dataclass
class Params(ParamsBase):  # type: ignore[misc]
    """What the schedule reads: the kernels' own schedule of heads first, and the order of blocks.

    Attributes:
        heads_first: without an order of its own. order: the address of int32 ``[length]``.
    """

    heads_first: Any
    order: Int64
    length: Int32


class OrderedTiles:
    """The schedule, with the interface of the kernels' own ones. Each thread block has one piece of work."""

    def __init__(self, params: Params, tile: Int32, *, loc: Any = None, ip: Any = None) -> None:
        self.params, self._tile, self._loc, self._ip = params, tile, loc, ip

    @staticmethod
    @cute.jit
    def create(params: Params, *, loc=None, ip=None):  # type: ignore[no-untyped-def]
        """Returns the schedule of this thread block. The grid has three axes, of which the first varies fastest."""
        x, y, z = cute.arch.block_idx()
        width, height, _ = cute.arch.grid_dim()
        return OrderedTiles(params, x + width * (y + height * z), loc=loc, ip=ip)

    @cute.jit
    def get_current_work(self, *, loc=None, ip=None):  # type: ignore[no-untyped-def]
        """Returns the block, head and batch row of this thread block."""
        heads_first, length = self.params.heads_first, self.params.length
        work = SingleTileLPTScheduler(heads_first, self._tile, Int32(0)).get_current_work()
        block, head, batch, split = work.tile_idx
        if heads_first.num_block == length:  # else the kernel has other blocks than the table
            order = cute.make_tensor(
                cute.make_ptr(Int32, self.params.order, cute.AddressSpace.gmem, assumed_align=4),
                cute.make_layout(length),
            )
            block = order[cutlass.min(block, length - 1)]  # behind the last work the place is any number
        return WorkTileInfo((block, head, batch, split), work.is_valid_tile)

    def initial_work_tile_info(self, *, loc: Any = None, ip: Any = None) -> Any:
        """Returns the first piece of work, the only one."""
        return self.get_current_work(loc=loc, ip=ip)

    def prefetch_next_work(self, *, loc: Any = None, ip: Any = None) -> None:
        """There is no next one."""

    def advance_to_next_work(self, *, loc: Any = None, ip: Any = None) -> Any:
        """Returns a piece of work that is not valid."""
        self._tile = self.params.heads_first.total_blocks
        return self.get_current_work()

    def producer_tail(self, *, loc: Any = None, ip: Any = None) -> None:
        """Nothing is left to do."""

    def __extract_mlir_values__(self) -> list[Any]:
        parts = [cutlass.extract_mlir_values(part) for part in (self.params, self._tile)]
        self._first = len(parts[0])
        return parts[0] + parts[1]

    def __new_from_mlir_values__(self, values: list[Any]) -> "OrderedTiles":
        params = cutlass.new_from_mlir_values(self.params, values[: self._first])
        return OrderedTiles(params, cutlass.new_from_mlir_values(self._tile, values[self._first :]), loc=self._loc)


def use() -> None:
    """Gives calls that ask for it this schedule, for the rest of the process. Call it once."""
    for kernels in (flash_fwd_sm90.FlashAttentionForwardSm90, flash_bwd_sm90.FlashAttentionBackwardSm90):
        kernels.kernel = _ordered(kernels.kernel)


def _ordered(kernel: Any) -> Any:
    signature = inspect.signature(kernel)

    @wraps(kernel)
    def with_order(self: Any, *values: Any, **named: Any) -> Any:
        bound = signature.bind(self, *values, **named)
        call = bound.arguments
        plain = call["tile_sched_params"]
        is_plain = call["TileScheduler"] is SingleTileScheduler and cute.size(plain.cluster_shape_mn) == 1
        if is_plain and getattr(self.mask_mod, NEEDED, False):
            *_, order, length = call["aux_data"].scalars
            # A thread block of the forward reads all keys of a head, one of the backward all queries.
            rows = cute.size(call["mQ" if "mdO" in call else "mK"].shape[0])
            widths = call["mK"].shape[1], call["mV"].shape[1]
            sizes = TileSchedulerArguments(
                *(plain.num_block, plain.num_head, plain.num_batch, plain.num_splits, rows, *widths),
                total_q=rows,
                tile_shape_mn=(self.tile_m, self.tile_n),
            )
            heads_first = SingleTileLPTScheduler.to_underlying_arguments(sizes)
            call.update({"tile_sched_params": Params(heads_first, order, length), "TileScheduler": OrderedTiles})
        return kernel(*bound.args, **bound.kwargs)

    return with_order
