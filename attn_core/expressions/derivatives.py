"""The derivative of a score expression, by the score or by a lookup in an array, and its rounding error: expressions.

At a kink the rules are torch's: ``abs`` has the derivative 0 at 0, and ``minimum`` and ``maximum`` of equal numbers
share it. ``evaluate_jax`` has the same. A branch of ``where`` that is not taken adds nothing, also where its own
derivative is infinite.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

from attn_core.expressions.building import build, constant
from attn_core.expressions.tree import Expression, ExpressionError, nodes

ZERO, ONE, HALF = constant(0.0), constant(1.0), constant(0.5)


def derivative(tree: Expression, by: Expression | None = None) -> Expression:
    """Returns the derivative of a float expression by the score, or by ``by``: a float expression of the same leaves.

    It shares nodes with the expression (``exp`` and ``tanh`` are used again), so a kernel that evaluates both computes
    them once.

    Args:
        tree: a float expression. Comparisons of the score have no derivative; ``where`` on them has that of its branch.
        by: a lookup in an array of floats, of the tree; None is the score.

    Raises:
        ExpressionError: for an expression of another kind.
    """
    if tree.kind != "float":
        raise ExpressionError(f"derivative: expected a float expression, got one of kind {tree.kind}: {tree}")
    found: dict[Expression, Expression] = {}
    for node in nodes(tree):
        parts = [found[operand] for operand in node.operands]
        if node == by or (by is None and node.op == "score"):
            found[node] = ONE
        elif node.kind != "float" or node.op in ("score", "lookup", "to_float") or all(part == ZERO for part in parts):
            found[node] = ZERO
        else:
            found[node] = RULES[node.op](node, *node.operands, *parts)
    return found[tree]


def _plus(a: Expression, b: Expression) -> Expression:
    """a + b without a term that is known to be 0."""
    return b if a == ZERO else a if b == ZERO else build("add", a, b)


def _minus(a: Expression, b: Expression) -> Expression:
    if a == ZERO:
        return ZERO if b == ZERO else build("negative", b)
    return a if b == ZERO else build("subtract", a, b)


def _times(a: Expression, b: Expression) -> Expression:
    return ZERO if ZERO in (a, b) else build("multiply", a, b)


def _over(a: Expression, b: Expression) -> Expression:
    return ZERO if a == ZERO else build("divide", a, b)


def _multiply(node: Expression, a: Expression, b: Expression, da: Expression, db: Expression) -> Expression:
    return _plus(_times(da, b), _times(a, db))


def _divide(node: Expression, a: Expression, b: Expression, da: Expression, db: Expression) -> Expression:
    return _over(_minus(da, _times(node, db)), b)  # (a / b)' = (a' - (a / b) b') / b


def _abs(node: Expression, a: Expression, da: Expression) -> Expression:
    slope = build("where", build("less", a, ZERO), build("negative", da), ZERO)
    return build("where", build("less", ZERO, a), da, slope)


def _extreme(first: Callable[[Expression, Expression], Expression]) -> Callable[..., Expression]:
    """The rule of minimum or maximum; ``first(a, b)`` says that a alone is chosen."""

    def rule(node: Expression, a: Expression, b: Expression, da: Expression, db: Expression) -> Expression:
        shared = _times(_plus(da, db), HALF)
        return build("where", first(a, b), da, build("where", first(b, a), db, shared))

    return rule


def _tanh(node: Expression, a: Expression, da: Expression) -> Expression:
    return _times(da, build("subtract", ONE, build("multiply", node, node)))


def _sigmoid(node: Expression, a: Expression, da: Expression) -> Expression:
    # The other factor is 1 - node; like this it keeps its digits near 0.
    return _times(da, build("multiply", node, build("sigmoid", build("negative", a))))


def _where(
    node: Expression, condition: Expression, a: Expression, b: Expression, _: Expression, da: Expression, db: Expression
) -> Expression:
    return build("where", condition, da, db)


RULES: dict[str, Callable[..., Expression]] = {
    "add": lambda node, a, b, da, db: _plus(da, db),
    "subtract": lambda node, a, b, da, db: _minus(da, db),
    "multiply": _multiply,
    "divide": _divide,
    "negative": lambda node, a, da: build("negative", da),
    "abs": _abs,
    "minimum": _extreme(lambda a, b: build("less", a, b)),
    "maximum": _extreme(lambda a, b: build("less", b, a)),
    "exp": lambda node, a, da: _times(da, node),
    "exp2": lambda node, a, da: _times(da, build("multiply", node, constant(math.log(2.0)))),
    "expm1": lambda node, a, da: _times(da, build("exp", a)),
    "log": lambda node, a, da: _over(da, a),
    "log1p": lambda node, a, da: _over(da, build("add", ONE, a)),
    "sigmoid": _sigmoid,
    "tanh": _tanh,
    "where": _where,
}
"""Operation on floats -> its rule: from the node, its operands and their derivatives to the node's derivative."""

_APPROXIMATE = {"tanh": 1.0, "log": 1 / 16, "log1p": 1 / 16}
"""The absolute errors of a GPU's instructions, in units of that of tanh."""
_EXACT = ("negative", "abs", "minimum", "maximum", "where", "score")


@lru_cache(maxsize=256)
def rounding(tree: Expression, tanh_error: float = 0.0) -> Expression:
    """Returns the error of a float expression if every operation rounds by one unit of its own result: a running error
    analysis, in units of the roundoff.

    A slope such as ``1 - tanh^2`` is small because two terms cancel, and its error is that of the terms. So an error
    bound of a score function needs more than the size of its result.

    The score counts as exact: multiply its error by the expression's derivative to add it. Comparisons count as exact
    too. Cached.

    Args:
        tanh_error: an absolute error of tanh besides, in the same units. Logarithms have a share of it.
    """
    found: dict[Expression, Expression] = {}
    for node in nodes(tree):
        if node.kind == "float":
            errors = [found.get(operand, ZERO) for operand in node.operands]
            more = tanh_error * _APPROXIMATE.get(node.op, 0.0)
            found[node] = _of_node(node, errors, constant(more) if more else ZERO)
    return found[tree]


def _of_node(node: Expression, errors: list[Expression], more: Expression) -> Expression:
    """Returns the error of one node: what rounding adds, and its operands' errors times their slopes.

    Args:
        errors: those of the operands. more: what the node adds beyond rounding its result once.
    """
    if node.op == "where":  # by branch: the other one may be infinite
        return build("where", node.operands[0], *errors[1:])
    total = ZERO if node.op in _EXACT else build("abs", node)
    total = total if more == ZERO else build("add", total, more)
    if node.op == "exp2":  # XLA computes exp(x log 2), whose product is rounded
        total = build("multiply", total, build("add", ONE, build("abs", node.operands[0])))
    for number, error in enumerate(errors):
        if error == ZERO or node.op not in RULES:
            continue
        parts = [ONE if place == number else ZERO for place in range(len(errors))]
        slope = build("abs", RULES[node.op](node, *node.operands, *parts))
        total = build("add", total, build("multiply", slope, error))
    return total
