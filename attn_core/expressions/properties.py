"""What is known of an expression before it runs: the leaves and arrays that it reads, and the intervals of its values.

With the intervals of b, h, q and k in one block of scores, ``interval`` says whether a mask shows all of the block,
none of it, or must be computed. Bounds are sound, not tight. Floats have no bounds: NaN has no place in an interval.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from attn_core.errors import shown
from attn_core.expressions.tree import INDICES, Expression, ExpressionError, Kind, Row

_KINDS: dict[str, Kind] = {
    "bool": "bool",
    **dict.fromkeys(("int8", "int16", "int32", "int64", "uint8", "uint16"), "int"),
    **dict.fromkeys(("float16", "bfloat16", "float32", "float64"), "float"),
}


def uses(tree: Expression) -> frozenset[str]:
    """Returns what an expression reads: a subset of score, b, h, q, k and aux."""
    read = {row.op for row in tree.rows}
    return frozenset(read & {"score", *INDICES} | ({"aux"} if "lookup" in read else set()))


def is_index_only(tree: Expression) -> bool:
    """Whether the value depends on nothing but b, h, q and k: one table serves every call of the same sizes."""
    return uses(tree) <= set(INDICES)


def aux_numbers(tree: Expression) -> tuple[int, ...]:
    """Returns the numbers of the aux arrays that an expression reads, in order."""
    return tuple(sorted({int(row.value) for row in tree.rows if row.op == "lookup" and row.value is not None}))


def kind_of_dtype(dtype: object) -> Kind | None:
    """Returns the kind that elements of a dtype have in an expression, None for a dtype without one.

    Args:
        dtype: of torch, numpy or JAX, or its name.
    """
    return _KINDS.get(getattr(dtype, "name", None) or str(dtype).removeprefix("torch."))


def check_aux(tree: Expression, aux: Sequence[Any]) -> None:
    """Checks the arrays of an expression's lookups: their number, axes, dtypes, and of numpy's arrays the values.

    Args:
        tree: the expression.
        aux: arrays of torch, numpy or JAX. Values on a device are not read.

    Raises:
        ExpressionError: if arrays are missing, have other axes or another kind of dtype, or hold an int beyond 32 bits.
    """
    for row in tree.rows:
        if row.op != "lookup":
            continue
        number = int(row.value or 0)
        if number >= len(aux):
            raise ExpressionError(f"aux: expected at least {number + 1} arrays, got {len(aux)}")
        array = aux[number]
        kind = kind_of_dtype(getattr(array, "dtype", None))
        if kind != row.kind or len(array.shape) != len(row.operands):
            raise ExpressionError(
                f"aux[{number}]: expected {len(row.operands)} axes and a dtype of kind {row.kind}, got {shown(array)}, "
                f"dtype {getattr(array, 'dtype', None)}"
            )
        check_ints(number, array)


def check_ints(number: int, array: object) -> None:
    """Raises ExpressionError if aux array ``number`` is numpy's and holds an int beyond 32 bits."""
    if isinstance(array, np.ndarray) and array.dtype == np.int64 and array.size:
        low, high = int(array.min()), int(array.max())
        if low < INT_MIN or high > INT_MAX:
            raise ExpressionError(f"aux[{number}]: expected ints of 32 bits, got values from {low} to {high}")


Interval = tuple[float, float]
"""The lowest and the highest value, both included; of a bool 0 for False and 1 for True."""

INT_MIN, INT_MAX = -(2**31), 2**31 - 1
MAX_INDEX = 2**30 - 1
"""The highest b, h, q or k. No row is so long, and ``q + 1`` is known not to wrap around."""
ANY_INT: Interval = (INT_MIN, INT_MAX)
ANY_BOOL: Interval = (0, 1)
ANY_FLOAT: Interval = (-math.inf, math.inf)


def interval(tree: Expression, ranges: Mapping[str, tuple[int, int]] | None = None) -> Interval:
    """Returns an interval that holds every value of an int or bool expression, both ends included.

    Args:
        tree: the expression. A float gives ``(-inf, inf)``.
        ranges: the intervals of ``"b"``, ``"h"``, ``"q"`` and ``"k"``, such as ``{"q": (0, 127)}``; an index that is
            not given is from 0 to 2**30 - 1.

    Returns:
        ``(1, 1)`` for a mask that is always True, ``(0, 0)`` for one that is always False, ``(0, 1)`` if unknown.

    Raises:
        ExpressionError: for another name, or an interval that is empty or exceeds 32 bits.
    """
    return intervals(tree, ranges)[-1]


def intervals(tree: Expression, ranges: Mapping[str, tuple[int, int]] | None = None) -> list[Interval]:
    """Returns the interval of each of ``tree.rows``. Arguments and errors are ``interval``'s."""
    if not ranges and "_intervals" in tree.__dict__:
        return tree.__dict__["_intervals"]
    leaves = {name: (0, MAX_INDEX) for name in INDICES} | dict(ranges or {})
    for name, (low, high) in leaves.items():
        if name not in INDICES or not INT_MIN <= low <= high <= INT_MAX:
            raise ExpressionError(
                f"ranges: expected b, h, q or k -> (low, high) of 32 bits, got {name!r}: {(low, high)}"
            )
    bounds: list[Interval] = []
    for row in tree.rows:
        found = _bounds(row, [bounds[operand] for operand in row.operands], tree.rows, leaves)
        whole = {"int": ANY_INT, "bool": ANY_BOOL, "float": ANY_FLOAT}[row.kind]
        # An int that may leave 32 bits wraps around, so it can be anything.
        bounds.append(found if found is not None and whole[0] <= found[0] and found[1] <= whole[1] else whole)
    if not ranges:
        object.__setattr__(tree, "_intervals", bounds)
    return bounds


def _bounds(
    row: Row, operands: list[Interval], rows: tuple[Row, ...], leaves: Mapping[str, Interval]
) -> Interval | None:
    """Returns the bounds of one row of a tree from those of its operands; None if nothing is known."""
    if row.op in leaves:
        return leaves[row.op]
    if row.op == "constant" and row.value is not None:
        return None if row.kind == "float" else (int(row.value), int(row.value))
    of_floats = row.kind == "float" or any(rows[operand].kind == "float" for operand in row.operands)
    rule = None if of_floats else _RULES.get(row.op)
    if rule is not None and row.op == "equal" and row.operands[0] == row.operands[1]:
        return (1, 1)
    return rule(*operands) if rule else None


def _corners(function: Callable[[float, float], float]) -> Callable[[Interval, Interval], Interval]:
    """The rule of a function that is monotone in each operand: its extremes are at the ends."""

    def rule(a: Interval, b: Interval) -> Interval:
        values = [function(x, y) for x in a for y in b]
        return min(values), max(values)

    return rule


def _bits(count: float) -> int:
    """The count of a shift, which is from 0 to 31."""
    return int(min(max(count, 0), 31))


def _floor_divide(a: Interval, b: Interval) -> Interval | None:
    return None if b[0] <= 0 <= b[1] else _corners(lambda x, y: x // y)(a, b)


def _remainder(a: Interval, b: Interval) -> Interval | None:
    if b[0] <= 0 <= b[1]:
        return None
    if a[0] >= 0 and a[1] < b[0]:
        return a
    return (0, b[1] - 1) if b[0] > 0 else (b[0] + 1, 0)


def _absolute(a: Interval) -> Interval:
    return (max(a[0], -a[1], 0), max(-a[0], a[1]))


def _less(a: Interval, b: Interval) -> Interval:
    return (int(a[1] < b[0]), int(a[0] < b[1]))


def _less_equal(a: Interval, b: Interval) -> Interval:
    return (int(a[1] <= b[0]), int(a[0] <= b[1]))


def _equal(a: Interval, b: Interval) -> Interval:
    return (int(a == b and a[0] == a[1]), int(a[0] <= b[1] and b[0] <= a[1]))


def _where(condition: Interval, a: Interval, b: Interval) -> Interval:
    chosen = [branch for branch, truth in ((a, 1), (b, 0)) if condition[0] <= truth <= condition[1]]
    return min(low for low, _ in chosen), max(high for _, high in chosen)


_RULES: dict[str, Callable[..., Interval | None]] = {
    "add": lambda a, b: (a[0] + b[0], a[1] + b[1]),
    "subtract": lambda a, b: (a[0] - b[1], a[1] - b[0]),
    "multiply": _corners(lambda x, y: x * y),
    "floor_divide": _floor_divide,
    "remainder": _remainder,
    "shift_left": _corners(lambda x, y: int(x) << _bits(y)),
    "shift_right": _corners(lambda x, y: int(x) >> _bits(y)),
    "negative": lambda a: (-a[1], -a[0]),
    "abs": _absolute,
    "minimum": lambda a, b: (min(a[0], b[0]), min(a[1], b[1])),
    "maximum": lambda a, b: (max(a[0], b[0]), max(a[1], b[1])),
    "less": _less,
    "less_equal": _less_equal,
    "equal": _equal,
    "and": lambda a, b: (min(a[0], b[0]), min(a[1], b[1])),
    "or": lambda a, b: (max(a[0], b[0]), max(a[1], b[1])),
    "not": lambda a: (1 - a[1], 1 - a[0]),
    "where": _where,
    "to_int": lambda a: a,
}
"""The rules for ints and bools. ``where`` of floats and lookups have none."""
