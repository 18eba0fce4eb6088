"""Block tables: which blocks of 128 queries and keys the kernels compute for key ranges or a mask function.

Kernels make them, without a q_len x kv_len array and without a synchronisation. The band of causal and window is cut
into the ranges, so that the ranges alone say what is visible.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

from attn_core.backends.flash4.own_kernels import OwnKernel
from attn_core.call.masks import band
from attn_core.call.spec import AttentionSpec

BLOCK = 128
"""Queries and keys of a block."""


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


def has_spans(spec: AttentionSpec) -> bool:
    """Returns whether ranges or the band of a call without packed documents hide any pair."""
    return spec.key_ranges_shape is not None or not band(spec).hides_nothing(spec.q_len, spec.kv_len)


def table(spec: AttentionSpec, inputs: Any, states: Any, of_queries: bool, lane: Any) -> tuple[Table, Any]:
    """Returns the table of one side of a call, and the spans of its ranges.

    Args:
        spec: a call without packed documents, with ranges, a band or a mask function.
        inputs: its tensors on the GPU. Ranges may hold any values.
        states: how much of each block a mask function shows, int8 ``[batch or 1, heads or 1, q blocks, kv blocks]``, 0
            for nothing, 1 for some pairs, 2 for all; None for a call without.
        of_queries: whether the table is that of the queries, which a forward needs, or that of the keys.
        lane: launches the kernel, see ``own_kernels``.

    Returns:
        The table, whose tensors have all batch rows and heads; they are expanded if the lane takes views. The spans:
        int32 ``[batch or 1, kv_heads or 1, kv blocks * 128, 2 * ranges]``, starts and lengths in turn; None without
        ranges and band.
    """
    how = _how(spec, None if states is None else states.shape[:2], of_queries)
    ranges = inputs.key_ranges
    if ranges is not None:
        ranges = ranges.detach().contiguous()
        ranges = ranges.clone() if lane.TAKES_VIEWS and ranges.data_ptr() % 16 else ranges
    tensors, spans, result = (_views if lane.TAKES_VIEWS else _whole)(how, inputs.q.device)
    lane.launch(how.kernel, (ranges, states, spans, *tensors, *how.numbers))
    return result, spans


class _How(NamedTuple):
    """How a table is made.

    Attributes:
        kernel, numbers: the kernel, and its arguments behind the tensors.
        spans: the shape of the spans, None without.
        shape: of the lists of a table that has one row for each that differs.
        whole: the shape of the lists with all batch rows and heads.
    """

    kernel: OwnKernel
    numbers: tuple[int, ...]
    spans: tuple[int, ...] | None
    shape: tuple[int, int, int, int]
    whole: tuple[int, int, int, int]


@lru_cache(maxsize=4096)
def _how(spec: AttentionSpec, shown: tuple[int, int] | None, of_queries: bool) -> _How:
    """Returns how the table of a call is made. shown: the batch rows and heads of a mask function's blocks."""
    q_blocks, kv_blocks = blocks(spec.q_len), blocks(spec.kv_len)
    sides = (q_blocks, kv_blocks) if of_queries else (kv_blocks, q_blocks)
    range_rows, range_heads, _, ranges, _ = spec.key_ranges_shape or (1, 1, 0, int(has_spans(spec)), 2)
    shown_rows, shown_heads = shown or (1, 1)
    rows = spec.batch if max(range_rows, shown_rows) > 1 else 1
    heads = spec.num_heads if max(range_heads, shown_heads) > 1 else 1
    edge = band(spec)
    numbers = spec.q_len, spec.kv_len, *edge.sides(), edge.offset, rows, heads, spec.group_size
    spans = (range_rows, range_heads, kv_blocks * BLOCK, 2 * ranges) if ranges else None
    kernel = _kernel(BLOCK, of_queries, ranges, spec.key_ranges_shape is not None, shown is not None)
    return _How(kernel, numbers, spans, (rows, heads, *sides), (spec.batch, spec.num_heads, *sides))


@lru_cache(maxsize=16)
def _kernel(*choices: Any) -> OwnKernel:
    def code() -> Any:
        from attn_core.backends.flash4.table_kernel import BlockTable

        return BlockTable(*choices)

    return OwnKernel(f"attn_core.block_table{choices}", code)


def _views(how: _How, device: Any) -> tuple[Table, Any, Table]:
    """Returns the tensors that the kernel writes, as views of one allocation, with the spans and the expanded table."""
    import torch

    size, views, expanded = _layout(how)
    memory = torch.empty(size, dtype=torch.int32, device=device)
    spans, *tensors = [view and memory.as_strided(*view) for view in views]
    return Table(*tensors), spans, Table(*[memory.as_strided(*view) for view in expanded])


@lru_cache(maxsize=4096)
def _layout(how: _How) -> tuple[int, tuple[Any, ...], tuple[Any, ...]]:
    """Returns a size, and the shapes, strides and offsets of tensors in it: spans and table, and the whole table."""
    rows, heads, length, others = how.shape
    _, width, keys, columns = how.spans or (0,) * 4
    offset = (how.spans[0] if how.spans else 0) * width * keys * columns
    views: list[Any] = [how.spans and (how.spans, (width * keys * columns, keys * columns, columns, 1), 0)]
    expanded = []
    for number in range(4):
        step = length * others if number % 2 else length
        tail = (others, 1) if number % 2 else (1,)
        sizes = slice(None) if number % 2 else slice(3)
        of_row, of_head = (heads * step if rows > 1 else 0), (step if heads > 1 else 0)  # a stride of 0 expands an axis
        views.append((how.shape[sizes], (heads * step, step, *tail), offset))
        expanded.append((how.whole[sizes], (of_row, of_head, *tail), offset))
        offset += -(-rows * heads * step // 4) * 4  # each starts at a multiple of 16 bytes
    return offset, tuple(views), tuple(expanded)


def _whole(how: _How, device: Any) -> tuple[Table, Any, Table]:
    """Returns the tensors that the kernel writes, each with memory of its own, of all batch rows and heads."""
    import torch

    def make(shape: tuple[int, ...] | None) -> Any:
        return None if shape is None else torch.empty(shape, dtype=torch.int32, device=device)

    result = Table(*[make(how.whole[: 4 if number % 2 else 3]) for number in range(4)])
    return result, make(how.spans), result
