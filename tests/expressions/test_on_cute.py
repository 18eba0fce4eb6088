"""Tests expressions in the CuTe DSL against numpy. The DSL compiles them for the CPU, so no GPU is needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
cutlass = pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
from cutlass.cute.runtime import from_dlpack

from attn_core import expressions
from attn_core.expressions import maximum, minimum, on_cute, trace_score, where
from attn_core.expressions.on_cute import CuteArray, evaluate_cute
from attn_core.expressions.on_numpy import block_indices, evaluate_numpy
from attn_core.expressions.rendering import lookups_inside
from attn_core.expressions.tree import OF_FLOATS

BATCH, HEADS, QUERIES, KEYS = 2, 3, 8, 11
RANDOM = np.random.default_rng(0)
AUX = (
    RANDOM.integers(-5, 50, 7).astype(np.int32),
    RANDOM.normal(size=(3, 9)).astype(np.float32),
    RANDOM.random(5) < 0.5,
    np.asarray(np.float32(0.3)),
)
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "lookups, by a negative index too": lambda s, b, h, q, k, a, f, o, c: where(o[k - 3], s, -s) * c + f[h, q - k + 3],
    "or, not, minimum, maximum, constants": lambda s, b, h, q, k, *_: where(
        (q % 3 == 1) | ~(k // 2 > b), minimum(s, 1.0), maximum(s / 3.0, -0.5)
    ),
    "abs, remainder, division": lambda s, b, h, q, k, a, f, o, c: abs(s) * abs(q - k) - (a[k - 9] % 4) / (a[q] + 0.5),
    "division of negatives": lambda s, b, h, q, k, a, f, o, c: where(
        (a[k] >= a[q]) == o[k], s * s, (q - k) // 3 * 1.0 + (q - k) % -3
    ),
    "a constant index": lambda s, b, h, q, k, a, f, o, c: where(~o[q] & (k < 4), f[b, -1], 2.0) * s,
    "lookups that are always inside": lambda s, b, h, q, k, a, f, o, c: (
        s * f[h, (q - k + 11) // 3] + where(o[q // 2], a[h + b], a[h]) * c
    ),
    "shifts": lambda s, b, h, q, k, a, f, o, c: s + ((a[k] << h) - (a[q] >> 1) + (q - k >> a[k]) + (3 << a[q])) * 0.01,
    "constants alone": lambda s, b, h, q, k, *_: s * 0.0 + where(q < 0, 1.0, 2.0),
}


OF_ONE = {name: lambda s, *_, name=name: getattr(expressions, name)(s) for name in OF_FLOATS} | {
    "slopes": lambda s, *_: expressions.sigmoid(s * 90.0) * expressions.sigmoid(s * -90.0),
}
INSTRUCTIONS = {"ex2": "exp2", "lg2": "log2", "tanh": "tanh", "rcp": None}


def on_the_host(text: str, value: Any) -> Any:
    """A GPU's instruction, as a CPU computes it."""
    name = INSTRUCTIONS[text.partition(".")[0]]
    return getattr(cutlass.cute.math, name)(value) if name else cutlass.Float32(1.0) / value


@pytest.mark.parametrize("name", OF_ONE)
def test_functions_of_a_float_are_made_of_instructions(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_cute, "_instruction", on_the_host)
    tree = trace_score(OF_ONE[name]).tree
    scores = np.concatenate([RANDOM.normal(size=400) * scale for scale in (1e-5, 0.2, 1.0, 30.0, 1e4)])
    scores = scores[scores > -1] if "log" in name else scores[scores < 80]
    scores = (scores[scores > 0] if name == "log" else scores).astype(np.float32)
    got, cute = torch.zeros(scores.size), cutlass.cute

    @cute.jit
    def run(score, out):  # type: ignore[no-untyped-def]
        zero = cutlass.Int32(0)
        for place in cutlass.range(scores.size):
            out[place] = evaluate_cute(tree, (zero, zero, zero, zero), score[place])

    run(from_dlpack(torch.from_numpy(scores)), from_dlpack(got))
    expected = evaluate_numpy(tree, (0, 0, 0, 0), scores.astype(np.float64))
    # The argument of an exponential is rounded, too.
    sizes = 1 + np.minimum(abs(scores.astype(np.float64)), 100) * (name in ("exp", "exp2", "expm1", "sigmoid"))
    sizes = sizes + 200 * (name == "slopes")
    wrong = np.abs(got.numpy() - expected)
    # Near 1 a logarithm of the argument loses digits of its own.
    assert (wrong <= 2.0**-21 * sizes * np.abs(expected) + 2.0**-126 + 2.0**-22 * (name == "log")).all()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_values(name: str) -> None:
    cute = cutlass.cute
    tree = trace_score(FUNCTIONS[name], AUX).tree
    scores = RANDOM.normal(size=(BATCH, HEADS, QUERIES, KEYS)).astype(np.float32)
    expected = evaluate_numpy(tree, block_indices(BATCH, HEADS, QUERIES, KEYS), scores, AUX)
    inside = lookups_inside(tree, (BATCH, HEADS, QUERIES, KEYS), tuple(array.shape for array in AUX))
    out = torch.zeros(scores.shape)

    @cute.jit
    def run(score, ints, floats, bools, one, out):  # type: ignore[no-untyped-def]
        arrays = (
            CuteArray(ints.iterator, tuple(ints.shape), "int"),
            CuteArray(floats.iterator, tuple(floats.shape), "float"),
            CuteArray(bools.iterator, tuple(bools.shape), "bool"),
            CuteArray(one.iterator, (), "float"),
        )
        for b in cutlass.range(BATCH):
            for h in cutlass.range(HEADS):
                for q in cutlass.range(QUERIES):
                    for k in cutlass.range(KEYS):
                        index = (cutlass.Int32(b), cutlass.Int32(h), cutlass.Int32(q), cutlass.Int32(k))
                        out[b, h, q, k] = evaluate_cute(tree, index, score[b, h, q, k], arrays, inside)

    tensors = [torch.from_numpy(array.reshape(array.shape or (1,))) for array in (scores, *AUX)]
    tensors[3] = tensors[3].view(torch.uint8)
    run(*(from_dlpack(tensor).mark_layout_dynamic() for tensor in tensors), from_dlpack(out))
    np.testing.assert_allclose(out.numpy(), expected, rtol=2e-6, atol=2e-6)
