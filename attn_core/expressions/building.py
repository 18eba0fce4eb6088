"""Builds expressions from operations and operands: checks their kinds, converts them, and simplifies what is exact.

Nothing is simplified that could change a bit of a result: ``0.0 * score`` stays, because the score may be NaN.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from attn_core.expressions.on_numpy import vocabulary
from attn_core.expressions.properties import INT_MAX, INT_MIN, interval
from attn_core.expressions.tree import OF_FLOATS, OPERATIONS, Expression, Kind

ORDER: tuple[Kind, ...] = ("bool", "int", "float")
MAX_POWER = 16


class Refused(Exception):
    """An operation that expressions do not have. Tracing adds the function and the line."""


def constant(value: bool | int | float) -> Expression:
    """Returns a constant of the kind of a Python number."""
    kind: Kind = "bool" if isinstance(value, bool) else "int" if isinstance(value, int) else "float"
    return Expression("constant", kind, value=value)


TRUE, FALSE = constant(True), constant(False)


def build(op: str, *operands: Expression) -> Expression:
    """Returns the expression of an operation of ``OPERATIONS``, converted and simplified.

    Raises:
        Refused: if the operands' kinds do not fit the operation, or a constant int exceeds 32 bits.
    """
    operands, kind = _converted(op, operands)
    for operand in operands:
        if operand.op == "constant" and operand.kind == "int" and not INT_MIN <= operand.value <= INT_MAX:  # type: ignore[operator]
            raise Refused(f"the int {operand.value}: ints have 32 bits; write {operand.value}.0 for a float")
    if op in ("floor_divide", "remainder"):
        return _division(op, *operands)
    if op in ("shift_left", "shift_right"):
        return _shift(op, *operands)
    return _simplified(op, kind, operands)


def cast(tree: Expression, kind: Kind) -> Expression:
    """Returns the expression as another kind; constants are converted at once. As a bool it says what is not 0."""
    if tree.kind == kind:
        return tree
    if kind == "bool":
        return build("not", build("equal", tree, constant(0)))
    if tree.op == "constant" and kind == "float":
        return constant(float(tree.value))  # type: ignore[arg-type]  # also an int of more than 32 bits
    return build(f"to_{kind}", tree)


def power(base: Expression, exponent: object) -> Expression:
    """Returns a product of ``exponent`` factors.

    Raises:
        Refused: for an exponent that is no int from 0 to 16.
    """
    if isinstance(exponent, bool) or not isinstance(exponent, int) or not 0 <= exponent <= MAX_POWER:
        raise Refused(f"** takes a constant int from 0 to {MAX_POWER} as its exponent")
    if base.kind == "bool":
        raise Refused("** of a bool; write to_int(...) or where(...)")
    result, square = constant(1 if base.kind == "int" else 1.0), base
    while exponent:
        if exponent & 1:
            result = build("multiply", result, square)
        exponent >>= 1
        square = build("multiply", square, square) if exponent else square
    return result


def _converted(op: str, operands: tuple[Expression, ...]) -> tuple[tuple[Expression, ...], Kind]:
    """Returns the operands in the kind that the operation takes, and the kind that it gives."""
    kinds = [operand.kind for operand in operands]
    if op in ("and", "or", "not"):
        if set(kinds) != {"bool"}:
            raise Refused(f"{_sign(op)} of {' and '.join(kinds)}: it takes bools; write a comparison such as x != 0")
        return operands, "bool"
    if op == "where":
        if kinds[0] != "bool":
            raise Refused(f"where with a condition of kind {kinds[0]}: it takes a bool")
        branches, kind = _common(op, operands[1:], bools=True)
        return (operands[0], *branches), kind
    if op == "to_int" and kinds[0] == "float":
        raise Refused("a float as an int: there is no rounding; compute with ints from the start")
    if op in ("to_int", "to_float"):
        return operands, "int" if op == "to_int" else "float"
    if op in ("divide", *OF_FLOATS):
        operands, _ = _common(op, operands)
        return tuple(cast(operand, "float") for operand in operands), "float"
    operands, kind = _common(op, operands, bools=op == "equal")
    if op in ("floor_divide", "remainder", "shift_left", "shift_right") and kind == "float":
        raise Refused(f"{_sign(op)} of floats: it takes ints")
    return operands, "bool" if op in ("less", "less_equal", "equal") else kind


def _common(op: str, operands: tuple[Expression, ...], bools: bool = False) -> tuple[tuple[Expression, ...], Kind]:
    """Returns the operands in the widest of their kinds."""
    kind: Kind = ORDER[max(ORDER.index(operand.kind) for operand in operands)]
    if kind == "bool" and not bools:
        raise Refused(
            f"{_sign(op)} of {' and '.join(o.kind for o in operands)}: write & | ~, to_int(...) or where(...)"
        )
    return tuple(cast(operand, kind) for operand in operands), kind


def _sign(op: str) -> str:
    pattern = OPERATIONS[op].pattern
    return pattern.format("", "", "").strip("() ,") if pattern.startswith("(") else op


def _division(op: str, a: Expression, b: Expression) -> Expression:
    """``//`` or ``%``, so that no kernel divides by 0 or by -1: x // 0 and x % 0 are 0.

    A processor may stop at either division: the quotient of the lowest int and -1 does not fit in 32 bits.
    """
    is_quotient = op == "floor_divide"
    zero, one, minus_one = constant(0), constant(1), constant(-1)
    by_minus_one = build("negative", a) if is_quotient else zero
    if b == zero:
        raise Refused(f"{_sign(op)} by the constant 0")
    if b == minus_one:
        return by_minus_one
    low, high = interval(b)
    if low > 0 or high < -1:
        return _simplified(op, "int", (a, b))
    is_zero, is_minus_one = build("equal", b, zero), build("equal", b, minus_one)
    divisor = build("where", build("or", is_zero, is_minus_one), one, b)
    rest = build("where", is_minus_one, by_minus_one, _simplified(op, "int", (a, divisor)))
    return build("where", is_zero, zero, rest)


def _shift(op: str, a: Expression, count: Expression) -> Expression:
    """``<<`` or ``>>``, by 0 to 31 bits in every kernel. By another count all bits leave, as in torch and JAX."""
    low, high = interval(count)
    if low >= 0 and high <= 31:
        return _simplified(op, "int", (a, count))
    if count.op == "constant":
        raise Refused(f"{_sign(op)} by the constant {count.value}: an int of 32 bits shifts by 0 to 31")
    outside = build("or", build("less", count, constant(0)), build("less", constant(31), count))
    shifted = _simplified(op, "int", (a, build("where", outside, constant(31), count)))
    return shifted if op == "shift_right" else build("where", outside, constant(0), shifted)


def _simplified(op: str, kind: Kind, operands: tuple[Expression, ...]) -> Expression:
    if all(operand.op == "constant" for operand in operands):
        return _folded(op, kind, operands)
    rule = _RULES.get(op)
    found = rule(*operands) if rule else None
    return Expression(op, kind, operands) if found is None else found


def _folded(op: str, kind: Kind, operands: tuple[Expression, ...]) -> Expression:
    """Computes an operation on constants, as the oracle does."""
    words = vocabulary()
    values = [words.constant(operand.value, operand.kind) for operand in operands]
    with np.errstate(all="ignore"):
        value = words.cast(values[0], kind) if op.startswith("to_") else words.functions[op](*values)
    return constant(value.item())


def _is(tree: Expression, number: float) -> bool:
    return tree.op == "constant" and tree.kind != "bool" and tree.value == number


def _add(a: Expression, b: Expression) -> Expression | None:  # not for floats: -0.0 + 0.0 is 0.0
    if a.kind == "int":
        return b if _is(a, 0) else a if _is(b, 0) else None
    return None


def _subtract(a: Expression, b: Expression) -> Expression | None:
    if a.kind == "int":
        return a if _is(b, 0) else constant(0) if a == b else None
    return a if b == constant(0.0) else None  # not -0.0


def _multiply(a: Expression, b: Expression) -> Expression | None:
    if a.kind == "int" and (_is(a, 0) or _is(b, 0)):
        return constant(0)
    return b if _is(a, 1) else a if _is(b, 1) else None


def _and(a: Expression, b: Expression) -> Expression | None:
    if FALSE in (a, b):
        return FALSE
    return b if a == TRUE else a if b == TRUE or a == b else None


def _or(a: Expression, b: Expression) -> Expression | None:
    if TRUE in (a, b):
        return TRUE
    return b if a == FALSE else a if b == FALSE or a == b else None


def _where(condition: Expression, a: Expression, b: Expression) -> Expression | None:
    if condition.op == "constant":
        return a if condition.value else b
    if a == b:
        return a
    return Expression("where", a.kind, (condition.operands[0], b, a)) if condition.op == "not" else None


def _same(result: bool) -> Callable[[Expression, Expression], Expression | None]:
    return lambda a, b: constant(result) if a == b and a.kind != "float" else None  # NaN differs from itself


_RULES: dict[str, Callable[..., Expression | None]] = {
    "add": _add,
    "subtract": _subtract,
    "multiply": _multiply,
    "divide": lambda a, b: a if _is(b, 1) else None,
    "floor_divide": lambda a, b: a if _is(b, 1) else None,
    "remainder": lambda a, b: constant(0) if _is(b, 1) else None,
    "shift_left": lambda a, count: a if _is(count, 0) else None,
    "shift_right": lambda a, count: a if _is(count, 0) else None,
    "negative": lambda a: a.operands[0] if a.op == "negative" else None,
    "abs": lambda a: a if a.op == "abs" else None,
    "minimum": lambda a, b: a if a == b else None,
    "maximum": lambda a, b: a if a == b else None,
    "less": _same(False),
    "less_equal": _same(True),
    "equal": _same(True),
    "and": _and,
    "or": _or,
    "not": lambda a: a.operands[0] if a.op == "not" else None,
    "where": _where,
    "to_int": lambda a: a if a.kind == "int" else None,
    "to_float": lambda a: a if a.kind == "float" else _of_cast(a),
}
"""Operation -> a function that returns a simpler expression of the same bits, or None."""


def _of_cast(a: Expression) -> Expression | None:
    return build("to_float", a.operands[0]) if a.op == "to_int" and a.operands[0].kind == "bool" else None
