"""Tests what is recognised in mask functions: drawn trees against their values, and neighbours that are not misread."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from expression_trees import LEAVES, SIZES, exact, operands
from hypothesis import given
from hypothesis import strategies as st

from attn_core.expressions import Expression, block_indices, evaluate_numpy, lookup, trace_mask, where
from attn_core.expressions.building import build, constant
from attn_core.expressions.recognition import Groups, Split, groups_of, split

INDICES, _, AUX = operands()
ONE_TABLE, TWO = np.arange(7), np.zeros((2, 7), int)


@st.composite
def sides(draw: Any) -> Expression:
    """An int that is linear in q and k in most cases."""
    tree = draw(st.sampled_from([LEAVES["q"], LEAVES["k"], constant(draw(st.integers(-4, 4)))]))
    for _ in range(draw(st.integers(0, 3))):
        numbers = st.integers(-4, 4) | st.sampled_from([2**30, 2**31 - 1, -(2**31)])
        other = draw(st.sampled_from([LEAVES["q"], LEAVES["k"], constant(draw(numbers)), LEAVES["b"]]))
        op = draw(st.sampled_from(["add", "subtract", "multiply", "negative", "abs"]))
        tree = build(op, *((tree,) if op in ("negative", "abs") else draw(st.permutations((tree, other)))))
    return tree


@st.composite
def masks(draw: Any) -> Expression:
    """Comparisons, chunks and any other bools, joined by ``and``, some of them negated."""
    terms = []
    for _ in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(["band", "band", "chunks", "any"]))
        if kind == "chunks":
            size = constant(draw(st.integers(1, 4)))
            term = build("equal", *(build("floor_divide", LEAVES[name], size) for name in "qk"))
        elif kind == "any":
            term = draw(exact("bool", 2).filter(lambda tree: "score" not in str(tree)))
        else:
            term = build(draw(st.sampled_from(["less", "less_equal", "equal"])), draw(sides()), draw(sides()))
        terms.append(build("not", term) if draw(st.integers(0, 3)) == 0 else term)
    tree = terms[0]
    for term in terms[1:]:
        tree = build("and", *draw(st.permutations((tree, term))))
    return tree


def shown(tree: Expression) -> np.ndarray:
    return evaluate_numpy(tree, INDICES, aux=AUX)


@given(masks())
def test_the_band_and_the_rest_show_what_the_mask_shows(tree: Expression) -> None:
    found = split(tree)
    _, _, q, k = INDICES
    seen = np.ones(SIZES, bool) if found.rest is None else shown(found.rest)
    seen = seen & (True if found.least is None else k - q >= found.least)
    seen = seen & (True if found.most is None else k - q <= found.most)
    np.testing.assert_array_equal(seen, shown(tree), str(tree))


BANDS: dict[str, tuple[Any, tuple[int | None, int | None]]] = {
    "q >= k": (lambda b, h, q, k: q >= k, (None, 0)),
    "not later": (lambda b, h, q, k: ~(k > q), (None, 0)),
    "earlier": (lambda b, h, q, k: k < q, (None, -1)),
    "an offset": (lambda b, h, q, k: k - 2 <= q + 1, (None, 3)),
    "causal and a window": (lambda b, h, q, k: (k <= q) & (q - k < 4), (-3, 0)),
    "a window, written backwards": (lambda b, h, q, k: (q - k < 4) & (q >= k), (-3, 0)),
    "both sides": (lambda b, h, q, k: abs(q - k) <= 3, (-3, 3)),
    "both sides, strict": (lambda b, h, q, k: abs(k - q) < 3, (-2, 2)),
    "double distances": (lambda b, h, q, k: 2 * k - q * 2 <= 5, (None, 2)),
    "the same token": (lambda b, h, q, k: q == k, (0, 0)),
    "the tighter of two": (lambda b, h, q, k: (q - k < 4) & (q - k < 3) & (k <= q) & (k <= q + 2), (-2, 0)),
}


@pytest.mark.parametrize(("mask", "bounds"), BANDS.values(), ids=BANDS)
def test_bands_are_recognised_as_a_whole(mask: Any, bounds: tuple[int | None, int | None]) -> None:
    assert split(trace_mask(mask).tree) == Split(*bounds, None)


OTHERS: dict[str, Any] = {
    "a prefix": lambda b, h, q, k: k < 4,
    "a sum": lambda b, h, q, k: q + k <= 4,
    "another slope": lambda b, h, q, k: 2 * k <= q,
    "a distance by head": lambda b, h, q, k: q - k < h,
    "an or": lambda b, h, q, k: (k <= q) | (k < 2),
    "all but one distance": lambda b, h, q, k: q != k,
    "outside": lambda b, h, q, k: abs(q - k) >= 3,
    "floats": lambda b, h, q, k: q * 1.0 >= k,
    "wraps around": lambda b, h, q, k: k <= q + (2**31 - 1),
    "wraps around in a product": lambda b, h, q, k: k * 4 <= q * 4,
    "a choice": lambda b, h, q, k: where(h == 0, q, q + 1) >= k,
}


@pytest.mark.parametrize("mask", OTHERS.values(), ids=OTHERS)
def test_what_is_no_band_stays(mask: Any) -> None:
    tree = trace_mask(mask).tree
    assert split(tree) == Split(None, None, tree)


GROUPS: dict[str, tuple[Any, Groups | None]] = {
    "chunks": (lambda b, h, q, k: q // 4 == k // 4, Groups(chunk=4)),
    "chunks, exchanged": (lambda b, h, q, k: k // 4 == q // 4, Groups(chunk=4)),
    "chunks by bits": (lambda b, h, q, k: q >> 2 == k // 4, Groups(chunk=4)),
    "ids": (lambda b, h, q, k: lookup(ONE_TABLE, q) == lookup(ONE_TABLE, k), Groups(array=0)),
    "ids of rows": (lambda b, h, q, k: lookup(TWO, b, k) == lookup(TWO, b, q), Groups(array=0, by_row=True)),
    "two sizes": (lambda b, h, q, k: q // 4 == k // 8, None),
    "keys alone": (lambda b, h, q, k: k // 4 == k // 8, None),
    "the next chunk": (lambda b, h, q, k: q // 4 == k // 4 + 1, None),
    "earlier chunks": (lambda b, h, q, k: q // 4 >= k // 4, None),
    "shifted chunks": (lambda b, h, q, k: (q + 1) // 4 == (k + 1) // 4, None),
    "remainders": (lambda b, h, q, k: q % 4 == k % 4, None),
    "negative chunks": (lambda b, h, q, k: q // -4 == k // -4, None),
    "other chunks": (lambda b, h, q, k: q // 4 != k // 4, None),
    "two arrays": (lambda b, h, q, k: lookup(ONE_TABLE, q) == lookup(ONE_TABLE + 1, k), None),
    "two rows": (lambda b, h, q, k: lookup(TWO, 0, q) == lookup(TWO, b, k), None),
    "by head": (lambda b, h, q, k: lookup(TWO, h, q) == lookup(TWO, h, k), None),
    "the next id": (lambda b, h, q, k: lookup(ONE_TABLE, q + 1) == lookup(ONE_TABLE, k), None),
    "floats": (lambda b, h, q, k: lookup(ONE_TABLE / 2, q) == lookup(ONE_TABLE / 2, k), None),
    "keys before": (lambda b, h, q, k: (lookup(ONE_TABLE, q) == lookup(ONE_TABLE, k)) & (k < 2), None),
}


@pytest.mark.parametrize(("mask", "groups"), GROUPS.values(), ids=GROUPS)
def test_groups(mask: Any, groups: Groups | None) -> None:
    traced = trace_mask(mask)
    found = groups_of(traced.tree)
    assert found == groups
    if found is None or found.chunk is None:
        return
    indices = block_indices(1, 1, 19, 19)
    expected = indices[2] // found.chunk == indices[3] // found.chunk
    np.testing.assert_array_equal(evaluate_numpy(traced.tree, indices), expected)
