"""The rounding error of a float expression, as another expression: a running error analysis, in units of the roundoff.

A slope such as ``1 - tanh^2`` is small because two terms cancel, and its error is that of the terms. So an error bound
of a score function needs more than the size of its result.
"""

from __future__ import annotations

from functools import lru_cache

from attn_core.expressions.building import build, constant
from attn_core.expressions.derivatives import ONE, RULES, ZERO
from attn_core.expressions.tree import Expression, nodes

_APPROXIMATE = {"tanh": 1.0, "log": 1 / 16, "log1p": 1 / 16}
"""The absolute errors of a GPU's instructions, in units of that of tanh."""
_EXACT = ("negative", "abs", "minimum", "maximum", "where", "score")


@lru_cache(maxsize=256)
def rounding(tree: Expression, tanh_error: float = 0.0) -> Expression:
    """Returns the error of a float expression if every operation rounds by one unit of its own result.

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
