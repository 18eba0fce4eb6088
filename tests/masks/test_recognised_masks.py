"""Tests calls whose mask function says a band, chunks or documents: they show and compute what the function says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("jax")
from expression_trees import LEAVES
from frameworks import BOTH, Framework
from hypothesis import given
from hypothesis import strategies as st

from attn_core import AttentionSpec
from attn_core.call.arguments import ArrayFacts, Arrays, build_spec
from attn_core.call.masks import visible
from attn_core.call.options import Options, check_options
from attn_core.expressions.building import build, constant

HEADS, DIM = 2, 8


@st.composite
def banded_calls(draw: Any) -> dict[str, Any]:
    """Lengths, options and a mask function with terms about distances and others."""
    terms = []
    for _ in range(draw(st.integers(1, 3))):
        distance = build("subtract", LEAVES["q"], LEAVES["k"])
        distance = build("abs", distance) if draw(st.integers(0, 3)) == 0 else distance
        sides = [distance, constant(draw(st.integers(-4, 6)))]
        terms.append(build(draw(st.sampled_from(["less", "less_equal"])), *draw(st.permutations(sides))))
    if draw(st.booleans()):
        terms.append(build("less", LEAVES["k"], constant(4)))
    tree = terms[0]
    for term in terms[1:]:
        tree = build("and", tree, term)
    causal = draw(st.booleans())
    return {
        "lengths": (draw(st.integers(1, 7)), draw(st.integers(1, 7))),
        "mask_mod": tree,
        "causal": causal,
        "window": draw(st.sampled_from([(None, None), (None, None), (2, None), (1, 1), (None, 3)])),
        "alignment": draw(st.sampled_from(["bottom_right", "top_left"])),
        "slopes": draw(st.booleans()),
    }


@given(banded_calls())
def test_a_recognised_band_shows_the_pairs_of_the_function(call: dict[str, Any]) -> None:
    (q_len, kv_len), slopes = call.pop("lengths"), call.pop("slopes")
    q, k = (ArrayFacts((2, length, HEADS, DIM), "float32", "cpu") for length in (q_len, kv_len))
    arrays = Arrays(q, k, k, alibi_slopes=ArrayFacts((HEADS,), "float32", "cpu") if slopes else None)
    spec = build_spec(arrays, check_options(Options(**call)))
    fields: dict[str, Any] = {"batch": 2, "q_len": q_len, "kv_len": kv_len, "num_heads": HEADS, "num_kv_heads": HEADS}
    asked = AttentionSpec(**fields, head_dim=DIM, value_dim=DIM, dtype="float32", **call)
    pairs = visible(asked)
    np.testing.assert_array_equal(np.broadcast_to(visible(spec), pairs.shape), pairs, f"{asked} became {spec}")
    if slopes or call["causal"] or call["window"] != (None, None):
        assert spec.alignment == call["alignment"]  # the diagonal of slopes and of the caller's own band


CALLS: dict[str, tuple[Any, tuple[int, int], str]] = {
    "causal": (lambda b, h, q, k: q >= k, (7, 7), "a band, which runs as causal"),
    "causal from the first key": (lambda b, h, q, k: q >= k, (5, 7), "a band, which runs as causal"),
    "causal to the last key": (lambda b, h, q, k: q + 2 >= k, (5, 7), "a band, which runs as causal"),
    "a window": (lambda b, h, q, k: (q >= k) & (q - k < 3), (7, 7), "a band, which runs as window=(2, 0)"),
    "both sides": (lambda b, h, q, k: abs(q - k) <= 2, (7, 7), "a band, which runs as window=(2, 2)"),
    "a window that hides nothing": (lambda b, h, q, k: abs(q - k) <= 6, (7, 7), "a band, which runs as no mask"),
    "rows without a key": (lambda b, h, q, k: abs(q - k) <= 1, (7, 3), "a band, which runs as window=(1, 1)"),
    "causal and a prefix": (
        lambda b, h, q, k: (q >= k) & (k < 3),
        (7, 7),
        "a band, which runs as causal, and other terms, which stay a function",
    ),
    "earlier keys alone": (lambda b, h, q, k: k < q, (7, 7), ""),
    "an or": (lambda b, h, q, k: (q >= k) | (k < 3), (7, 7), ""),
}


def judged(framework: Framework, lengths: tuple[int, int], mask_mod: Any, dense: np.ndarray, **options: Any) -> None:
    """Compares out, lse and the gradients of a call with those of the plain kernel on the dense mask."""
    numbers = np.random.default_rng(3)
    shapes = {"q": (2, lengths[0], 4, DIM), "k": (2, lengths[1], 2, DIM), "v": (2, lengths[1], 2, DIM)}
    arrays = {each: numbers.standard_normal(shape).astype(np.float32) for each, shape in shapes.items()}
    downstream = [numbers.standard_normal(shape).astype(np.float32) for shape in (shapes["q"], (2, 4, lengths[0]))]

    def results(**mask: Any) -> list[np.ndarray]:
        def call(**given: Any) -> Any:
            return framework.frontend.attention(**given, return_lse=True, **mask)

        return framework.gradients(call, arrays, *downstream)

    plain = "math" if framework.name == "torch" else "jax_xla"
    expected = results(mask=framework.array(dense), backend=plain)
    for one, other in zip(results(mask_mod=mask_mod, **options), expected, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)


@pytest.mark.parametrize("framework", BOTH, ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_calls_compute_what_the_function_says(name: str, framework: Framework) -> None:
    mask_mod, lengths, words = CALLS[name]
    dense = np.broadcast_to(mask_mod(0, 0, np.arange(lengths[0])[:, None], np.arange(lengths[1])), lengths)
    judged(framework, lengths, mask_mod, dense)
    q, k = (framework.zeros(2, length, 4, DIM) for length in lengths)
    found = framework.frontend.explain(q, k, k, mask_mod=mask_mod)
    assert (found.mask_mod or "") == words
    assert not words or f"mask_mod: {words[:30]}" in str(found)
