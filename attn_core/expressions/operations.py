"""The operations of expressions, as data: what they take and give, and how they are written.

The reference page has this table, and a test compares them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

INDICES = ("b", "h", "q", "k")
"""Batch row, query head, query and key: the leaves that are ints."""
LEAVES = ("constant", "score", *INDICES)


class Operation(NamedTuple):
    """One operation.

    Attributes:
        pattern: its formula, with ``{0}`` for the first operand.
        takes, gives: the kinds of its operands and of its result, in words.
        arity: the number of operands.
        names: the names of the functions of torch and numpy that are this operation.
        python: Python's operator, which every framework has; None if the frameworks have functions instead.
    """

    pattern: str
    takes: str
    gives: str
    arity: int
    names: tuple[str, ...] = ()
    python: Callable[..., Any] | None = None


OF_FLOATS = ("exp", "exp2", "expm1", "log", "log1p", "sigmoid", "tanh")
"""The functions of one float."""
_NUMBERS = "numbers"
_SHIFTS = ("lshift", "left_shift", "bitwise_left_shift"), ("rshift", "right_shift", "bitwise_right_shift")
OPERATIONS: dict[str, Operation] = {
    "add": Operation("({0} + {1})", _NUMBERS, "their kind", 2, ("add",), operator.add),
    "subtract": Operation("({0} - {1})", _NUMBERS, "their kind", 2, ("sub", "subtract"), operator.sub),
    "multiply": Operation(
        "({0} * {1})", "numbers; one may be bool", "their kind", 2, ("mul", "multiply"), operator.mul
    ),
    "divide": Operation(
        "({0} / {1})", _NUMBERS, "float", 2, ("div", "divide", "true_divide", "truediv"), operator.truediv
    ),
    "floor_divide": Operation("({0} // {1})", "ints", "int", 2, ("floor_divide", "floordiv"), operator.floordiv),
    "remainder": Operation("({0} % {1})", "ints", "int", 2, ("remainder", "mod"), operator.mod),
    "negative": Operation("(-{0})", "a number", "its kind", 1, ("neg", "negative"), operator.neg),
    "abs": Operation("abs({0})", "a number", "its kind", 1, ("abs", "absolute")),
    "minimum": Operation("minimum({0}, {1})", _NUMBERS, "their kind", 2, ("minimum",)),
    "maximum": Operation("maximum({0}, {1})", _NUMBERS, "their kind", 2, ("maximum",)),
    "shift_left": Operation("({0} << {1})", "ints", "int", 2, _SHIFTS[0], operator.lshift),
    "shift_right": Operation("({0} >> {1})", "ints", "int", 2, _SHIFTS[1], operator.rshift),
    **{name: Operation(f"{name}({{0}})", "a number", "float", 1, (name,)) for name in OF_FLOATS},
    "less": Operation("({0} < {1})", _NUMBERS, "bool", 2, ("lt", "less"), operator.lt),
    "less_equal": Operation("({0} <= {1})", _NUMBERS, "bool", 2, ("le", "less_equal"), operator.le),
    "equal": Operation("({0} == {1})", "numbers or two bools", "bool", 2, ("eq", "equal"), operator.eq),
    "and": Operation("({0} & {1})", "bools", "bool", 2, ("and", "logical_and", "bitwise_and"), operator.and_),
    "or": Operation("({0} | {1})", "bools", "bool", 2, ("or", "logical_or", "bitwise_or"), operator.or_),
    "not": Operation("(~{0})", "a bool", "bool", 1, ("invert", "logical_not", "bitwise_not"), operator.invert),
    "where": Operation(
        "where({0}, {1}, {2})", "a bool; two numbers or two bools", "the kind of the two", 3, ("where",)
    ),
    "to_int": Operation("to_int({0})", "a bool or an int", "int", 1),
    "to_float": Operation("to_float({0})", "any", "float", 1),
}
"""Operation -> its description: the one table of them. The others are made of these: ``a > b`` is ``b < a``, ``a != b``
is ``~(a == b)``, and ``a ** 3`` is a product."""

ALLOWED = (
    "+ - * / // % abs() on numbers, << >> on ints, ** by a constant from 0 to 16, comparisons, & | ~ on bools, lookups "
    f"such as array[q] or array[h, q - k], Python's own numbers, and the functions where, minimum, maximum, "
    f"{', '.join(OF_FLOATS)}, to_int, to_float and lookup of attn_core.expressions (or torch's and numpy's of the same "
    "names)"
)
"""The operations in words, for errors."""
