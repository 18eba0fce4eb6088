"""A kernel that evaluates a mask function once, and says how much of each block of 128 queries and keys it shows.

The code of the function is the same as in the attention kernel, so a table never contradicts the mask. A warp computes
a block, pair by pair unless its bounds decide (``block_bounds``). Upstream: nvidia-cutlass-dsl 4.8.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from attn_core.backends.flash4.block_bounds import Block, bounds, helps
from attn_core.backends.flash4.block_tables import BLOCK, blocks
from attn_core.backends.flash4.functions import Arrays, arrays_of, inside_of, read, scalars_of
from attn_core.backends.flash4.own_kernels import OwnKernel
from attn_core.call.spec import AttentionSpec
from attn_core.expressions.on_cute import evaluate_cute
from attn_core.expressions.properties import uses
from attn_core.expressions.tree import Expression

LANES = 32
"""Threads of a warp."""


def states(spec: AttentionSpec, arrays: Sequence[Any], device: Any, lane: Any) -> Any:
    """Returns how much of each block the call's mask function shows: 0 for nothing, 1 for some pairs, 2 for all.

    Args:
        arrays: ``functions.aux_tensors`` of the call, on the device.
        lane: launches the kernel, see ``own_kernels``.

    Returns:
        int8 ``[batch or 1, heads or 1, q blocks, kv blocks]``, 1 for an axis that the function does not read.
    """
    import torch

    tree: Expression = spec.mask_mod  # type: ignore[assignment]
    rows, heads = (spec.batch if "b" in uses(tree) else 1), (spec.num_heads if "h" in uses(tree) else 1)
    result = torch.empty((rows, heads, blocks(spec.q_len), blocks(spec.kv_len)), dtype=torch.int8, device=device)
    scalars = scalars_of(spec, arrays, lane)
    kernel = _kernel(tree, arrays_of(spec), inside_of(tree, spec))
    lane.launch(kernel, (result, spec.q_len, spec.kv_len, scalars))
    return result


@lru_cache(maxsize=256)
def _kernel(tree: Expression, arrays: Arrays, inside: tuple[int, ...]) -> OwnKernel:
    about = f"{tree.digest}, {arrays}, {inside}"
    return OwnKernel(f"attn_core.bounded_states({about})", lambda: _code(tree, arrays, inside))


def _code(tree: Expression, arrays: Arrays, inside: tuple[int, ...]) -> Any:
    import cutlass
    from cutlass import Boolean, Int8, Int32, cute

    has_bounds = helps(tree)

    class BlockStates:
        @cute.jit
        def __call__(self, states, q_len, kv_len, scalars, stream):  # type: ignore[no-untyped-def]
            rows, heads, q_blocks, kv_blocks = states.shape
            self.kernel(states, q_len, kv_len, scalars).launch(
                grid=[kv_blocks, q_blocks, rows * heads], block=[LANES, 1, 1], stream=stream
            )

        @cute.kernel
        def kernel(self, states, q_len, kv_len, scalars):  # type: ignore[no-untyped-def]
            lane, _, _ = cute.arch.thread_idx()
            kv_block, q_block, row = cute.arch.block_idx()
            heads = states.shape[1]
            b = row // heads
            h = row - b * heads
            shown, hidden = Boolean(False), Boolean(False)
            count = cutlass.min(q_len - q_block * BLOCK, BLOCK)
            pairs = count  # rows of pairs to compute: none if the bounds decide
            if cutlass.const_expr(has_bounds):
                keys = cutlass.min(kv_len - kv_block * BLOCK, BLOCK)
                tokens = q_block * BLOCK, kv_block * BLOCK, count, keys
                every, some = bounds(tree, Block(b, h, *tokens, BLOCK), lane, read(arrays, scalars))
                hidden, shown = some == Boolean(False), every
                pairs = Int32(cutlass.select_(every | hidden, Int32(0), count))
            for at in cutlass.range(pairs):
                for part in cutlass.range_constexpr(BLOCK // LANES):
                    key = kv_block * BLOCK + part * LANES + lane
                    index = (b, h, q_block * BLOCK + at, key)
                    # A key behind the row reads no memory behind its arrays, because lookups stay inside.
                    sees = evaluate_cute(tree, index, None, read(arrays, scalars), inside)
                    exists = key < kv_len
                    shown = shown | (exists & sees)
                    hidden = hidden | (exists & (sees == Boolean(False)))
            visible = Int32(cute.arch.vote_any_sync(shown))
            missing = Int32(cute.arch.vote_any_sync(hidden))
            if lane == 0:
                states[b, h, q_block, kv_block] = Int8(visible * (2 - missing))

    return BlockStates()
