"""Expression: what a mask or score function computes, as a small tree of plain data.

A subexpression that is used twice is one node with two users. So everything that walks a tree walks its ``rows``, in
which each different node is once; a walk along the operands could take exponential time.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from attn_core.errors import SpecError
from attn_core.expressions.operations import LEAVES, OPERATIONS

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

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:  # by rows: a deep tree would exceed Python's recursion
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
