"""Adds a mask or a score function of ours to those of a call, with the arrays that it reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from attn_core.expressions.building import build
from attn_core.expressions.tracing import TracedFunction, trace_mask, trace_score
from attn_core.expressions.tree import Expression, nodes

TreeOf = Callable[[tuple[int, ...]], Expression]
"""Returns the expression of a function of ours, from the numbers that its arrays have among those of the call."""


def and_mask(
    mask_mod: Any, aux: Any, arrays: Sequence[Any], tree_of: TreeOf, tracer: Callable[..., TracedFunction] = trace_mask
) -> TracedFunction:
    """Returns the mask function of keys that both the call's and ours show.

    Args:
        mask_mod: the call's, traced or not, or None; aux: its arrays.
        arrays: those of our function.
        tracer: ``trace_mask``, or one that a compiler does not look into.
    """
    theirs = mask_mod if mask_mod is None or isinstance(mask_mod, TracedFunction) else tracer(mask_mod, aux)
    count, captured, numbers = _captured(theirs, aux, arrays)
    tree = tree_of(numbers)
    return TracedFunction(tree if theirs is None else _both(tree, theirs.tree), captured, count)


def before_score(score_mod: Any, aux: Any, arrays: Sequence[Any], tree_of: TreeOf) -> TracedFunction:
    """Returns the score function that applies ours first, then the call's. Arguments are those of ``and_mask``."""
    theirs = score_mod if score_mod is None or isinstance(score_mod, TracedFunction) else trace_score(score_mod, aux)
    count, captured, numbers = _captured(theirs, aux, arrays)
    tree = tree_of(numbers)
    return TracedFunction(tree if theirs is None else _applied(theirs.tree, tree), captured, count)


def _captured(
    theirs: TracedFunction | None, aux: Any, arrays: Sequence[Any]
) -> tuple[int, tuple[Any, ...], tuple[int, ...]]:
    """Returns the number of arrays in aux, the captured arrays of both functions, and the numbers of ours."""
    count = len(aux) if isinstance(aux, (tuple, list)) else 0
    captured, numbers = [] if theirs is None else list(theirs.captured), []
    for array in arrays:  # each counts once, as q's ids may be k's
        places = [place for place, other in enumerate(captured) if other is array]
        if not places:
            captured.append(array)
        numbers.append(count + (places[0] if places else len(captured) - 1))
    return count, tuple(captured), tuple(numbers)


@lru_cache(maxsize=256)
def _both(ours: Expression, theirs: Expression) -> Expression:
    return build("and", ours, theirs)


@lru_cache(maxsize=256)
def _applied(outer: Expression, inner: Expression) -> Expression:
    """Returns an expression with another one in the place of its score."""
    changed: dict[Expression, Expression] = {}
    for node in nodes(outer):
        operands = tuple([changed[operand] for operand in node.operands])
        changed[node] = inner if node.op == "score" else Expression(node.op, node.kind, operands, node.value)
    return changed[outer]
