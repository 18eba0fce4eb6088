"""Hypothesis strategies for well-typed random expressions, and the operands to evaluate them on.

``exact`` trees hold ints, bools and floats whose operations every framework rounds alike, so results are equal bit for
bit. ``tame`` trees are floats with exp, tanh, division and so on, whose values and derivatives stay of moderate size.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from attn_core.expressions import Expression, block_indices
from attn_core.expressions.building import build, cast, constant, power
from attn_core.expressions.tree import INDICES, OF_FLOATS

SIZES = (2, 3, 5, 7)
"""Of the block: b, h, q, k."""
LEAVES = {
    **{name: Expression(name, "int") for name in INDICES},
    "score": Expression("score", "float"),
}
TABLE_SHAPES = {"int": (5,), "bool": (3, 7), "float": (2, 3)}
NUMBERS = {kind: number for number, kind in enumerate(TABLE_SHAPES)}
"""Aux arrays by kind: 0 ints, 1 bools, 2 floats, with 1, 2 and 2 axes."""


def operands(seed: int = 0) -> tuple[Any, np.ndarray, list[np.ndarray]]:
    """Returns indices, scores ``[b, h, q, k]`` that are multiples of 1/4, and the three aux arrays."""
    random = np.random.default_rng(seed)
    aux = [
        random.integers(-9, 9, TABLE_SHAPES["int"]).astype(np.int32),
        random.integers(0, 2, TABLE_SHAPES["bool"]).astype(bool),
        random.integers(-8, 8, TABLE_SHAPES["float"]) / 4.0,
    ]
    return block_indices(*SIZES), random.integers(-12, 12, SIZES) / 4.0, aux


def lookups(kind: str, indices: list[Expression]) -> Expression:
    """A lookup in the aux array of a kind."""
    return Expression("lookup", kind, tuple(indices[: len(TABLE_SHAPES[kind])]), NUMBERS[kind])  # type: ignore[arg-type]


@st.composite
def exact(draw: Any, kind: str, depth: int = 4) -> Expression:  # noqa: C901
    """A tree of a kind, from operations that are exact or rounded alike everywhere."""

    def inner(of: str) -> Expression:
        return draw(exact(of, depth - 1))

    if depth == 0 or draw(st.integers(0, 9)) == 0:
        return draw(_leaves(kind))
    if draw(st.integers(0, 5)) == 0:
        return build("where", inner("bool"), inner(kind), inner(kind))
    if draw(st.integers(0, 5)) == 0:
        return lookups(kind, [inner("int"), inner("int")])
    if kind == "bool":
        op = draw(st.sampled_from(["less", "less_equal", "equal", "and", "or", "not"]))
        if op == "not":
            return build(op, inner("bool"))
        of = "bool" if op in ("and", "or") else draw(st.sampled_from(["int", "float"]))
        return build(op, inner(of), inner(draw(st.sampled_from(["int", of])) if of == "float" else of))
    if kind == "int":
        op = draw(st.sampled_from([*_COMMON, "floor_divide", "remainder", "power", "to_int", *SHIFTS]))
        if op == "to_int":
            return cast(inner("bool"), "int")
        if op == "power":
            return power(inner("int"), draw(st.integers(0, 5)))
        if op in SHIFTS:
            return build(
                op, inner("int"), draw(st.integers(0, 31).map(constant) | st.just(lookups("int", [LEAVES["k"]])))
            )
        if op in ("floor_divide", "remainder"):
            divisor = inner("int")
            return build(op, inner("int"), constant(3) if divisor == constant(0) else divisor)
        return build(op, *(inner("int") for _ in range(_COMMON[op])))
    op = draw(st.sampled_from([*_COMMON, "to_float"]))  # no division: XLA multiplies by the reciprocal of a constant
    if op == "to_float":
        return cast(inner(draw(st.sampled_from(["bool", "int"]))), "float")
    return build(op, *(inner("float") for _ in range(_COMMON[op])))


SHIFTS = ("shift_left", "shift_right")
_COMMON = {"add": 2, "subtract": 2, "multiply": 2, "negative": 1, "abs": 1, "minimum": 2, "maximum": 2}


def _leaves(kind: str) -> st.SearchStrategy[Expression]:
    if kind == "bool":
        return st.sampled_from([constant(True), constant(False), build("less_equal", LEAVES["k"], LEAVES["q"])])
    if kind == "int":
        ints = st.integers(-9, 9) | st.sampled_from([2**31 - 1, -(2**31), 65537])
        return st.sampled_from([LEAVES[name] for name in INDICES]) | ints.map(constant)
    return st.just(LEAVES["score"]) | st.integers(-20, 20).map(lambda n: constant(n / 4))


@st.composite
def tame(draw: Any, depth: int = 4, float_conditions: bool = True) -> Expression:
    """A float tree of moderate values, with every rule of a derivative; conditions on floats only if asked for."""

    def inner() -> Expression:
        return draw(tame(depth - 1, float_conditions))

    if depth == 0:
        place = build("tanh", build("divide", build("subtract", LEAVES["q"], LEAVES["k"]), constant(4)))
        table = lookups("float", [LEAVES["b"], LEAVES["h"]])
        number = st.integers(-8, 8).map(lambda n: constant(n / 4))
        return draw(st.one_of(st.just(LEAVES["score"]), st.sampled_from([place, table, LEAVES["score"]]), number))
    op = draw(st.sampled_from([*_COMMON, "divide", *OF_FLOATS, "where", "bool"]))
    if op == "divide":
        divisor = inner()
        return build("divide", inner(), build("add", constant(1.0), build("multiply", divisor, divisor)))
    if op in ("tanh", "sigmoid"):
        return build(op, inner())
    if op in ("exp", "exp2", "expm1"):
        return build(op, build("negative", build("abs", inner())))
    if op in ("log", "log1p"):
        part = inner()
        return build(op, build("add", constant(0.5), build("multiply", part, part)))
    if op == "bool":
        return cast(_condition(draw, inner, float_conditions), "float")
    if op == "where":
        return build("where", _condition(draw, inner, float_conditions), inner(), inner())
    parts = [inner() for _ in range(_COMMON[op])]
    if op == "multiply":
        parts[1] = build("tanh", parts[1])
    return build(op, *parts)


def _condition(draw: Any, inner: Any, of_floats: bool) -> Expression:
    if of_floats and draw(st.booleans()):
        return build("less", inner(), inner())
    return draw(exact("bool", 1)) if of_floats else build("less_equal", LEAVES["k"], draw(_leaves("int")))
