"""The operations of expressions, as data: what they take and give, and how they are written.

The reference page has this table, and a test compares them.
"""

from __future__ import annotations

from typing import NamedTuple

INDICES = ("b", "h", "q", "k")
"""Batch row, query head, query and key: the leaves that are ints."""
LEAVES = ("constant", "score", *INDICES)


class Operation(NamedTuple):
    """One operation.

    Attributes:
        pattern: its formula, with ``{0}`` for the first operand.
        takes, gives: the kinds of its operands and of its result, in words.
        arity: the number of operands.
    """

    pattern: str
    takes: str
    gives: str
    arity: int


OF_FLOATS = ("exp", "exp2", "expm1", "log", "log1p", "sigmoid", "tanh")
"""The functions of one float."""
_NUMBERS = "numbers"
OPERATIONS: dict[str, Operation] = {
    "add": Operation("({0} + {1})", _NUMBERS, "their kind", 2),
    "subtract": Operation("({0} - {1})", _NUMBERS, "their kind", 2),
    "multiply": Operation("({0} * {1})", "numbers; one may be bool", "their kind", 2),
    "divide": Operation("({0} / {1})", _NUMBERS, "float", 2),
    "floor_divide": Operation("({0} // {1})", "ints", "int", 2),
    "remainder": Operation("({0} % {1})", "ints", "int", 2),
    "negative": Operation("(-{0})", "a number", "its kind", 1),
    "abs": Operation("abs({0})", "a number", "its kind", 1),
    "minimum": Operation("minimum({0}, {1})", _NUMBERS, "their kind", 2),
    "maximum": Operation("maximum({0}, {1})", _NUMBERS, "their kind", 2),
    "shift_left": Operation("({0} << {1})", "ints", "int", 2),
    "shift_right": Operation("({0} >> {1})", "ints", "int", 2),
    **{name: Operation(f"{name}({{0}})", "a number", "float", 1) for name in OF_FLOATS},
    "less": Operation("({0} < {1})", _NUMBERS, "bool", 2),
    "less_equal": Operation("({0} <= {1})", _NUMBERS, "bool", 2),
    "equal": Operation("({0} == {1})", "numbers or two bools", "bool", 2),
    "and": Operation("({0} & {1})", "bools", "bool", 2),
    "or": Operation("({0} | {1})", "bools", "bool", 2),
    "not": Operation("(~{0})", "a bool", "bool", 1),
    "where": Operation("where({0}, {1}, {2})", "a bool; two numbers or two bools", "the kind of the two", 3),
    "to_int": Operation("to_int({0})", "a bool or an int", "int", 1),
    "to_float": Operation("to_float({0})", "any", "float", 1),
}
"""Operation -> its description. Subtraction of a larger key and the like have no names of their own: ``a > b`` is
``b < a``, ``a != b`` is ``~(a == b)``, and ``a ** 3`` is a product."""

ALLOWED = (
    "+ - * / // % abs() on numbers, << >> on ints, ** by a constant from 0 to 16, comparisons, & | ~ on bools, lookups "
    f"such as array[q] or array[h, q - k], Python's own numbers, and the functions where, minimum, maximum, "
    f"{', '.join(OF_FLOATS)}, to_int, to_float and lookup of attn_core.expressions (or torch's and numpy's of the same "
    "names)"
)
"""The operations in words, for errors."""
