"""Evaluates an expression with the operations of any framework: a vocabulary.

``on_numpy``, ``on_torch`` and ``on_jax`` have the vocabularies of whole arrays. A kernel's own vocabulary, on its
scalars, goes through the same walk, so no renderer can read a tree in another way.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from attn_core.errors import shown
from attn_core.expressions.intervals import intervals
from attn_core.expressions.operations import INDICES
from attn_core.expressions.tree import Expression, ExpressionError, Kind, Row

ARITHMETIC: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "divide": operator.truediv,
    "floor_divide": operator.floordiv,
    "remainder": operator.mod,
    "negative": operator.neg,
    "less": operator.lt,
    "less_equal": operator.le,
    "equal": operator.eq,
    "and": operator.and_,
    "or": operator.or_,
    "not": operator.invert,
}
"""The operations that every framework writes as Python's operators."""


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """How a framework writes the operations.

    Attributes:
        functions: each name of ``OPERATIONS`` but the casts -> a function of its operands. ``floor_divide`` and
            ``remainder`` round down; their divisor is never 0 or -1.
        constant: ``(value, kind) -> value`` of a constant.
        cast: ``(value, kind) -> value`` as an int of 32 bits or as the float of the call.
        load: ``(array, indices) -> value``; no index is outside, and there is an index for each axis.
    """

    functions: Mapping[str, Callable[..., Any]]
    constant: Callable[[Any, Kind], Any]
    cast: Callable[[Any, Kind], Any]
    load: Callable[[Any, list[Any]], Any]


def evaluate(
    tree: Expression, vocabulary: Vocabulary, indices: Sequence[Any], score: Any = None, aux: Sequence[Any] = ()
) -> Any:
    """Returns the value of an expression.

    An index of a lookup counts from the end if it is negative, as in Python, and is then clamped to the array. A lookup
    in an empty array gives 0. So no lookup reads beside its array.

    Args:
        tree: the expression.
        vocabulary: the framework's operations.
        indices: the values of b, h, q and k, ints of 32 bits.
        score: the scores, or None for an expression without a score.
        aux: the arrays of the lookups, by their numbers.

    Raises:
        ExpressionError: if the expression needs a score and there is none, or aux arrays do not fit.
    """
    leaves = {"score": score, **dict(zip(INDICES, indices, strict=True))}
    bounds = intervals(tree)
    values: list[Any] = []
    for row in tree.rows:
        operands = [values[operand] for operand in row.operands]
        if row.op == "constant":
            values.append(vocabulary.constant(row.value, row.kind))
        elif row.op == "lookup":
            values.append(_lookup(row, tree.rows, values, bounds, vocabulary, aux))
        elif row.op in leaves:
            if leaves[row.op] is None:
                raise ExpressionError(f"{row.op}: the expression needs it, got None: {tree}")
            values.append(leaves[row.op])
        elif row.op in ("to_int", "to_float"):
            values.append(vocabulary.cast(operands[0], row.kind))
        else:
            values.append(vocabulary.functions[row.op](*operands))
    return values[-1]


def _lookup(
    row: Row, rows: Sequence[Row], values: list[Any], bounds: list[Any], vocabulary: Vocabulary, aux: Sequence[Any]
) -> Any:
    number = row.value
    if not isinstance(number, int) or number >= len(aux):
        raise ExpressionError(f"aux: expected an array of number {number}, counted from 0, got {len(aux)} arrays")
    array = aux[number]
    shape = tuple(array.shape)
    if len(shape) != len(row.operands):
        raise ExpressionError(f"aux[{number}]: expected {len(row.operands)} axes, as it is indexed, got {shown(array)}")
    if 0 in shape:
        return vocabulary.constant({"bool": False, "int": 0, "float": 0.0}[row.kind], row.kind)
    inside = []
    for operand, size in zip(row.operands, shape, strict=True):
        if rows[operand].op == "constant":
            place = int(rows[operand].value or 0)
            place = min(max(place + size if place < 0 else place, 0), size - 1)
            inside.append(vocabulary.constant(place, "int"))
        else:
            inside.append(_inside(values[operand], size, bounds[operand][0] < 0, vocabulary))
    found = vocabulary.load(array, inside)
    return found if row.kind == "bool" else vocabulary.cast(found, row.kind)


def _inside(index: Any, size: int, may_be_negative: bool, vocabulary: Vocabulary) -> Any:
    functions, last = vocabulary.functions, vocabulary.constant(size - 1, "int")
    if may_be_negative:
        zero = vocabulary.constant(0, "int")
        wrapped = functions["add"](index, vocabulary.constant(size, "int"))
        index = functions["maximum"](functions["where"](functions["less"](index, zero), wrapped, index), zero)
    return functions["minimum"](index, last)
