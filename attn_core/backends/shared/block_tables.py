"""Block tables on a GPU: which blocks of 128 queries and keys a kernel computes for key ranges or a mask function.

A small Triton kernel makes them, without a q_len x kv_len array and without a synchronisation. The band of causal and
window is cut into the ranges, so that the ranges alone say what is visible.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

from attn_core.backends.shared import triton as triton_launch
from attn_core.call.masks import band
from attn_core.call.spec import AttentionSpec

BLOCK = 128
"""Queries and keys of a block."""
FAR = 2**30
"""A distance beyond every token, the number for a side of the band that hides nothing."""


class Table(NamedTuple):
    """For each block of one side, the blocks of the other side with visible pairs, in ascending order.

    partial_count, full_count: int32 ``[batch or 1, heads or 1, blocks]``; partial, full: int32 with one axis more, of
    which the first ``count`` entries are written. In full blocks nothing is hidden.
    """

    partial_count: Any
    partial: Any
    full_count: Any
    full: Any


def blocks(tokens: int) -> int:
    """Returns how many blocks cover a number of tokens."""
    return -(-tokens // BLOCK)


def has_ends(spec: AttentionSpec) -> bool:
    """Returns whether ranges or the band of a call without packed documents hide any pair."""
    return spec.key_ranges_shape is not None or not band(spec).hides_nothing(spec.q_len, spec.kv_len)


def table(spec: AttentionSpec, inputs: Any, shown: Any, of_queries: bool) -> tuple[Table, Any]:
    """Returns the table of one side of a call, and the ends of its ranges; on torch's current stream.

    Args:
        spec: a call without packed documents, with ranges, a band or a mask function.
        inputs: its tensors on the GPU. Ranges may hold any values.
        shown: how much of each block a mask function shows, int8 ``[batch or 1, heads or 1, q blocks, kv blocks]``, 0
            for nothing, 1 for some pairs, 2 for all; None for a call without.
        of_queries: whether the table is that of the queries, which a forward needs, or that of the keys.

    Returns:
        The table, whose tensors have all batch rows and heads, expanded if these share it. The ends: int32
        ``[batch or 1, kv_heads or 1, kv blocks * 128, 2 * ranges]``, starts and stops in turn; None without ranges and
        band.
    """
    import torch

    from attn_core.backends.shared import triton_block_tables as kernels

    how = _how(spec, None if shown is None else shown.shape[:2], of_queries)
    memory = torch.empty(how.size, dtype=torch.int32, device=inputs.q.device)
    views = Table(*[memory.as_strided(*view) for view in how.views])
    ends = None if how.ends is None else torch.empty(how.ends, dtype=torch.int32, device=memory.device)
    ranges = memory if inputs.key_ranges is None else inputs.key_ranges.detach().contiguous()
    operands = ranges, memory if shown is None else shown, memory if ends is None else ends, *views
    triton_launch.launch(kernels.table, (how, memory.get_device()), operands, how.describe)
    return views, ends


def table_arrays(spec: AttentionSpec, key_ranges: Any, of_queries: bool, xp: Any) -> tuple[Table, Any]:
    """Returns the same as ``table`` for a call with ranges, by plain operations, so that XLA can run them.

    Args:
        key_ranges: int32 ``spec.key_ranges_shape``, with any values.
        xp: ``numpy`` or ``jax.numpy``.
    """
    q_blocks, kv_blocks = blocks(spec.q_len), blocks(spec.kv_len)
    left, right, offset = (FAR if side is None else side for side in band(spec))
    key, exists = (xp.arange(kv_blocks * BLOCK, dtype=xp.int32) for _ in range(2))
    exists = exists < spec.kv_len
    lowest = xp.maximum(key - (offset + right), 0)[:, None]
    highest = xp.minimum(key - (offset - left - 1), spec.q_len)[:, None]
    padding = [(0, 0), (0, 0), (0, kv_blocks * BLOCK - spec.kv_len), (0, 0), (0, 0)]
    padded = xp.pad(key_ranges, padding)  # ranges of 0 to 0 are empty
    start, stop = xp.maximum(padded[..., 0], lowest), xp.minimum(padded[..., 1], highest)  # [rows, heads, keys, ranges]
    shown = (start < stop) & exists[:, None]
    start, stop = xp.where(shown, start, 0), xp.where(shown, stop, 0)
    ends = xp.stack([start, stop], axis=-1).reshape(*start.shape[:3], -1)
    low = xp.arange(q_blocks, dtype=xp.int32) * BLOCK
    high = xp.minimum(low + BLOCK, spec.q_len)
    first, last = start[..., None], stop[..., None]
    touched = ((first < high) & (last > low) & (first < last)).any(3)  # [rows, heads, keys, q blocks]
    covered = ((first <= low) & (last >= high)).any(3) | ~exists[:, None]
    some, every = (of_keys.reshape(*start.shape[:2], kv_blocks, BLOCK, q_blocks) for of_keys in (touched, covered))
    some, every = some.any(3), every.all(3)
    if of_queries:
        some, every = some.swapaxes(2, 3), every.swapaxes(2, 3)
    parts = []
    for present in (some & ~every, some & every):
        present = xp.repeat(present, spec.num_heads // present.shape[1], axis=1)
        present = xp.broadcast_to(present, (spec.batch, *present.shape[1:]))
        others = xp.arange(present.shape[3], dtype=xp.int32)
        # Present blocks first, in ascending order: all places differ, so that any sort gives the same.
        order = xp.argsort(xp.where(present, others, others + present.shape[3]), axis=3)
        parts += [present.sum(3, dtype=xp.int32), order.astype(xp.int32)]
    return Table(*parts), ends


class _How(NamedTuple):
    """How a table is made.

    Attributes:
        size: of the memory of a table, in ints.
        views: of the memory: size, strides and offset of each of its tensors.
        ends: the shape of the ends, None without.
        grid, numbers, constants: of the Triton kernel.
    """

    size: int
    views: tuple[tuple[tuple[int, ...], tuple[int, ...], int], ...]
    ends: tuple[int, ...] | None
    grid: tuple[int, int, int]
    numbers: tuple[int, ...]
    constants: tuple[tuple[str, Any], ...]

    def describe(self) -> triton_launch.Description:
        return self.grid, self.numbers, dict(self.constants)


@lru_cache(maxsize=4096)
def _how(spec: AttentionSpec, shown: tuple[int, int] | None, of_queries: bool) -> _How:
    """Returns how the table of a call is made. shown: the batch rows and heads of a mask function's blocks."""
    q_blocks, kv_blocks = blocks(spec.q_len), blocks(spec.kv_len)
    length, others = (q_blocks, kv_blocks) if of_queries else (kv_blocks, q_blocks)
    given = spec.key_ranges_shape is not None
    range_rows, range_heads, _, ranges, _ = spec.key_ranges_shape or (1, 1, 0, int(has_ends(spec)), 2)
    shown_rows, shown_heads = shown or (1, 1)
    rows = max(range_rows, shown_rows)
    heads = spec.num_heads if max(range_heads, shown_heads) > 1 else 1
    # Each tensor starts at a multiple of 16 bytes: Triton compiles other code for other addresses.
    counts, lists = _whole_fours(rows * heads * length), _whole_fours(rows * heads * length * others)
    of_row, of_head = (heads if rows > 1 else 0), (1 if heads > 1 else 0)  # strides, in blocks; 0 expands an axis
    sizes = (spec.batch, spec.num_heads, length), (spec.batch, spec.num_heads, length, others)
    strides = (of_row * length, of_head * length, 1), (of_row * length * others, of_head * length * others, others, 1)
    views = tuple(
        (sizes[each % 2], strides[each % 2], each // 2 * (counts + lists) + each % 2 * counts) for each in range(4)
    )
    area, edge = q_blocks * kv_blocks, band(spec)
    numbers = (
        *(spec.q_len, spec.kv_len, *(FAR if side is None else side for side in edge[:2]), edge.offset),
        *(length, others, heads, spec.group_size),
        *(range_heads if range_rows > 1 else 0, 1 if range_heads > 1 else 0),
        *(shown_heads * area if shown_rows > 1 else 0, area if shown_heads > 1 else 0),
        *((kv_blocks, 1) if of_queries else (1, kv_blocks)),
    )
    constants = {"OF_QUERIES": of_queries, "RANGES": ranges, "GIVEN": given, "WITH_SHOWN": shown is not None}
    constants["OTHERS"] = min(16, _power_of_two(others))
    ends = (range_rows, range_heads, kv_blocks * BLOCK, 2 * ranges) if ranges else None
    return _How(2 * (counts + lists), views, ends, (length, rows * heads, 1), numbers, tuple(constants.items()))


def _whole_fours(number: int) -> int:
    return -(-number // 4) * 4


def _power_of_two(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()
