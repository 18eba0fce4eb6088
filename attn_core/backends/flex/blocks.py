"""Block tables: the blocks of 128 x 128 scores that FlexAttention computes, without a q_len x kv_len array.

By band and document, a row sees one interval of keys, and one interval of rows sees a key. So a block of rows needs one
range of key blocks. The blocks in which every row sees every key are a range within that range. Both ranges come from
minima and maxima over the block's rows. A caller's mask is reduced to blocks once.
Source: the layout of ``torch.nn.attention.flex_attention.BlockMask``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from attn_core.backends.flex.functions import Edges, PackedTokens
from attn_core.call.masks import FAR, Band, band
from attn_core.call.spec import AttentionSpec

if TYPE_CHECKING:
    import torch
    from torch import Tensor

BLOCK = 128
"""Rows and columns of a block: FlexAttention's default."""


class Table(NamedTuple):
    """For each block along one side, the blocks of the other side that contain visible scores.

    partial_count, full_count: int32 ``[batch or 1, heads or 1, blocks]``; partial, full: int32 with one axis more,
    ``[..., width]``, of which the first ``count`` entries are valid. In full blocks nothing is hidden.
    """

    partial_count: Tensor
    partial: Tensor
    full_count: Tensor
    full: Tensor


class Intervals(NamedTuple):
    """The keys that each row sees, or the rows that see each key: ``[start, stop)``, int32 ``[tokens]``."""

    start: Tensor
    stop: Tensor


def blocks(tokens: int) -> int:
    """Returns how many blocks cover a number of tokens."""
    return -(-tokens // BLOCK)


@lru_cache(maxsize=4096)
def widths(spec: AttentionSpec) -> tuple[int, int]:
    """Returns the most key blocks that a row block can need, and the most row blocks that a key block can need."""
    if spec.packed or any(each is not None for each in (spec.mask_shape, spec.key_ranges_shape, spec.mask_mod)):
        return blocks(spec.kv_len), blocks(spec.q_len)
    rows = band(spec)
    keys = Band(rows.right, rows.left, -rows.offset)  # the same band with rows and keys exchanged
    return _width(rows, spec.q_len, spec.kv_len), _width(keys, spec.kv_len, spec.q_len)


def _width(edge: Band, tokens: int, others: int) -> int:
    ranges = (edge.keys_of(first, min(first + BLOCK, tokens) - 1, others) for first in range(0, tokens, BLOCK))
    return max(1, *(blocks(stop) - start // BLOCK for start, stop in ranges))


def dense_intervals(edge: Edges, q_len: int, kv_len: int, device: torch.device) -> tuple[Intervals, Intervals]:
    """Returns the keys that each row sees and the rows that see each key, in a call without packed documents."""
    import torch

    rows, keys = (torch.arange(length, device=device, dtype=torch.int32) for length in (q_len, kv_len))
    return (
        _interval(rows + edge.offset, 0, kv_len, edge.left, edge.right),
        _interval(keys - edge.offset, 0, q_len, edge.right, edge.left),
    )


def packed_intervals(
    edge: Edges, where: PackedTokens, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, bottom_right: bool
) -> tuple[Intervals, Intervals]:
    """Returns the same for packed documents, without reading their offsets on the host."""
    documents = cu_seqlens_q.shape[0] - 1
    offsets = cu_seqlens_k.diff() - cu_seqlens_q.diff() if bottom_right else cu_seqlens_q.diff() * 0

    # document: of each token; anchor: where its diagonal lies in the document's tokens of the other side.
    def interval(
        document: Tensor,
        anchor: Callable[[Tensor], Tensor],
        cu_seqlens: Tensor,
        others: int,
        before: int | Tensor,
        after: int | Tensor,
    ) -> Intervals:
        inside = (document >= 0) & (document < documents)
        clamped = document.clamp(0, documents - 1)  # a valid index; ``inside`` empties the interval of such tokens
        start, stop = (cu_seqlens[at].clamp(0, others) * inside for at in (clamped, clamped + 1))
        return _interval(anchor(clamped) + start, start, stop, before, after)

    return (
        interval(where.of_query, lambda _: where.at_query, cu_seqlens_k, where.at_key.shape[0], edge.left, edge.right),
        interval(
            where.of_key,
            lambda document: where.at_key - offsets[document],
            cu_seqlens_q,
            where.at_query.shape[0],
            edge.right,
            edge.left,
        ),
    )


def _interval(
    anchor: Tensor, start: int | Tensor, stop: int | Tensor, before: int | Tensor, after: int | Tensor
) -> Intervals:
    """Returns ``[anchor - before, anchor + after]`` cut to ``[start, stop)``; numbers or int32 tensors."""
    import torch

    first, last = anchor - before, anchor + after + 1
    if isinstance(start, int):
        return Intervals(first.clamp(start, stop), last.clamp(start, stop))  # type: ignore[arg-type]
    return Intervals(torch.maximum(first, start), torch.minimum(last, stop))  # type: ignore[arg-type]


def table(seen: Intervals, others: int, width: int) -> Table:
    """Returns the table of one side from its intervals. others: the number of tokens on the other side."""
    import torch

    first, stop, full_first, full_stop = _ranges(seen, others)
    step = torch.arange(width, device=first.device, dtype=torch.int32)
    full = full_first[:, None] + step
    partial = first[:, None] + step  # the blocks before the full ones, then the blocks after them
    partial = torch.where(partial >= full_first[:, None], partial + (full_stop - full_first)[:, None], partial)
    counts = (stop - first) - (full_stop - full_first), full_stop - full_first
    top = blocks(others) - 1  # entries beyond the count are not read as blocks, but must be valid indices
    tables = (counts[0], partial.clamp(max=top), counts[1], full.clamp(max=top))
    return Table(*(values.to(torch.int32)[None, None] for values in tables))


def _ranges(seen: Intervals, others: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns, by block, the range of key blocks to compute and of full ones; half open, int32 ``[blocks]``."""
    import torch

    length = seen.start.shape[0]
    missing = blocks(length) * BLOCK - length
    empty = seen.stop <= seen.start

    def by_block(values: Tensor, neutral: int) -> Tensor:  # [tokens] -> [blocks, BLOCK]
        return torch.nn.functional.pad(values, (0, missing), value=neutral).view(-1, BLOCK)

    # A block is computed from the lowest start to the highest stop of its rows. Empty and missing rows add nothing.
    lowest = by_block(torch.where(empty, FAR, seen.start), FAR).amin(1)
    highest = by_block(torch.where(empty, 0, seen.stop), 0).amax(1)
    first, stop = lowest // BLOCK, (highest + BLOCK - 1) // BLOCK
    first = torch.minimum(first, stop)  # first is FAR // BLOCK if no row of the block sees anything
    # It is full between the highest start and the lowest stop. An empty row leaves none full; a missing row is ignored.
    full_first = (by_block(seen.start, 0).amax(1) + BLOCK - 1) // BLOCK
    full_stop = by_block(seen.stop, FAR).amin(1) // BLOCK
    some = full_first < full_stop
    return first, stop, torch.where(some, full_first, stop), torch.where(some, full_stop, stop)


BlockMatrices = tuple["Tensor", "Tensor"]
"""Whether a mask shows some of each block, and all of it: bool ``[batch, heads, q blocks, kv blocks]``, any axis may
be 1."""


def tables_of_blocks(
    parts: list[BlockMatrices], seen: Intervals | None, q_len: int, kv_len: int
) -> tuple[Table, Table]:
    """Returns both tables of a call with masks, all of which must show a pair, and the intervals of its rows."""
    import torch

    some, every = parts[0]
    for some_too, every_too in parts[1:]:
        some, every = some & some_too, every & every_too
    if seen is not None:
        first, stop, full_first, full_stop = (edge[:, None] for edge in _ranges(seen, kv_len))
        column = torch.arange(blocks(kv_len), device=some.device)
        some = some & (column >= first) & (column < stop)
        every = every & (column >= full_first) & (column < full_stop)
    shape = (*some.shape[:2], blocks(q_len), blocks(kv_len))
    full, partial = every.expand(shape), (some & ~every).expand(shape)
    return _ordered(partial, full), _ordered(partial.transpose(2, 3), full.transpose(2, 3))


def mask_blocks(mask: Tensor) -> BlockMatrices:
    """Returns whether a mask shows some of each block, and all of it: bool, by blocks; axes of length 1 stay 1."""
    import torch

    heights = [1 if length == 1 else BLOCK for length in mask.shape[2:]]  # an axis of 1 broadcasts, so is not cut
    missing = [-length % height for length, height in zip(mask.shape[2:], heights)]
    padded = torch.nn.functional.pad(mask, (0, missing[1], 0, missing[0]), value=False)
    # [batch, heads, q_len, kv_len] -> [batch, heads, blocks, rows, blocks, keys]
    tiles = padded.unflatten(2, (-1, heights[0])).unflatten(4, (-1, heights[1]))
    return tiles.any(5).any(3), tiles.all(5).all(3)


def range_blocks(ranges: tuple[Tensor, ...], q_len: int, kv_len: int, group: int) -> BlockMatrices:
    """Returns the blocks of key ranges, whose starts and stops are int32 ``[batch or 1, kv_heads or 1, 1, kv_len]``.

    Time and memory are those of the ranges and of the blocks. A block is full if one range of each of its keys covers
    all its rows.

    Args:
        group: query heads per kv head.
    """
    import torch

    some: Any = None
    every: Any = None
    height, width = blocks(q_len), blocks(kv_len)

    def rows_of_keys(first: Tensor, stop: Tensor) -> Tensor:
        """How many keys of each block have each row block in [first, stop): int32 ``[batch, kv_heads, kv, q]``."""
        nothing = first >= stop
        ends = [torch.where(nothing, 0, end.clamp(0, height)).to(torch.int64) for end in (first, stop)]
        padded = [torch.nn.functional.pad(end[:, :, 0], (0, width * BLOCK - kv_len)) for end in ends]
        by_block = [end.unflatten(2, (width, BLOCK)) for end in padded]
        if torch.are_deterministic_algorithms_enabled():  # torch then has no scatter_add, although integers add exactly
            row = torch.arange(height, device=first.device)
            inside = (by_block[0][..., None] <= row) & (row < by_block[1][..., None])
            return inside.sum(3, dtype=torch.int32)
        counts = first.new_zeros((*first.shape[:2], width, height + 1))
        for index, step in zip(by_block, (1, -1)):
            counts = counts.scatter_add(3, index, torch.full_like(index, step, dtype=torch.int32))
        return counts.cumsum(3, dtype=torch.int32)[..., :height]

    for start, stop in zip(ranges[::2], ranges[1::2]):
        start, stop = start.clamp(0, q_len), stop.clamp(0, q_len)  # any number may be there, and sums would overflow
        shown = stop > start
        touched = rows_of_keys(start // BLOCK, torch.where(shown, (stop + BLOCK - 1) // BLOCK, 0)) > 0
        covered = rows_of_keys((start + BLOCK - 1) // BLOCK, torch.where(shown, stop // BLOCK, 0)) == BLOCK
        some = touched if some is None else some | touched
        every = covered if every is None else every | covered
    by_head = [part.transpose(2, 3) for part in (some, every)]
    if by_head[0].shape[1] > 1:
        by_head = [part.repeat_interleave(group, 1) for part in by_head]
    return by_head[0], by_head[1]


def function_blocks(
    function: Callable[..., Tensor],
    aux: tuple[Tensor, ...],
    rows: tuple[int, int],
    q_len: int,
    kv_len: int,
    edge: Edges,
) -> BlockMatrices:
    """Returns the blocks of a mask function ``(None, b, h, q, k, aux) -> visible``.

    Compiled, the function's values are reduced where they are computed: no ``q_len x kv_len`` array is written.

    Args:
        rows: batch rows and heads whose blocks differ, 1 for one that the function does not read.
        edge: a tensor of it says on which device.
    """
    import torch

    device = edge.left.device
    b, h = (torch.arange(count, device=device, dtype=torch.int32) for count in rows)
    q, k = (torch.arange(blocks(length) * BLOCK, device=device, dtype=torch.int32) for length in (q_len, kv_len))
    q, k = q.view(-1, BLOCK, 1, 1), k.view(1, 1, -1, BLOCK)  # [blocks, rows, blocks, keys]
    shown = function(None, b.view(-1, 1, 1, 1, 1, 1), h.view(1, -1, 1, 1, 1, 1), q, k, aux)
    inside = (q < q_len) & (k < kv_len)
    tiles = shown & inside.expand(*rows, *inside.shape)
    return tiles.any(5).any(3), tiles.all(5).all(3)


def _ordered(partial: Tensor, full: Tensor) -> Table:
    """Converts boolean block matrices ``[batch, heads, blocks, others]`` to counts and ascending block numbers."""
    import torch

    parts = []
    for present in (partial, full):
        # A stable descending sort of 0 and 1 puts the numbers of present blocks first, in ascending order.
        numbers = torch.argsort(present.to(torch.int32), dim=-1, descending=True, stable=True)
        parts += [present.sum(-1, dtype=torch.int32), numbers.to(torch.int32).contiguous()]
    return Table(*parts)
