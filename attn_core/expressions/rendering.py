"""Evaluates an expression with the operations of any framework: a vocabulary.

``on_numpy``, ``on_torch`` and ``on_jax`` have the vocabularies of whole arrays. A kernel's own vocabulary, on its
scalars, goes through the same walk, so no renderer can read a tree in another way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

from attn_core.errors import shown
from attn_core.expressions.properties import intervals
from attn_core.expressions.tree import INDICES, OF_FLOATS, OPERATIONS, Expression, ExpressionError, Kind, Row

ARITHMETIC = {name: each.python for name, each in OPERATIONS.items() if each.python is not None}
"""The operations that every framework writes as Python's operators."""


V = TypeVar("V")


def array_functions(module: ModuleType, **own: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """Returns the functions of a ``Vocabulary`` of whole arrays: Python's operators, and a module's functions.

    Args:
        module: numpy or one like it.
        own: functions in the place of the module's.
    """
    named = {
        name: getattr(module, name) for name in ("where", "minimum", "maximum", "abs", *OF_FLOATS) if name not in own
    }
    return {**ARITHMETIC, **named, **own}


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """How a framework writes the operations.

    Attributes:
        functions: each name of ``OPERATIONS`` but the casts -> a function of its operands. ``floor_divide`` and
            ``remainder`` round down; their divisor is never 0 or -1. Shifts are by 0 to 31 bits; to the right the sign
            stays.
        constant: ``(value, kind) -> value`` of a constant.
        cast: ``(value, kind) -> value`` as an int of 32 bits or as the float of the call.
        read: ``(array, indices) -> value``; no index is outside, and there is an index for each axis. A constant index
            is Python's int.
        bound: ``(index, size) -> index`` inside the axis, the same index if it is inside already; needed for lookups
            that are ``inside``.
        rows: the index b if it counts all rows of the batch, from 0 and on the first axis; else None.
    """

    functions: Mapping[str, Callable[..., Any]]
    constant: Callable[[Any, Kind], Any]
    cast: Callable[[Any, Kind], Any]
    read: Callable[[Any, list[Any]], Any]
    bound: Callable[[Any, Any], Any] | None = None
    rows: Any = None


class Step(NamedTuple):
    """One row of a tree, ready to run.

    Attributes:
        op, kind, value, operands: of the row.
        constants: of a lookup, each index that is constant, else None.
        negative: of a lookup, whether each index may be negative.
        inside: of a lookup, whether all indices are inside the array for every pair of the call. They may be outside
            for pairs behind the call's rows, which a kernel computes and drops.
    """

    op: str
    kind: Kind
    value: Any
    operands: tuple[int, ...]
    constants: tuple[int | None, ...]
    negative: tuple[bool, ...]
    inside: bool = False


def steps_of(tree: Expression) -> tuple[Step, ...]:
    """Returns the steps that compute an expression, made once: torch.compile can follow them, but not make them."""
    steps = getattr(tree, "_steps", None)
    if steps is None:
        bounds, rows = intervals(tree), tree.rows
        steps = tuple(
            Step(
                row.op,
                row.kind,
                row.value,
                row.operands,
                tuple(rows[each].value if rows[each].op == "constant" else None for each in row.operands),  # type: ignore[misc]
                tuple(bounds[each][0] < 0 for each in row.operands),
            )
            for row in rows
        )
        object.__setattr__(tree, "_steps", steps)
    return steps


@lru_cache(maxsize=1024)
def lookups_inside(
    tree: Expression, sizes: tuple[int, int, int, int], shapes: tuple[tuple[int, ...], ...]
) -> tuple[int, ...]:
    """Returns the numbers of the lookups, among a tree's rows, that stay inside their arrays for every pair of a call.

    Args:
        sizes: of the call: its batch rows, heads, queries and keys, each at least 1.
        shapes: of the arrays.
    """
    bounds = intervals(tree, {name: (0, size - 1) for name, size in zip(INDICES, sizes, strict=True)})

    def is_inside(row: Row) -> bool:
        pairs = zip((bounds[operand] for operand in row.operands), shapes[row.value], strict=True)  # type: ignore[index]
        return all(low >= 0 and high < size for (low, high), size in pairs)

    return tuple([number for number, row in enumerate(tree.rows) if row.op == "lookup" and is_inside(row)])


@lru_cache(maxsize=1024)
def steps_inside(tree: Expression, inside: tuple[int, ...]) -> tuple[Step, ...]:
    """Returns ``steps_of`` a tree of which the numbered lookups are inside."""
    return tuple([step._replace(inside=number in inside) for number, step in enumerate(steps_of(tree))])


def evaluate(
    tree: Expression, vocabulary: Vocabulary, indices: Sequence[V], score: V | None = None, aux: Sequence[Any] = ()
) -> V:
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
    return run(steps_of(tree), vocabulary, indices, score, aux)


def run(
    steps: Sequence[Step], vocabulary: Vocabulary, indices: Sequence[V], score: V | None = None, aux: Sequence[Any] = ()
) -> V:
    """Returns the value of the last step. Arguments and errors are ``evaluate``'s."""
    leaves = {"score": score, "b": indices[0], "h": indices[1], "q": indices[2], "k": indices[3]}
    values: list[Any] = []
    for step in steps:
        operands = [values[operand] for operand in step.operands]
        if step.op == "constant":
            values.append(vocabulary.constant(step.value, step.kind))
        elif step.op == "lookup":
            values.append(look_up(step, operands, vocabulary, aux))
        elif step.op in leaves:
            if leaves[step.op] is None:
                raise ExpressionError(f"{step.op}: the expression needs it, got None")
            values.append(leaves[step.op])
        elif step.op in ("to_int", "to_float"):
            values.append(vocabulary.cast(operands[0], step.kind))
        else:
            values.append(vocabulary.functions[step.op](*operands))
    return values[-1]


def look_up(step: Step, indices: list[V], vocabulary: Vocabulary, aux: Sequence[Any]) -> V:
    """Returns the value of a lookup. Arguments and errors are ``evaluate``'s."""
    number = step.value
    if number >= len(aux):
        raise ExpressionError(f"aux: expected an array of number {number}, counted from 0, got {len(aux)} arrays")
    array = aux[number]
    shape = tuple(array.shape)
    if len(shape) != len(indices):
        raise ExpressionError(f"aux[{number}]: expected {len(indices)} axes, as it is indexed, got {shown(array)}")
    if any(isinstance(size, int) and size == 0 for size in shape):
        return vocabulary.constant({"bool": False, "int": 0, "float": 0.0}[step.kind], step.kind)
    if step.inside and vocabulary.bound is not None:
        return _read(step, array, [vocabulary.bound(index, size) for index, size in zip(indices, shape)], vocabulary)
    return _read(step, array, _all_inside(step, indices, shape, vocabulary), vocabulary)


def places_read(
    node: Expression, vocabulary: Vocabulary, indices: Sequence[V], score: V | None = None, aux: Sequence[Any] = ()
) -> list[Any] | None:
    """Returns the indices at which a lookup reads its array, one for each axis and inside of it; None if it is empty.

    Arguments are ``evaluate``'s; a constant index is Python's int.
    """
    step, shape = steps_of(node)[-1], tuple(aux[int(node.value or 0)].shape)
    if any(isinstance(size, int) and size == 0 for size in shape):
        return None
    values = [evaluate(operand, vocabulary, indices, score, aux) for operand in node.operands]
    return _all_inside(step, values, shape, vocabulary)


def _all_inside(step: Step, indices: list[Any], shape: tuple[Any, ...], vocabulary: Vocabulary) -> list[Any]:
    """Returns the indices of a lookup, one for each axis, moved into the array.

    Negative ones count from the end, as in Python. Then all are clamped, so that no lookup reads beside its array.
    """
    inside = []
    for axis, size in enumerate(shape):
        constant = step.constants[axis]
        if constant is not None and isinstance(size, int):  # not a size that jax.export leaves open
            inside.append(min(max(constant + size if constant < 0 else constant, 0), size - 1))
        elif indices[axis] is vocabulary.rows and size == vocabulary.rows.shape[0]:
            inside.append(indices[axis])  # the object that was passed, by which ``read`` knows it
        else:
            inside.append(_inside(indices[axis], size, step.negative[axis], vocabulary))
    return inside


def _read(step: Step, array: Any, indices: list[Any], vocabulary: Vocabulary) -> Any:
    """Returns the value of a lookup whose indices are inside the array."""
    found = vocabulary.read(array, indices)
    return found if step.kind == "bool" else vocabulary.cast(found, step.kind)


def _inside(index: V, size: int, may_be_negative: bool, vocabulary: Vocabulary) -> V:
    """Returns an index that is computed by the vocabulary, moved into an axis as ``_all_inside`` says."""
    functions, last = vocabulary.functions, vocabulary.constant(size - 1, "int")
    if may_be_negative:
        zero = vocabulary.constant(0, "int")
        wrapped = functions["add"](index, vocabulary.constant(size, "int"))
        index = functions["maximum"](functions["where"](functions["less"](index, zero), wrapped, index), zero)
    return functions["minimum"](index, last)


LARGEST = 2.3e38
"""The largest constant in kernels that multiply the result by log2(e). A number beyond 2.36e38 would overflow in
float32: a row of nothing but the lowest float would look like one that sees no key."""


def in_base_2(value: float) -> float:
    """Returns a constant, or for a finite float beyond LARGEST that with its sign."""
    if not isinstance(value, float) or not math.isfinite(value) or abs(value) <= LARGEST:
        return value
    return math.copysign(LARGEST, value)
