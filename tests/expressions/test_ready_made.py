"""Tests the ready-made mask and score functions against their definitions, element by element."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from attn_core.expressions import (
    ExpressionError,
    alibi,
    and_masks,
    block_indices,
    causal,
    compose_scores,
    derivative,
    documents,
    evaluate_numpy,
    is_index_only,
    or_masks,
    prefix_lm,
    relative_bias,
    softcap,
    trace_mask,
    trace_score,
    window,
)

SIZES = (2, 3, 5, 7)
IDS, KV_IDS = np.array([0, 0, 1, 1, 2]), np.array([0, 0, 0, 1, 1, 2, 2])
BATCH_IDS = np.stack([IDS, IDS[::-1]])
BATCH_KV_IDS = np.stack([KV_IDS, KV_IDS[::-1]])
LENGTHS = np.array([2, 4])

MASKS: dict[str, tuple[Any, Callable[[int, int, int, int], bool]]] = {
    "causal": (causal(), lambda b, h, q, k: k <= q),
    "causal, bottom right": (causal(2), lambda b, h, q, k: k <= q + 2),
    "window": (window(2, 1), lambda b, h, q, k: q - 2 <= k <= q + 1),
    "window, left": (window(1, None, 2), lambda b, h, q, k: k >= q + 2 - 1),
    "window, right": (window(None, 0, 2), lambda b, h, q, k: k <= q + 2),
    "window, none": (window(None, None), lambda b, h, q, k: True),
    "documents": (documents(IDS, KV_IDS), lambda b, h, q, k: IDS[q] == KV_IDS[k]),
    "documents by row": (
        documents(BATCH_IDS, BATCH_KV_IDS),
        lambda b, h, q, k: BATCH_IDS[b, q] == BATCH_KV_IDS[b, k],
    ),
    "documents, one array": (documents(KV_IDS), lambda b, h, q, k: KV_IDS[q] == KV_IDS[k]),
    "prefix": (prefix_lm(3), lambda b, h, q, k: k < 3 or k <= q),
    "prefix by row": (prefix_lm(LENGTHS, 1), lambda b, h, q, k: k < LENGTHS[b] or k <= q + 1),
    "and": (
        and_masks(causal(2), documents(IDS, KV_IDS), lambda b, h, q, k: h != 1),
        lambda b, h, q, k: k <= q + 2 and IDS[q] == KV_IDS[k] and h != 1,
    ),
    "or": (or_masks(window(0, 0), prefix_lm(2)), lambda b, h, q, k: k == q or k < 2 or k <= q),
    "and of none": (and_masks(), lambda b, h, q, k: True),
    "or of none": (or_masks(), lambda b, h, q, k: False),
}


def by_definition(function: Callable[..., Any], *more: np.ndarray) -> np.ndarray:
    result = [function(*(each[place] for each in more), *place) for place in np.ndindex(SIZES)]
    return np.array(result).reshape(SIZES)


@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str) -> None:
    function, definition = MASKS[name]
    traced = trace_mask(function)
    got = evaluate_numpy(traced.tree, block_indices(*SIZES), aux=traced.captured)
    assert got.dtype == bool and np.array_equal(got, by_definition(definition))


def test_a_wrong_window_is_noticed() -> None:
    traced = trace_mask(window(3, 1))
    assert not np.array_equal(evaluate_numpy(traced.tree, block_indices(*SIZES)), by_definition(MASKS["window"][1]))


SLOPES = np.array([0.5, 0.25, 0.125])
BATCH_SLOPES = np.stack([SLOPES, 2 * SLOPES])
TABLE = np.random.default_rng(0).normal(size=(3, 5))

SCORES: dict[str, tuple[Any, Callable[[float, int, int, int, int], float]]] = {
    "softcap": (softcap(5), lambda s, b, h, q, k: 5 * math.tanh(s / 5)),
    "alibi": (alibi(SLOPES, 2), lambda s, b, h, q, k: s - SLOPES[h] * abs(q + 2 - k)),
    "alibi by row": (alibi(BATCH_SLOPES), lambda s, b, h, q, k: s - BATCH_SLOPES[b, h] * abs(q - k)),
    "relative bias": (relative_bias(TABLE), lambda s, b, h, q, k: s + TABLE[h, min(max(k - q, -2), 2) + 2]),
    "relative bias of all heads": (
        relative_bias(TABLE[0], 1),
        lambda s, b, h, q, k: s + TABLE[0, min(max(k - q - 1, -2), 2) + 2],
    ),
    "both": (
        compose_scores(softcap(5.0), relative_bias(TABLE)),
        lambda s, b, h, q, k: 5 * math.tanh(s / 5) + TABLE[h, min(max(k - q, -2), 2) + 2],
    ),
    "none": (compose_scores(), lambda s, b, h, q, k: s),
}


@pytest.mark.parametrize("name", SCORES)
def test_scores(name: str) -> None:
    function, definition = SCORES[name]
    traced = trace_score(function)
    score = np.random.default_rng(1).normal(size=SIZES) * 9
    got = evaluate_numpy(traced.tree, block_indices(*SIZES), score, traced.captured)
    np.testing.assert_allclose(got, by_definition(definition, score), rtol=1e-14, atol=1e-14)


def test_the_gradient_of_a_softcap_is_its_formula() -> None:
    score = np.linspace(-30, 30, 13)
    got = evaluate_numpy(derivative(trace_score(softcap(5.0)).tree), (0, 0, 0, 0), score)
    np.testing.assert_allclose(got, 1 - np.tanh(score / 5) ** 2, rtol=0, atol=1e-15)


def test_they_take_aux_arrays_and_ignore_them() -> None:
    ids = np.zeros(7, np.int32)
    traced = trace_mask(and_masks(causal(), lambda b, h, q, k, seen: seen[k] > 0, documents(ids)), [ids])
    assert str(traced.tree) == "((k <= q) & (0 < aux0[k])) & (aux1[q] == aux1[k])"
    assert traced.captured[0] is ids
    assert str(trace_score(softcap(2.0), [ids]).tree) == "2.0 * tanh((score / 2.0))"


def test_which_are_index_only() -> None:
    assert is_index_only(trace_mask(and_masks(causal(), window(3, 0), prefix_lm(4))).tree)
    assert not is_index_only(trace_mask(documents(IDS)).tree)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: causal(1.5), "offset: expected an int, got 1.5"),
        (lambda: window(-1, 0), "left: expected an int of 0 or more, got -1"),
        (lambda: window(0, True), "right: expected an int of 0 or more, got True"),
        (lambda: documents([0, 1]), r"ids: expected an array of 1 or 2 axes, got \[0, 1\]"),
        (lambda: documents(IDS, TABLE[None]), r"kv_ids: expected an array of 1 or 2 axes, got numpy.ndarray of shape"),
        (lambda: prefix_lm(-1), "lengths: expected an int of 0 or more, got -1"),
        (lambda: prefix_lm(TABLE), "lengths: expected an array of 1 axes"),
        (lambda: softcap(0), "cap: expected a number above 0, got 0"),
        (lambda: softcap(float("nan")), "cap: expected a number above 0, got nan"),
        (lambda: alibi(0.5), "slopes: expected an array of 1 or 2 axes, got 0.5"),
        (lambda: relative_bias(TABLE[:, :4]), "table: expected an odd number of distances on its last axis, got 4"),
    ],
)
def test_wrong_values_are_named(make: Any, message: str) -> None:
    with pytest.raises(ExpressionError, match=message):
        make()
