"""Tests derivatives against finite differences, torch's autograd and jax.grad."""

from __future__ import annotations

from typing import Any

import expression_trees as trees
import numpy as np
import pytest
from hypothesis import given, settings

from attn_core.expressions import (
    Expression,
    ExpressionError,
    derivative,
    derivatives,
    evaluate_jax,
    evaluate_numpy,
    evaluate_torch,
    trace_score,
)
from attn_core.expressions.building import build, constant
from attn_core.expressions.tree import OF_FLOATS, nodes

SCORE = trees.LEAVES["score"]


def smooth_operands() -> tuple[Any, np.ndarray, Any]:
    """Scores at which no kink lies by chance."""
    indices, score, aux = trees.operands()
    return indices, np.random.default_rng(1).normal(size=score.shape), aux


def beside_differences(tree: Expression, slope: Expression) -> tuple[np.ndarray, np.ndarray]:
    """Whether the slope is that of finite differences, and where it can be compared: not at a kink."""
    indices, score, aux = smooth_operands()
    step = 1e-5
    below, here, above = (evaluate_numpy(tree, indices, score + move, aux) for move in (-step, 0.0, step))
    left, right = (here - below) / step, (above - here) / step
    smooth = np.abs(left - right) <= 1e-2 * (1 + np.abs(left) + np.abs(right))
    got = evaluate_numpy(slope, indices, score, aux)
    close = np.abs(got - (above - below) / (2 * step)) <= 1e-5 * (1 + np.abs(got) + np.abs(here))
    return close, smooth


@given(tree=trees.tame())
def test_the_derivative_is_that_of_finite_differences(tree: Expression) -> None:
    close, smooth = beside_differences(tree, derivative(tree))
    assert smooth.mean() > 0.9
    assert close[smooth].all(), f"{tree}; derivative {derivative(tree)}"


FAULTS = {
    "tanh": lambda node, a, da: build("multiply", da, build("subtract", constant(1.0), node)),
    "exp": lambda node, a, da: da,
    "exp2": lambda node, a, da: build("multiply", da, node),
    "expm1": lambda node, a, da: build("multiply", da, node),
    "log": lambda node, a, da: build("multiply", da, a),
    "log1p": lambda node, a, da: build("divide", da, a),
    "sigmoid": lambda node, a, da: build("multiply", da, node),
    "divide": lambda node, a, b, da, db: build("divide", da, b),
    "multiply": lambda node, a, b, da, db: build("multiply", da, b),
    "abs": lambda node, a, da: da,
    "minimum": lambda node, a, b, da, db: build("where", build("less", a, b), db, da),
    "where": lambda node, c, a, b, _, da, db: build("where", c, db, da),
    "subtract": lambda node, a, b, da, db: build("add", da, db),
}


@pytest.mark.parametrize("op", FAULTS)
def test_a_wrong_rule_is_noticed(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = SCORE, build("multiply", SCORE, SCORE)
    positive = build("less", constant(0.0), x)
    tree = {
        "divide": build("divide", constant(1.0), build("add", y, constant(1.0))),
        "where": build("where", positive, y, x),
        "log": build("log", build("add", y, constant(0.5))),
        "log1p": build("log1p", y),
    }.get(op) or build(op, *[x, y][: 1 if op in (*OF_FLOATS, "abs") else 2])
    close, smooth = beside_differences(tree, derivative(tree))
    assert close[smooth].all()
    monkeypatch.setitem(derivatives.RULES, op, FAULTS[op])
    close, smooth = beside_differences(tree, derivative(tree))
    assert not close[smooth].all()


def of_autograd(tree: Expression, indices: Any, score: np.ndarray, aux: Any) -> np.ndarray:
    import torch

    x = torch.from_numpy(score.copy()).requires_grad_()
    y = evaluate_torch(tree, [torch.from_numpy(each) for each in indices], x, [torch.from_numpy(each) for each in aux])
    if not y.requires_grad:
        return np.zeros(score.shape)
    y.broadcast_to(score.shape).sum().backward()
    return np.zeros(score.shape) if x.grad is None else x.grad.numpy()


def of_jax(tree: Expression, indices: Any, score: np.ndarray, aux: Any) -> np.ndarray:
    import jax
    import jax.numpy as jnp

    def total(x: Any) -> Any:
        return jnp.broadcast_to(evaluate_jax(tree, indices, x, aux), score.shape).sum()

    with jax.enable_x64(True):
        return np.asarray(jax.jit(jax.grad(total))(jnp.asarray(score)))


@pytest.mark.parametrize("of", [of_autograd, of_jax])
@settings(max_examples=25)
@given(tree=trees.tame())
def test_the_derivative_is_that_of_automatic_differentiation(of: Any, tree: Expression) -> None:
    indices, score, aux = smooth_operands()
    expected = of(tree, indices, score, aux)
    got = evaluate_numpy(derivative(tree), indices, score, aux)
    size = 1 + np.abs(expected) + np.abs(evaluate_numpy(tree, indices, score, aux))
    assert (np.abs(got - expected) <= 1e-9 * size).all(), tree


@pytest.mark.parametrize("of", [of_autograd, of_jax])
@pytest.mark.parametrize("op", ["abs", "minimum", "maximum"])
def test_kinks_have_the_derivative_of_the_frameworks(of: Any, op: str) -> None:
    indices, score, aux = trees.operands()  # multiples of 1/4: 0, 1 and 2 are among them
    twice = build("multiply", SCORE, constant(2.0))
    tree = build("abs", SCORE) if op == "abs" else build(op, twice, build("multiply", SCORE, SCORE))
    assert (score == 0).any() and (score == 2).any()
    got = evaluate_numpy(derivative(tree), indices, score, aux)
    assert np.array_equal(got, of(tree, indices, score, aux))


def test_a_branch_that_is_not_taken_adds_nothing() -> None:
    tree = build("where", build("less", constant(0.0), SCORE), build("divide", constant(1.0), SCORE), constant(0.0))
    indices, score, aux = trees.operands()
    got = evaluate_numpy(derivative(tree), indices, score, aux)
    assert np.isfinite(got).all() and (got[score <= 0] == 0).all() and (got[score > 0] < 0).all()


def test_derivatives_are_simplified() -> None:
    assert derivative(SCORE) == constant(1.0)
    table = trees.lookups("float", [trees.LEAVES["b"], trees.LEAVES["h"]])
    assert derivative(build("add", SCORE, table)) == constant(1.0)
    assert derivative(build("multiply", table, SCORE)) == table
    assert derivative(build("exp", table)) == constant(0.0)


def test_a_derivative_shares_its_nodes_and_grows_slowly() -> None:
    def layers(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        for _ in range(40):  # a tree without sharing would have 2 ** 40 nodes
            score = score * score + score
        return score

    tree = trace_score(layers).tree
    assert len(nodes(tree)) == 81
    assert len(nodes(derivative(tree))) < 300


def test_only_floats_have_a_derivative() -> None:
    with pytest.raises(ExpressionError, match="derivative: expected a float expression, got one of kind bool: k <= q"):
        derivative(build("less_equal", trees.LEAVES["k"], trees.LEAVES["q"]))
