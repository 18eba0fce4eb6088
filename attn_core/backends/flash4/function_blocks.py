"""A kernel that evaluates a mask function once, and says how much of each block of 128 queries and keys it shows.

The code of the function is the same as in the attention kernel, so a table never contradicts the mask. A warp computes
a block, pair by pair unless its bounds decide. Upstream: nvidia-cutlass-dsl 4.8.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from attn_core.backends.flash4.block_tables import BLOCK, blocks
from attn_core.backends.flash4.functions import Arrays, arrays_of, inside_of, read, scalars_of
from attn_core.backends.flash4.own_kernels import OwnKernel
from attn_core.call.spec import AttentionSpec
from attn_core.expressions.on_cute import CuteArray, evaluate_cute
from attn_core.expressions.properties import INT_MAX, INT_MIN, uses
from attn_core.expressions.tree import Expression, nodes

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
