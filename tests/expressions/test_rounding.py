"""Tests the rounding errors of expressions: float32 stays within them, and a wrong float32 does not."""

from __future__ import annotations

import expression_trees as trees
import numpy as np
import pytest
import torch
from hypothesis import given

from attn_core.expressions import Expression, derivative, evaluate_numpy, evaluate_torch, trace_score
from attn_core.expressions.derivatives import rounding
from attn_core.expressions.functions import exp, exp2, expm1, log, log1p, sigmoid, tanh, where

UNIT = 2.0**-24
FUNCTIONS = {
    "cap": lambda score, b, h, q, k: 3.0 * tanh(score / 3.0),
    "cap and bump": lambda score, b, h, q, k: 3.0 * tanh(score / 3.0) + 0.5 * exp(-score * score),
    "gates": lambda score, b, h, q, k: (
        sigmoid(score) * log1p(score * score) + expm1(-score * score) - exp2(score / 9.0)
    ),
    "a power": lambda score, b, h, q, k: exp2(score) + log(score * score + 0.1),
    "cancels": lambda score, b, h, q, k: (score + 100.0) - score,
    "hides": lambda score, b, h, q, k: where(k > q, float("-inf"), score * score),
}


def errors(tree: Expression, factor: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """The errors of float32 at many scores, and what ``rounding`` says of them. ``factor`` multiplies the result."""
    score = np.random.default_rng(2).normal(scale=4.0, size=(1, 1, 2, 5000)).astype(np.float32)
    indices = np.ogrid[:1, :1, :2, :5000]
    truth = evaluate_numpy(tree, indices, score.astype(np.float64))
    got = evaluate_torch(tree, [torch.from_numpy(index) for index in indices], torch.from_numpy(score))
    said = np.broadcast_to(evaluate_numpy(rounding(tree), indices, score.astype(np.float64)), score.shape)
    truth, got = (np.broadcast_to(each, score.shape) for each in (truth, got.double().numpy() * factor))
    finite = np.isfinite(truth)
    return abs(got[finite] - truth[finite]), UNIT * said[finite]


@pytest.mark.parametrize("order", [0, 1, 2])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_float32_stays_within_it(name: str, order: int) -> None:
    tree = trace_score(FUNCTIONS[name]).tree
    for _ in range(order):
        tree = derivative(tree)
    wrong, said = errors(tree)
    assert np.isfinite(said).all()
    # Four times: tanh and exp err by up to two units in the last place, and such a unit is twice the roundoff.
    assert (wrong <= 4 * said).all()
    if said.max() > 0:
        assert not (errors(tree, 1 + 64 * UNIT)[0] <= 4 * said).all()


def test_a_slope_that_cancels_errs_by_its_terms() -> None:
    slope = derivative(trace_score(FUNCTIONS["cap"]).tree)
    score = np.array([[[[12.0]]]])
    assert evaluate_numpy(slope, (0, 0, 0, 0), score).item() < 2e-3
    assert 1 < evaluate_numpy(rounding(slope), (0, 0, 0, 0), score).item() < 10


@given(tree=trees.tame())
def test_drawn_expressions_have_one(tree: Expression) -> None:
    indices, score, aux = trees.operands()
    said = evaluate_numpy(rounding(tree), indices, score, aux)
    assert (said[~np.isnan(said)] >= 0).all()
