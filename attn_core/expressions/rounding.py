"""The rounding error of a float expression, as another expression: a running error analysis, in units of the roundoff.

A slope such as ``1 - tanh^2`` is small because two terms cancel, and its error is that of the terms. So an error bound
of a score function needs more than the size of its result.
"""

from __future__ import annotations

from functools import lru_cache

from attn_core.expressions.building import build, constant
from attn_core.expressions.derivatives import ONE, RULES, ZERO
from attn_core.expressions.tree import Expression, nodes

_EXACT = ("negative", "abs", "minimum", "maximum", "where", "score")


@lru_cache(maxsize=256)
def rounding(tree: Expression, tanh_error: float = 0.0) -> Expression:
    """Returns the error of a float expression if every operation rounds by one unit of its own result.

    The score counts as exact: multiply its error by the expression's derivative to add it. Comparisons count as exact
    too. Cached.

    Args:
        tanh_error: an absolute error of tanh besides, in the same units.
    """
    found: dict[Expression, Expression] = {}
    for node in nodes(tree):
        if node.kind == "float":
            errors = [found.get(operand, ZERO) for operand in node.operands]
            found[node] = _of_node(node, errors, constant(tanh_error) if tanh_error and node.op == "tanh" else ZERO)
    return found[tree]


def _of_node(node: Expression, errors: list[Expression], more: Expression) -> Expression:
    if node.op == "where":  # by branch: the other one may be infinite
        return build("where", node.operands[0], *errors[1:])
    total = ZERO if node.op in _EXACT else build("abs", node)
    total = total if more == ZERO else build("add", total, more)
    for number, error in enumerate(errors):
        if error == ZERO or node.op not in RULES:
            continue
        parts = [ONE if place == number else ZERO for place in range(len(errors))]
        slope = build("abs", RULES[node.op](node, *node.operands, *parts))
        total = build("add", total, build("multiply", slope, error))
    return total
