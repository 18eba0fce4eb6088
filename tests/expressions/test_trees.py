"""Tests expressions as data: equality, keys, pickles, simplification, intervals and what they read."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import expression_trees as trees
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attn_core.expressions import (
    Expression,
    ExpressionError,
    aux_numbers,
    block_indices,
    check_aux,
    evaluate_numpy,
    interval,
    is_index_only,
    trace_mask,
    trace_score,
    uses,
    where,
)
from attn_core.expressions.building import Refused, build, cast, constant, power
from attn_core.expressions.tree import INDICES, OPERATIONS

Q, K, SCORE = (trees.LEAVES[name] for name in ("q", "k", "score"))
ANY_TREE = st.one_of(st.sampled_from(["bool", "int", "float"]).flatmap(trees.exact), trees.tame())


@given(tree=ANY_TREE)
def test_a_copy_is_equal_and_has_the_same_hash_and_key(tree: Expression) -> None:
    for again in (pickle.loads(pickle.dumps(tree)), copy.deepcopy(tree)):
        assert again == tree and hash(again) == hash(tree)
        assert again.key == tree.key and again.digest == tree.digest and again.rows == tree.rows


@given(one=ANY_TREE, other=ANY_TREE)
def test_trees_are_equal_exactly_if_their_keys_are(one: Expression, other: Expression) -> None:
    assert (one == other) == (one.key == other.key) == (one.digest == other.digest)


def test_constants_of_different_kinds_and_signs_differ() -> None:
    constants = [constant(value) for value in (True, 1, 1.0, False, 0, 0.0, -0.0, float("nan"), float("inf"))]
    assert len(set(constants)) == len(constants)
    assert constant(float("nan")) == constant(float("nan"))


def test_functions_that_compute_the_same_have_one_tree() -> None:
    def first(b: Any, h: Any, q: Any, k: Any, ids: Any) -> Any:
        return (q >= k) & (ids[b, q] == ids[b, k])

    def second(row: Any, head: Any, i: Any, j: Any, table: Any) -> Any:
        same = table[row][i] == table[row][j]
        return (j <= i) & same

    ids = np.zeros((2, 5), np.int32)
    one, other = trace_mask(first, [ids]).tree, trace_mask(second, [ids + 1]).tree
    assert one == other and hash(one) == hash(other) and {one: 1}[other] == 1
    assert trace_mask(lambda b, h, q, k: q > k).tree != trace_mask(lambda b, h, q, k: q >= k).tree


def test_key_and_hash_are_the_same_in_another_process() -> None:
    code = (
        "from attn_core.expressions import trace_score, where, tanh\n"
        "t = trace_score(lambda s, b, h, q, k: where(q > k, 20.0 * tanh(s / 20.0), s - 0.1 * (q - k))).tree\n"
        "print(t.key, t.digest, hash(t))"
    )
    root = Path(__file__).resolve().parents[2]
    texts = {
        subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    }
    assert len(texts) == 1 and "where" in texts.pop()


def test_a_deep_tree_can_be_pickled_printed_and_evaluated() -> None:
    def deep(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        for step in range(2000):
            score = score + float(step)
        return score

    tree = trace_score(deep).tree
    assert pickle.loads(pickle.dumps(tree)) == tree
    assert str(tree) == tree.key
    assert evaluate_numpy(tree, block_indices(1, 1, 1, 1), 0.5) == 0.5 + 1999 * 1000


def test_an_expression_is_printed_as_a_formula() -> None:
    tree = trace_score(lambda s, b, h, q, k: where(q > k, s - 0.5 * abs(q - k), s)).tree
    assert str(tree) == "where((k < q), (score - (0.5 * to_float(abs((q - k))))), score)"
    assert str(trace_mask(lambda b, h, q, k: (q > k) | ~(h == 0)).tree) == "(k < q) | (~(h == 0))"


@pytest.mark.parametrize(
    ("op", "kind", "operands", "message"),
    [
        ("cos", "float", (SCORE,), "expected a known operation and kind, got 'cos'"),
        ("exp", "half", (SCORE,), "got 'exp', 'half'"),
        ("add", "int", (Q,), "add: expected 2 operands, got 1"),
        ("q", "int", (Q,), "q: expected 0 operands, got 1"),
    ],
)
def test_wrong_nodes_are_refused(op: str, kind: Any, operands: Any, message: str) -> None:
    with pytest.raises(ExpressionError, match=message):
        Expression(op, kind, operands)


TRUE, FALSE, MASK = constant(True), constant(False), build("less_equal", K, Q)


@pytest.mark.parametrize(
    ("tree", "simple"),
    [
        (build("and", MASK, TRUE), MASK),
        (build("and", FALSE, MASK), FALSE),
        (build("or", MASK, TRUE), TRUE),
        (build("or", MASK, MASK), MASK),
        (build("not", build("not", MASK)), MASK),
        (build("where", TRUE, Q, K), Q),
        (build("where", MASK, Q, Q), Q),
        (build("where", build("not", MASK), Q, K), build("where", MASK, K, Q)),
        (build("add", Q, constant(0)), Q),
        (build("multiply", Q, constant(0)), constant(0)),
        (build("multiply", constant(1.0), SCORE), SCORE),
        (build("divide", SCORE, constant(1)), SCORE),
        (build("subtract", Q, Q), constant(0)),
        (build("less", Q, Q), FALSE),
        (build("equal", Q, Q), TRUE),
        (build("floor_divide", Q, constant(-1)), build("negative", Q)),
        (build("add", constant(2**31 - 1), constant(1)), constant(-(2**31))),
        (build("divide", constant(1), constant(0)), constant(float("inf"))),
        (cast(build("to_int", MASK), "float"), build("to_float", MASK)),
        (power(Q, 1), Q),
        (power(SCORE, 0), constant(1.0)),
    ],
    ids=lambda tree: str(tree),
)
def test_what_is_exact_is_simplified(tree: Expression, simple: Expression) -> None:
    assert tree == simple


@pytest.mark.parametrize(
    "tree",
    [
        build("multiply", SCORE, constant(0.0)),  # NaN and infinity stay NaN
        build("subtract", SCORE, SCORE),
        build("equal", SCORE, SCORE),
        build("add", SCORE, constant(0.0)),  # -0.0 becomes 0.0
        build("divide", SCORE, constant(3.0)),  # not the reciprocal
    ],
    ids=lambda tree: str(tree),
)
def test_what_could_change_a_bit_stays(tree: Expression) -> None:
    assert len(tree.operands) == 2


def test_a_divisor_that_is_known_to_be_positive_needs_no_guard() -> None:
    assert build("floor_divide", Q, build("add", K, constant(1))).op == "floor_divide"
    assert build("remainder", Q, constant(-2)).op == "remainder"
    assert build("floor_divide", Q, K).op == "where"
    with pytest.raises(Refused, match="// by the constant 0"):
        build("floor_divide", Q, constant(0))


@given(tree=trees.exact("int") | trees.exact("bool"), starts=st.tuples(*[st.integers(0, 9)] * 4))
def test_every_value_lies_in_the_interval(tree: Expression, starts: tuple[int, int, int, int]) -> None:
    indices = block_indices(*trees.SIZES, starts)
    _, score, aux = trees.operands()
    values = evaluate_numpy(tree, indices, score, aux)
    ranges = {name: (int(index.min()), int(index.max())) for name, index in zip(INDICES, indices, strict=True)}
    for low, high in (interval(tree, ranges), interval(tree)):
        assert low <= values.min() and values.max() <= high


def test_an_interval_says_whether_a_block_is_full_empty_or_mixed() -> None:
    causal = build("less_equal", K, Q)
    assert interval(causal, {"q": (128, 255), "k": (0, 127)}) == (1, 1)
    assert interval(causal, {"q": (0, 127), "k": (128, 255)}) == (0, 0)
    assert interval(causal, {"q": (0, 127), "k": (0, 127)}) == (0, 1)
    assert interval(SCORE) == (-float("inf"), float("inf"))
    assert interval(build("add", Q, constant(2**31 - 5)), {"q": (0, 9)}) == (-(2**31), 2**31 - 1)  # may wrap around


@pytest.mark.parametrize("ranges", [{"score": (0, 1)}, {"q": (5, 4)}, {"q": (0, 2**31)}])
def test_wrong_ranges_are_refused(ranges: Any) -> None:
    with pytest.raises(ExpressionError, match="ranges: expected b, h, q or k"):
        interval(Q, ranges)


def test_what_an_expression_reads() -> None:
    table = Expression("lookup", "float", (trees.LEAVES["h"], build("subtract", Q, K)), 3)
    assert uses(build("add", SCORE, table)) == {"score", "h", "q", "k", "aux"}
    assert aux_numbers(build("add", SCORE, table)) == (3,)
    assert is_index_only(build("less_equal", K, Q)) and not is_index_only(SCORE) and not is_index_only(table)
    assert uses(constant(1.0)) == frozenset()


def test_aux_arrays_are_checked() -> None:
    import torch

    tree = trace_mask(lambda b, h, q, k, ids: ids[q] == ids[k], [np.zeros(5, np.int64)]).tree
    for good in (np.zeros(9, np.int64), np.zeros(5, np.uint8), torch.zeros(5, dtype=torch.int64, device="cpu")):
        check_aux(tree, [good])
    with pytest.raises(ExpressionError, match="aux: expected at least 1 arrays, got 0"):
        check_aux(tree, [])
    with pytest.raises(ExpressionError, match=r"aux\[0\]: expected 1 axes and a dtype of kind int, .* dtype float32"):
        check_aux(tree, [np.zeros(5, np.float32)])
    with pytest.raises(ExpressionError, match=r"aux\[0\]: expected 1 axes"):
        check_aux(tree, [np.zeros((5, 1), np.int32)])
    with pytest.raises(ExpressionError, match=r"aux\[0\]: expected ints of 32 bits, got values from 0 to 2147483648"):
        check_aux(tree, [np.array([0, 2**31])])


def test_every_operation_is_in_the_reference_page() -> None:
    from tools.pages.operations import table

    page = (Path(__file__).resolve().parents[2] / "docs/reference/expressions.md").read_text(encoding="utf-8")
    assert table() in page
    assert table().count("`") == 2 * len(OPERATIONS)
