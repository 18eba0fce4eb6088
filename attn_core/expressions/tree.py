"""Expression: what a mask or score function computes, as a small tree of plain data; and the operations in it.

A subexpression that is used twice is one node with two users. So everything that walks a tree walks its ``rows``, in
which each different node is once; a walk along the operands could take exponential time.
"""

from __future__ import annotations

import hashlib
import json
import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from attn_core.errors import SpecError

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
"""Operation -> its description: the one table of them, which the reference page has, too.

The others are made of these: ``a > b`` is ``b < a``, ``a != b`` is ``~(a == b)``, and ``a ** 3`` is a product."""

ALLOWED = (
    "+ - * / // % abs() on numbers, << >> on ints, ** by a constant from 0 to 16, comparisons, & | ~ on bools, lookups "
    f"such as array[q] or array[h, q - k], Python's own numbers, and the functions where, minimum, maximum, "
    f"{', '.join(OF_FLOATS)}, to_int, to_float and lookup of attn_core.expressions (or torch's and numpy's of the same "
    "names)"
)
"""The operations in words, for errors."""


Kind = Literal["bool", "int", "float"]
KINDS = ("bool", "int", "float")
MAX_TEXT = 2000
"""The longest formula, in characters. A larger expression is printed as its key."""


class ExpressionError(SpecError):
    """A function that cannot become an expression, or operands that do not fit one."""


class Row(NamedTuple):
    """One node of a tree, with its operands as places in the list of rows.

    Attributes:
        op, kind, value: as in ``Expression``.
        operands: the rows of the operands. They come before this row.
    """

    op: str
    kind: Kind
    value: bool | int | float | None
    operands: tuple[int, ...]


@dataclass(frozen=True, eq=False, repr=False)
class Expression:
    """A node: an operation on other expressions, or a leaf. Hashable; equal trees are equal and have equal hashes.

    Attributes:
        op: a name of ``OPERATIONS``, such as ``"add"``, or of ``LEAVES``, such as ``"q"``.
        kind: what it gives: ``"bool"``, ``"int"`` (32 bits; overflow wraps around) or ``"float"`` (of the dtype in
            which the expression runs).
        operands: the expressions that the operation takes.
        value: the number of a constant; of a lookup the number of its aux array; else None.

    Raises:
        ExpressionError: for an unknown operation or kind, or a wrong number of operands.
    """

    op: str
    kind: Kind
    operands: tuple[Expression, ...] = ()
    value: bool | int | float | None = None

    def __post_init__(self) -> None:
        arity = 0 if self.op in LEAVES else OPERATIONS[self.op].arity if self.op in OPERATIONS else None
        if self.kind not in KINDS or (arity is None and self.op != "lookup"):
            raise ExpressionError(f"expression: expected a known operation and kind, got {self.op!r}, {self.kind!r}")
        if arity is not None and arity != len(self.operands):
            raise ExpressionError(f"{self.op}: expected {arity} operands, got {len(self.operands)}")
        content = hashlib.sha256(f"{self.op}:{self.kind}:{self.value!r}".encode())
        for operand in self.operands:
            content.update(operand._content)  # type: ignore[attr-defined]
        object.__setattr__(self, "_content", content.digest())

    def __eq__(self, other: object) -> bool:
        # By content: True == 1 == 1.0 in Python, and here they are three different constants.
        if not isinstance(other, Expression):
            return NotImplemented
        return self is other or self._content == other._content  # type: ignore[attr-defined]

    def __hash__(self) -> int:
        return int.from_bytes(self._content[:8], "little")  # type: ignore[attr-defined]

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:  # by rows: a deep tree would exceed Python's recursion
        return from_rows, (tuple(tuple(row) for row in self.rows),)

    @property
    def rows(self) -> tuple[Row, ...]:
        """Every different node once, operands before their users; the last row is this node."""
        if "_rows" not in self.__dict__:
            object.__setattr__(self, "_rows", _rows_of(self))
        return self._rows  # type: ignore[attr-defined]

    @property
    def key(self) -> str:
        """A text with every node, the same in every process. Equal trees have equal keys."""
        return ";".join(_line(number, row) for number, row in enumerate(self.rows))

    @property
    def text(self) -> str:
        """The rows as JSON, from which ``from_text`` makes the expression again."""
        text = self.__dict__.get("_json")
        if text is None:
            text = json.dumps(self.rows)
            object.__setattr__(self, "_json", text)
        return text

    @property
    def digest(self) -> str:
        """A content hash as hexadecimal text, the same in every process."""
        return self._content.hex()  # type: ignore[attr-defined]

    def __str__(self) -> str:
        texts: list[str] = []
        for row in self.rows:
            texts.append(_formula(row, [texts[operand] for operand in row.operands]))
            if len(texts[-1]) > MAX_TEXT:
                return self.key
        return texts[-1].removeprefix("(").removesuffix(")") if _bracketed(self.op) else texts[-1]

    def __repr__(self) -> str:
        return f"Expression({self})"


def from_rows(rows: tuple[tuple[Any, ...], ...]) -> Expression:
    """Returns the tree of rows, as ``Expression.rows`` gives them."""
    made: list[Expression] = []
    for op, kind, value, operands in rows:
        made.append(Expression(op, kind, tuple(made[operand] for operand in operands), value))
    return made[-1]


@lru_cache(maxsize=256)
def from_text(text: str) -> Expression:
    """Returns the expression of ``Expression.text``; cached.

    Raises:
        ExpressionError: if the text is none.
    """
    try:
        rows = json.loads(text)
        return from_rows(tuple((op, kind, value, tuple(operands)) for op, kind, value, operands in rows))
    except (ValueError, TypeError, IndexError, RecursionError):
        raise ExpressionError(f"expression: expected the text of one, got {text[:200]!r}") from None


def nodes(tree: Expression) -> list[Expression]:
    """Returns every different node once, operands before their users, in the order of ``tree.rows``."""
    found: dict[Expression, None] = {}
    waiting = [(tree, False)]
    while waiting:
        node, has_operands = waiting.pop()
        if node in found:
            continue
        if has_operands or not node.operands:
            found[node] = None
        else:
            waiting.append((node, True))
            waiting += [(operand, False) for operand in reversed(node.operands)]
    return list(found)


def _rows_of(tree: Expression) -> tuple[Row, ...]:
    order = nodes(tree)
    places = {node: place for place, node in enumerate(order)}
    return tuple(Row(node.op, node.kind, node.value, tuple(places[o] for o in node.operands)) for node in order)


def _line(number: int, row: Row) -> str:
    arguments = ([] if row.value is None else [repr(row.value)]) + [f"%{operand}" for operand in row.operands]
    return f"%{number}:{row.kind}={row.op}({','.join(arguments)})"


def _bracketed(op: str) -> bool:
    return op in OPERATIONS and OPERATIONS[op].pattern.startswith("(")


def _formula(row: Row, operands: list[str]) -> str:
    if row.op == "constant":
        return repr(row.value)
    if row.op == "lookup":
        return f"aux{row.value}[{', '.join(operands)}]"
    return row.op if row.op in LEAVES else OPERATIONS[row.op].pattern.format(*operands)
