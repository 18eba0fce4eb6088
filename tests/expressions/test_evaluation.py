"""Tests that numpy, torch and JAX give the same values for random expressions, and that a swapped index is noticed."""

from __future__ import annotations

from functools import partial
from typing import Any

import expression_trees as trees
import numpy as np
import pytest
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

from attn_core.expressions import (
    Expression,
    ExpressionError,
    Vocabulary,
    block_indices,
    derivative,
    evaluate,
    evaluate_jax,
    evaluate_numpy,
    evaluate_torch,
    trace_score,
)
from attn_core.expressions.building import build, constant
from attn_core.expressions.rendering import ARITHMETIC, lookups_inside
from attn_core.expressions.tree import from_rows

ANY_EXACT = st.sampled_from(["bool", "int", "float"]).flatmap(trees.exact)


def on_torch(tree: Expression, indices: Any, score: Any, aux: Any, dtype: str = "float64") -> np.ndarray:
    import torch

    tensors = [torch.from_numpy(np.array(array)) for array in (*indices, *aux)]
    scores = torch.from_numpy(score).to(getattr(torch, dtype))
    return evaluate_torch(tree, tensors[:4], scores, tensors[4:]).numpy()


def on_jax(tree: Expression, indices: Any, score: Any, aux: Any, dtype: str = "float64") -> np.ndarray:
    import jax

    with jax.enable_x64(True):
        scores = jax.numpy.asarray(score, dtype)
        program = jax.jit(partial(evaluate_jax, tree))  # as in a call; each operation alone would compile for longer
        return np.asarray(program(indices, scores, [jax.numpy.asarray(array) for array in aux]))


FRAMEWORKS = [on_torch, on_jax]


def same(expected: np.ndarray, got: np.ndarray) -> bool:
    """Equal in dtype and value; a NaN equals a NaN."""
    return expected.dtype == got.dtype and np.array_equal(
        expected, np.broadcast_to(got, expected.shape), equal_nan=expected.dtype.kind == "f"
    )


@pytest.mark.parametrize("other", FRAMEWORKS)
@given(tree=ANY_EXACT)
def test_frameworks_compute_exact_expressions_alike(other: Any, tree: Expression) -> None:
    given_operands = trees.operands()
    assert same(evaluate_numpy(tree, *given_operands), other(tree, *given_operands)), tree


def swapped(tree: Expression, indices: Any, score: Any, aux: Any) -> np.ndarray:
    b, h, q, k = indices
    return on_torch(tree, (b, h, k, q), score, aux)


def biased(tree: Expression, indices: Any, score: Any, aux: Any) -> np.ndarray:
    return on_torch(tree, indices, score, [np.roll(array, 1) for array in aux])


def wrong_division(tree: Expression, indices: Any, score: Any, aux: Any) -> np.ndarray:
    """Rounds ``//`` towards 0, as C does."""
    functions = {**ARITHMETIC, **{name: getattr(np, name) for name in ("where", "minimum", "maximum", "abs")}}
    kinds = {"bool": np.bool_, "int": np.int32, "float": np.float64}
    words = Vocabulary(
        functions={**functions, "floor_divide": lambda a, b: np.trunc(a / b).astype(np.int32)},
        constant=lambda value, kind: kinds[kind](value),
        cast=lambda value, kind: np.asarray(value).astype(kinds[kind]),
        read=lambda array, places: array[tuple(places)],
    )
    with np.errstate(all="ignore"):
        return np.asarray(evaluate(tree, words, indices, score, aux))


@pytest.mark.parametrize("fault", [swapped, biased, wrong_division])
def test_planted_faults_are_noticed(fault: Any) -> None:
    indices, score, aux = trees.operands()

    def differs(tree: Expression) -> bool:
        return not same(evaluate_numpy(tree, indices, score, aux), fault(tree, indices, score, aux))

    # Without shrinking: that some tree is found is enough.
    quick = settings(max_examples=500, derandomize=True, database=None, phases=[Phase.generate])
    assert find(ANY_EXACT, differs, settings=quick)


class Bound:
    """A value with a bound of its rounding error, so that a tree computes its own tolerance."""

    def __init__(self, value: Any, error: Any) -> None:
        self.value, self.error = value, error


def error_bound(tree: Expression, indices: Any, score: Any, aux: Any, roundoff: float) -> np.ndarray:
    """The largest difference of two evaluations whose every operation is within a few roundoffs."""
    u = 4 * roundoff

    def rounded(value: Any, error: Any) -> Bound:
        return Bound(value, error + u * np.abs(value))

    def of(function: Any, error: Any) -> Any:
        def call(*operands: Any) -> Any:
            if not isinstance(operands[-1], Bound):
                return function(*operands)
            values = [each.value if isinstance(each, Bound) else each for each in operands]
            value = function(*values)
            return rounded(value, error(value, *operands))

        return call

    def product(value: Any, a: Bound, b: Bound) -> Any:
        return a.error * np.abs(b.value) + b.error * np.abs(a.value) + a.error * b.error

    rules: dict[str, tuple[Any, Any]] = {
        "add": (np.add, lambda v, a, b: a.error + b.error),
        "subtract": (np.subtract, lambda v, a, b: a.error + b.error),
        "multiply": (np.multiply, product),
        "divide": (np.divide, lambda v, a, b: (a.error + np.abs(v) * b.error) / (np.abs(b.value) - b.error)),
        "negative": (np.negative, lambda v, a: a.error),
        "abs": (np.abs, lambda v, a: a.error),
        "minimum": (np.minimum, lambda v, a, b: np.maximum(a.error, b.error)),
        "maximum": (np.maximum, lambda v, a, b: np.maximum(a.error, b.error)),
        "exp": (np.exp, lambda v, a: v * np.expm1(a.error)),
        "exp2": (np.exp2, lambda v, a: v * (np.expm1(a.error) + u * np.abs(a.value))),  # XLA's product is rounded
        "expm1": (np.expm1, lambda v, a: (v + 1) * np.expm1(a.error)),
        "log": (np.log, lambda v, a: a.error / (a.value - a.error)),
        "log1p": (np.log1p, lambda v, a: a.error / (1 + a.value - a.error)),
        "sigmoid": (lambda x: 1 / (1 + np.exp(-x)), lambda v, a: a.error),
        "tanh": (np.tanh, lambda v, a: a.error),
        "where": (np.where, lambda v, c, a, b: np.where(c, a.error, b.error)),
    }
    kinds = {"bool": np.bool_, "int": np.int32, "float": np.float64}
    words = Vocabulary(
        functions={**ARITHMETIC, **{name: of(*rule) for name, rule in rules.items()}},
        constant=lambda value, kind: rounded(np.float64(value), 0.0) if kind == "float" else kinds[kind](value),
        cast=lambda value, kind: (
            rounded(np.asarray(value, np.float64), 0.0) if kind == "float" else np.asarray(value, np.int32)
        ),
        read=lambda array, places: array[tuple(places)],
    )
    result = evaluate(tree, words, indices, rounded(score, 0.0), aux)
    return np.broadcast_to(result.error, score.shape)


@pytest.mark.sampled
@pytest.mark.parametrize(("dtype", "roundoff"), [("float64", 2.0**-53), ("float32", 2.0**-24)])
@pytest.mark.parametrize("other", FRAMEWORKS)
@settings(max_examples=30)
@given(tree=trees.tame(float_conditions=False))
def test_floats_are_within_rounding(other: Any, tree: Expression, dtype: str, roundoff: float) -> None:
    indices, score, aux = trees.operands()
    bound = error_bound(tree, indices, score, aux, roundoff)
    got = other(tree, indices, score, aux, dtype)
    assert got.dtype == dtype
    assert (np.abs(got - evaluate_numpy(tree, indices, score, aux)) <= bound).all(), tree


def test_the_bound_notices_an_error_of_a_thousandth() -> None:
    indices, score, aux = trees.operands()
    tree = build("tanh", trees.LEAVES["score"])
    bound = error_bound(tree, indices, score, aux, 2.0**-24)
    assert (np.abs(np.tanh(score) * 0.001) > bound).any()


@pytest.mark.parametrize("evaluation", [evaluate_numpy, on_torch, on_jax])
def test_an_index_counts_from_the_end_and_is_clamped(evaluation: Any) -> None:
    q, k = trees.LEAVES["q"], trees.LEAVES["k"]
    table = np.arange(10, 15, dtype=np.int32)
    tree = Expression("lookup", "int", (build("subtract", q, k),), 0)
    indices = block_indices(1, 1, 9, 9)
    got = np.asarray(evaluation(tree, indices, np.zeros((1, 1, 9, 9)), [table]))[0, 0]
    for i in range(9):
        for j in range(9):
            place = i - j + (5 if i < j else 0)
            assert got[i, j] == table[min(max(place, 0), 4)]


@pytest.mark.parametrize("evaluation", [evaluate_numpy, on_torch, on_jax])
@pytest.mark.parametrize("dtype", ["int32", "bool", "float32"])
def test_a_lookup_in_an_empty_array_gives_zero(evaluation: Any, dtype: str) -> None:
    kind: Any = {"int32": "int", "bool": "bool", "float32": "float"}[dtype]
    tree = Expression("lookup", kind, (trees.LEAVES["q"],), 0)
    got = evaluation(tree, *trees.operands()[:2], [np.zeros(0, dtype)])
    assert not got.any()


@pytest.mark.parametrize("evaluation", [evaluate_numpy, on_torch, on_jax])
def test_divisions_that_stop_a_processor_have_values(evaluation: Any) -> None:
    indices, score, _ = trees.operands()
    for numerator in (-(2**31), 7, -7):
        for divisor in (0, -1, 1, 3, -3):
            tables = [np.array([numerator], np.int32), np.array([divisor], np.int32)]
            a, b = (Expression("lookup", "int", (trees.LEAVES["b"],), number) for number in (0, 1))
            quotient = evaluation(build("floor_divide", a, b), indices, score, tables).flat[0]
            remainder = evaluation(build("remainder", a, b), indices, score, tables).flat[0]
            expected = divmod(numerator, divisor) if divisor else (0, 0)
            assert (quotient, remainder) == ((expected[0] + 2**31) % 2**32 - 2**31, expected[1])


SHIFTED = (-(2**31), -7, -1, 0, 1, 6, 2**31 - 1)


@pytest.mark.parametrize("evaluation", [evaluate_numpy, on_torch, on_jax])
def test_shifts_keep_the_sign_and_have_values_for_every_count(evaluation: Any) -> None:
    a, n = (Expression("lookup", "int", (trees.LEAVES["b"],), number) for number in (0, 1))
    indices, score = block_indices(len(SHIFTED), 1, 1, 1), np.zeros((len(SHIFTED), 1, 1, 1))
    for count in (0, 1, 3, 31, 32, 40, 2**31 - 1, -1, -(2**31)):
        tables = [np.array(SHIFTED, np.int32), np.full(len(SHIFTED), count, np.int32)]
        outside = not 0 <= count < 32
        right = [value >> (31 if outside else count) for value in SHIFTED]
        left = [0 if outside else (value << count) + 2**31 & 2**32 - 1 for value in SHIFTED]
        left = left if outside else [value - 2**31 for value in left]
        for op, expected in (("shift_right", right), ("shift_left", left)):
            built = [build(op, a, n)] if outside else [build(op, a, n), build(op, a, constant(count))]
            for tree in built:
                assert evaluation(tree, indices, score, tables).ravel().tolist() == expected, (op, count)


LARGE = np.array([-1e30, -3e4, -800.0, -100.0, -89.0, -30.0, -1e-6, 0.0, 1e-6, 0.4, 30.0, 89.0, 100.0, 3e4, 1e30])


@pytest.mark.parametrize("other", FRAMEWORKS)
@pytest.mark.parametrize("order", [0, 1, 2])
@pytest.mark.parametrize("op", ["sigmoid", "exp2", "expm1", "log1p"])
def test_values_and_derivatives_keep_their_digits_at_any_size(op: str, order: int, other: Any) -> None:
    """Each float32 result is near that of many digits, tiny ones too, and none is NaN where the value is known."""
    mpmath = pytest.importorskip("mpmath")
    with mpmath.workdps(60):
        ln2, e, one = mpmath.log(2), mpmath.exp, mpmath.mpf(1)
        s = lambda x: one / (one + e(-x))  # noqa: E731
        exact = {
            "sigmoid": (s, lambda x: s(x) * s(-x), lambda x: s(x) * s(-x) * (s(-x) - s(x))),
            "exp2": (lambda x: e(x * ln2), lambda x: ln2 * e(x * ln2), lambda x: ln2**2 * e(x * ln2)),
            "expm1": (mpmath.expm1, e, e),
            "log1p": (mpmath.log1p, lambda x: one / (one + x), lambda x: -one / (one + x) ** 2),
        }[op][order]
        inside = {"sigmoid": LARGE, "log1p": LARGE[LARGE > -1]}.get(op, LARGE[LARGE < 80])
        inside = inside.astype(np.float32).astype(np.float64)
        expected = np.array([float(exact(mpmath.mpf(x))) for x in inside])
        # The bend of sigmoid is 0 at 0, where two terms of the slope's size cancel.
        size = [float(s(x) * s(-x)) for x in inside] if (op, order) == ("sigmoid", 2) else abs(expected)
    tree = build(op, trees.LEAVES["score"])
    for _ in range(order):
        tree = derivative(tree)
    score = inside.reshape(1, 1, 1, -1)
    got = other(tree, block_indices(1, 1, 1, score.size), score, [], "float32").ravel().astype(np.float64)
    # The argument of an exponential is rounded, too; numbers below the normal ones may be 0.
    allowed = 2.0**-21 * np.array(size) * (1 + np.minimum(abs(inside), 127)) + 2.0**-126
    assert (np.abs(got - expected) <= allowed).all()
    assert np.isfinite(evaluate_numpy(tree, block_indices(1, 1, 1, score.size), score)).all()


@pytest.mark.parametrize("dtype", ["int8", "int16", "int64", "uint8", "float16"])
def test_other_dtypes_of_aux_arrays(dtype: str) -> None:
    kind: Any = "float" if dtype == "float16" else "int"
    tree = build("add", Expression("lookup", kind, (trees.LEAVES["q"],), 0), constant(1))
    indices, score, _ = trees.operands()
    table = np.array([3, 1, 4, 1, 5], dtype)
    expected = evaluate_numpy(tree, indices, score, [table])
    assert expected[0, 0, :, 0].tolist() == [4, 2, 5, 2, 6]
    for other in FRAMEWORKS:
        assert same(expected, other(tree, indices, score, [table]))


def test_missing_operands_are_named() -> None:
    indices, score, aux = trees.operands()
    with pytest.raises(ExpressionError, match="score: the expression needs it, got None"):
        evaluate_numpy(trees.LEAVES["score"], indices)
    tree = trees.lookups("float", [trees.LEAVES["q"], trees.LEAVES["k"]])
    with pytest.raises(ExpressionError, match="aux: expected an array of number 2, counted from 0, got 2 arrays"):
        evaluate_numpy(tree, indices, score, aux[:2])
    with pytest.raises(
        ExpressionError, match=r"aux\[2\]: expected 2 axes, as it is indexed, got numpy.ndarray of shape"
    ):
        evaluate_numpy(tree, indices, score, [*aux[:2], aux[0]])


SIZES = (2, 3, 5, 7)
"""Of a call: batch rows, heads, queries, keys."""


@pytest.mark.parametrize(
    ("function", "shapes", "inside"),
    [
        (lambda s, b, h, q, k, table: s + table[h, q - k + 6], [(3, 11)], [True]),
        (lambda s, b, h, q, k, table: s + table[h, q - k + 6], [(3, 10)], [False]),
        (lambda s, b, h, q, k, table: s + table[h, q - k + 5], [(3, 11)], [False]),
        (lambda s, b, h, q, k, a, c: s + a[q] * a[k] + c[b], [(5,), (2,)], [True, False, True]),
        (lambda s, b, h, q, k, a, i: s + a[i[q]] + a[-1], [(5,), (5,)], [True, False, False]),
        (lambda s, b, h, q, k, one: s * one, [()], [True]),
    ],
)
def test_lookups_that_stay_inside(function: Any, shapes: Any, inside: list[bool]) -> None:
    """Only the sizes of the call and of the arrays say so, not their values."""
    arrays = [np.zeros(shape, np.int32 if place == 1 else np.float32) for place, shape in enumerate(shapes)]
    tree = trace_score(function, tuple(arrays)).tree
    lookups = [number for number, row in enumerate(tree.rows) if row.op == "lookup"]
    numbers = lookups_inside(tree, SIZES, tuple(shapes))
    assert [number in numbers for number in lookups] == inside


@settings(max_examples=200)
@given(tree=ANY_EXACT)
def test_lookups_said_to_be_inside_are(tree: Expression) -> None:
    """The indices themselves, for every pair of a call."""
    indices, score, aux = trees.operands()
    sizes = tuple(int(np.max(index)) + 1 for index in indices)
    for number in lookups_inside(tree, sizes, tuple(array.shape for array in aux)):
        row = tree.rows[number]
        for operand, size in zip(row.operands, aux[row.value].shape, strict=True):
            values = evaluate_numpy(from_rows(tree.rows[: operand + 1]), indices, score, aux)
            assert (values >= 0).all() and (values < size).all()
