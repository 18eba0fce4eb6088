"""Block tables: which blocks of 128 queries and keys the kernels compute for key ranges or a mask function.

Kernels make them, without a q_len x kv_len array and without a synchronisation. The band of causal and window is cut
into the ranges, so that the ranges alone say what is visible. A mask function is evaluated once, by the same code as in
the attention kernel, so a table never contradicts the mask. A warp computes a block, pair by pair unless its bounds
decide. Upstream: nvidia-cutlass-dsl 4.8.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from attn_core.backends.flash4.functions import Arrays, arrays_of, inside_of, read, scalars_of
from attn_core.backends.flash4.own_kernels import Lane, OwnKernel
from attn_core.call.masks import band
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Inputs
from attn_core.expressions.on_cute import CuteArray, evaluate_cute
from attn_core.expressions.properties import INT_MAX, INT_MIN, uses
from attn_core.expressions.tree import Expression, nodes

if TYPE_CHECKING:
    import torch
    from torch import Tensor

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


def table(
    spec: AttentionSpec, inputs: Inputs, states: Tensor | None, of_queries: bool, lane: Lane
) -> tuple[Table, Tensor | None]:
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
        # The kernel reads a key's ranges at once, from a multiple of 16 bytes. XLA's buffers begin at one.
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
    # Without ranges the band is one range of queries for each key, if it hides anything.
    range_rows, range_heads, _, ranges, _ = spec.key_ranges_shape or (1, 1, 0, int(has_spans(spec)), 2)
    shown_rows, shown_heads = shown or (1, 1)
    # As many tables as differ: the others are copies, or views of these.
    rows = spec.batch if max(range_rows, shown_rows) > 1 else 1
    heads = spec.num_heads if max(range_heads, shown_heads) > 1 else 1
    edge = band(spec)
    numbers = spec.q_len, spec.kv_len, *edge.sides(), edge.offset, rows, heads, spec.group_size
    spans = (range_rows, range_heads, kv_blocks * BLOCK, 2 * ranges) if ranges else None
    kernel = _kernel(BLOCK, of_queries, ranges, spec.key_ranges_shape is not None, shown is not None)
    return _How(kernel, numbers, spans, (rows, heads, *sides), (spec.batch, spec.num_heads, *sides))


@lru_cache(maxsize=16)
def _kernel(*choices: int) -> OwnKernel:
    def code() -> Any:
        from attn_core.backends.flash4.table_kernel import BlockTable

        return BlockTable(*choices)  # type: ignore[arg-type]

    return OwnKernel(f"attn_core.block_table{choices}", code)


def _views(how: _How, device: torch.device) -> tuple[Table, Tensor | None, Table]:
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
    for number in range(4):  # the fields of Table: counts have even numbers, and lists, with an axis more, odd ones
        step = length * others if number % 2 else length
        tail = (others, 1) if number % 2 else (1,)
        sizes = slice(None) if number % 2 else slice(3)
        of_row, of_head = (heads * step if rows > 1 else 0), (step if heads > 1 else 0)  # a stride of 0 expands an axis
        views.append((how.shape[sizes], (heads * step, step, *tail), offset))
        expanded.append((how.whole[sizes], (of_row, of_head, *tail), offset))
        offset += -(-rows * heads * step // 4) * 4  # each starts at a multiple of 16 bytes
    return offset, tuple(views), tuple(expanded)


def _whole(how: _How, device: torch.device) -> tuple[Table, Tensor | None, Table]:
    """Returns the tensors that the kernel writes, each with memory of its own, of all batch rows and heads."""
    import torch

    def make(shape: tuple[int, ...] | None) -> Tensor | None:
        return None if shape is None else torch.empty(shape, dtype=torch.int32, device=device)

    result = Table(*[make(how.whole[: 4 if number % 2 else 3]) for number in range(4)])
    return result, make(how.spans), result


LANES = 32
"""Threads of a warp."""


def states(spec: AttentionSpec, arrays: Sequence[Tensor], device: torch.device, lane: Lane) -> Tensor:
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
    kernel = _function_kernel(tree, arrays_of(spec), inside_of(tree, spec))
    lane.launch(kernel, (result, spec.q_len, spec.kv_len, scalars))
    return result


@lru_cache(maxsize=256)
def _function_kernel(tree: Expression, arrays: Arrays, inside: tuple[int, ...]) -> OwnKernel:
    about = f"{tree.digest}, {arrays}, {inside}"
    return OwnKernel(f"attn_core.bounded_states({about})", lambda: _code(tree, arrays, inside))


def _code(tree: Expression, arrays: Arrays, inside: tuple[int, ...]) -> Any:
    """Returns the kernel that writes the states of blocks for a mask function. A warp examines a block of pairs.

    Where bounds of the function decide that all or no pairs of a block are visible, it computes none of them.

    Args:
        inside: the numbers of the lookups whose indices need no clamping.
    """
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


# The bounds of a block: the interval that a mask function lies in for all its pairs. As ``properties.intervals``, with
# the lowest and the highest value of each array over the tokens of the block. So documents whose ids differ are found
# without a comparison of their pairs. Bounds are sound, not tight.


class Bounds(NamedTuple):
    """The lowest and the highest value of an int; of a bool whether it is True for all pairs, and for some."""

    low: Any
    high: Any


class Block(NamedTuple):
    """A block of pairs: its batch row and head, and the first token and the number of tokens of both sides."""

    b: Any
    h: Any
    first_q: Any
    first_k: Any
    queries: Any
    keys: Any
    size: int


def helps(tree: Expression) -> bool:
    """Returns whether the bounds of a mask function say anything: it has a rule for its last operation."""
    return tree.op in _RULES


def bounds(tree: Expression, block: Block, lane: Any, aux: Sequence[CuteArray]) -> Bounds:
    """Returns the bounds of a mask function in a block, the same in every thread of a warp.

    Args:
        lane: the thread's number in its warp.
    """
    from cutlass import Boolean, Int32

    numbers = nodes(tree)
    places = {node: place for place, node in enumerate(numbers)}
    found: list[Bounds] = []
    leaves = {
        "b": Bounds(block.b, block.b),
        "h": Bounds(block.h, block.h),
        "q": Bounds(block.first_q, block.first_q + block.queries - 1),
        "k": Bounds(block.first_k, block.first_k + block.keys - 1),
    }
    for node in numbers:
        operands = [found[places[operand]] for operand in node.operands]
        rule = None if any(operand.kind == "float" for operand in node.operands) else _RULES.get(node.op)
        if node.op in leaves:
            found.append(leaves[node.op])
        elif node.op == "constant" and node.kind != "float":
            value = (Boolean if node.kind == "bool" else Int32)(node.value)
            found.append(Bounds(value, value))
        elif node.op == "lookup" and node.kind == "int" and _along_one_side(node):
            found.append(_of_lookup(node, block, lane, aux))
        elif rule is not None and node.kind != "float":
            found.append(rule(*operands))
        else:
            found.append(_unknown(node.kind))
    return found[-1]


def _along_one_side(node: Expression) -> bool:
    """Returns whether a lookup reads one element for each query, or for each key, or one for all pairs of a head."""
    read = {operand.op for operand in node.operands}
    return read <= {"b", "h", "q", "k"} and len(read & {"q", "k"}) <= 1


def _of_lookup(node: Expression, block: Block, lane: Any, aux: Sequence[CuteArray]) -> Bounds:
    """Returns the bounds of a lookup in a block: of the numbers that it reads for the block's queries, or for its keys.

    Lanes share the tokens, and the warp reduces what they found, so every lane returns the same bounds.
    """
    import cutlass
    from cutlass import Int32, cute

    read = {operand.op for operand in node.operands}
    if not read & {"q", "k"}:
        value = Int32(evaluate_cute(node, (block.b, block.h, block.first_q, block.first_k), None, aux))
        return Bounds(value, value)
    of_queries = "q" in read
    first, count = (block.first_q, block.queries) if of_queries else (block.first_k, block.keys)
    low, high = Int32(INT_MAX), Int32(INT_MIN)
    for part in range(block.size // LANES):
        token = first + cutlass.min(lane + part * LANES, count - 1)  # the last token again, behind the row
        index = (block.b, block.h, token, token)
        value = Int32(evaluate_cute(node, index, None, aux))
        low, high = cutlass.min(low, value), cutlass.max(high, value)
    return Bounds(cute.arch.warp_redux_sync(low, "min"), cute.arch.warp_redux_sync(high, "max"))


def _unknown(kind: str) -> Bounds:
    from cutlass import Boolean, Int32

    return Bounds(Boolean(False), Boolean(True)) if kind == "bool" else Bounds(Int32(INT_MIN), Int32(INT_MAX))


def _fitting(low: Any, high: Any) -> Bounds:
    """Returns bounds of 64 bits as those of an int of 32 bits, which wraps around: it can then be anything."""
    import cutlass
    from cutlass import Int32, Int64

    fits = (low >= Int64(INT_MIN)) & (high <= Int64(INT_MAX))
    return Bounds(
        Int32(cutlass.select_(fits, Int32(low), Int32(INT_MIN))),
        Int32(cutlass.select_(fits, Int32(high), Int32(INT_MAX))),
    )


def _add(a: Bounds, b: Bounds) -> Bounds:
    from cutlass import Int64

    return _fitting(Int64(a.low) + Int64(b.low), Int64(a.high) + Int64(b.high))


def _subtract(a: Bounds, b: Bounds) -> Bounds:
    from cutlass import Int64

    return _fitting(Int64(a.low) - Int64(b.high), Int64(a.high) - Int64(b.low))


def _minimum(a: Bounds, b: Bounds) -> Bounds:
    import cutlass

    return Bounds(cutlass.min(a.low, b.low), cutlass.min(a.high, b.high))


def _maximum(a: Bounds, b: Bounds) -> Bounds:
    import cutlass

    return Bounds(cutlass.max(a.low, b.low), cutlass.max(a.high, b.high))


def _not(a: Bounds) -> Bounds:
    from cutlass import Boolean

    return Bounds(a.high == Boolean(False), a.low == Boolean(False))


def _equal(a: Bounds, b: Bounds) -> Bounds:
    return Bounds((a.low == a.high) & (b.low == b.high) & (a.low == b.low), (a.low <= b.high) & (b.low <= a.high))


_RULES: dict[str, Callable[..., Bounds]] = {
    "add": _add,
    "subtract": _subtract,
    "minimum": _minimum,
    "maximum": _maximum,
    "less": lambda a, b: Bounds(a.high < b.low, a.low < b.high),
    "less_equal": lambda a, b: Bounds(a.high <= b.low, a.low <= b.high),
    "equal": _equal,
    "and": lambda a, b: Bounds(a.low & b.low, a.high & b.high),
    "or": lambda a, b: Bounds(a.low | b.low, a.high | b.high),
    "not": _not,
}
"""The rules for ints of a block. The kernel computes the pairs of a block for which they do not decide."""
