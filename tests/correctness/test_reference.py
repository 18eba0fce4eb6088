"""Tests the reference against a triple loop, its gradients against finite differences, and its results in edge
cases."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle_cases import FEATURES, LENGTHS_K, LENGTHS_Q, Case, altered, fill, make
from spec_strategies import LEARNED, learned_call

from attn_core import AttentionSpec
from attn_core.call.arithmetic import dropout_keeps
from attn_core.call.functions import AUX, aux_of
from attn_core.call.tensors import Inputs
from attn_core.correctness import reference
from attn_core.expressions import Expression

SMALL = {"num_heads": 6, "head_dim": 3, "value_dim": 5}


def by_loops(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """(out, lse) for one query, one key, one channel at a time; shares only the dropout hash with the reference."""
    spec, inputs = case.spec, case.inputs
    out, lse = np.zeros(spec.out_shape), np.full(spec.lse_shape, -np.inf)
    for b, h, i in product(range(spec.batch), range(spec.num_heads), range(spec.q_len)):
        row = () if spec.packed else (b,)
        g = h // (spec.num_heads // spec.num_kv_heads)
        logits = {}
        for j in range(spec.kv_len):
            distance = distance_to_diagonal(case, i, j)
            if distance is not None and is_visible(case, b, h, i, j, distance):
                logit = logit_of(case, row, b, h, g, i, j, distance)
                logits |= {} if logit == -math.inf else {j: logit}
        sink = [inputs.sinks[h]] if spec.sinks else []
        if not logits and not sink:
            continue
        lse[(*row, h, i)] = total = math.log(sum(math.exp(logit) for logit in [*logits.values(), *sink]))
        for j, logit in logits.items():
            weight = math.exp(logit - total)
            if spec.dropout:
                weight *= dropout_keeps(inputs.rng.tolist(), (b, h, i, j), spec.dropout) / (1 - spec.dropout)
            for c in range(spec.value_dim):
                out[(*row, i, h, c)] += weight * inputs.v[(*row, j, g, c)]
    return out, lse


def distance_to_diagonal(case: Case, i: int, j: int) -> int | None:
    """How far key j is to the right of query i's diagonal; None in different documents."""
    lengths = [(case.spec.q_len, case.spec.kv_len)]
    if case.spec.packed:
        lengths = list(zip(np.diff(case.inputs.cu_seqlens_q), np.diff(case.inputs.cu_seqlens_k)))
    for q_len, kv_len in lengths:
        if i < q_len or j < kv_len:
            offset = kv_len - q_len if case.spec.alignment == "bottom_right" else 0
            return int(j - (i + offset)) if 0 <= i < q_len and 0 <= j < kv_len else None
        i, j = i - q_len, j - kv_len
    return None


def is_visible(case: Case, b: int, h: int, i: int, j: int, distance: int) -> bool:
    left, right = case.spec.window
    if case.spec.causal and distance > 0:
        return False
    if (left is not None and distance < -left) or (right is not None and distance > right):
        return False
    if case.inputs.key_ranges is not None:
        rows, heads = case.inputs.key_ranges.shape[:2]
        kv_head = h // (case.spec.num_heads // case.spec.num_kv_heads)
        ranges = case.inputs.key_ranges[b if rows > 1 else 0, kv_head if heads > 1 else 0, j].tolist()
        if not any(start <= i < stop for start, stop in ranges):
            return False
    if case.spec.mask_mod is not None and not value_of(case.spec.mask_mod, case, (b, h, i, j)):
        return False
    return case.inputs.mask is None or bool(broadcast_at(case.inputs.mask, b, h, i, j))


def logit_of(case: Case, row: tuple[int, ...], b: int, h: int, g: int, i: int, j: int, distance: int) -> float:
    spec, inputs = case.spec, case.inputs
    dot = sum(inputs.q[(*row, i, h, c)] * inputs.k[(*row, j, g, c)] for c in range(spec.head_dim))
    logit = spec.scale * dot
    if spec.softcap is not None:
        logit = spec.softcap * math.tanh(logit / spec.softcap)
    if spec.score_mod is not None:
        logit = value_of(spec.score_mod, case, (b, h, i, j), logit)
    if inputs.bias is not None:
        logit += broadcast_at(inputs.bias, b, h, i, j)
    if inputs.alibi_slopes is not None:
        slopes = inputs.alibi_slopes
        logit -= (slopes[h] if slopes.ndim == 1 else slopes[b, h]) * abs(distance)
    return logit


def value_of(tree: Expression, case: Case, place: tuple[int, int, int, int], score: float = 0.0) -> Any:
    """The value of an expression in Python's own numbers."""
    leaves, aux = dict(zip("bhqk", place, strict=True)) | {"score": score}, aux_of(case.inputs)
    operations: dict[str, Any] = {"add": operator.add, "multiply": operator.mul, "divide": operator.truediv}
    operations |= {"remainder": operator.mod, "shift_right": operator.rshift, "log1p": math.log1p, "expm1": math.expm1}
    operations |= {"exp2": lambda x: 2.0**x, "sigmoid": lambda x: 1.0 / (1.0 + math.exp(-x)), "log": math.log}
    operations |= {"subtract": operator.sub, "less": operator.lt, "less_equal": operator.le, "equal": operator.eq}
    operations |= {"negative": operator.neg, "abs": abs, "tanh": math.tanh, "exp": math.exp, "to_float": float}
    operations |= {"and": lambda x, y: x and y, "or": lambda x, y: x or y, "not": operator.not_}
    operations |= {"where": lambda x, y, z: y if x else z}
    values: list[Any] = []
    for op, _, value, operands in tree.rows:
        given = [values[operand] for operand in operands]
        if op == "constant":
            values.append(value)
        elif op == "lookup":
            array = aux[value]
            values.append(array[tuple(min(at, size - 1) for at, size in zip(given, array.shape, strict=True))])
        else:
            values.append(leaves[op] if op in leaves else operations[op](*given))
    return values[-1]


def broadcast_at(array: np.ndarray, *index: int):
    return array[tuple(at if size > 1 else 0 for at, size in zip(index, array.shape))]


def assert_same(case: Case) -> None:
    out, lse = reference.forward(case.spec, case.inputs)
    expected_out, expected_lse = by_loops(case)
    assert out.shape == case.spec.out_shape
    assert lse.shape == case.spec.lse_shape
    assert out.dtype == lse.dtype == np.float64
    np.testing.assert_allclose(out, expected_out, rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", FEATURES)
def test_forward_matches_loops(name):
    assert_same(make({**SMALL, **smaller(FEATURES[name])}))


def smaller(features: dict) -> dict:
    """The features with shapes for SMALL's 6 heads in place of 9."""
    shapes = {
        key: tuple(6 if n == 9 else n for n in value) for key, value in features.items() if key.endswith("_shape")
    }
    return {**features, **shapes}


@st.composite
def cases(draw) -> Case:
    group, kv_heads, packed = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 2])), draw(st.booleans())
    heads, batch = group * kv_heads, 1 if packed else draw(st.sampled_from([1, 2]))
    documents = draw(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=3))
    if packed:
        q_len, kv_len = (sum(lengths) for lengths in zip(*documents))
    else:
        q_len, kv_len = draw(st.integers(0, 5)), draw(st.integers(0, 5))
    four = st.one_of(st.none(), st.tuples(*(st.sampled_from(sorted({1, n})) for n in (batch, heads, q_len, kv_len))))
    distance = st.one_of(st.none(), st.integers(0, 4))
    spec = AttentionSpec(
        **{"batch": batch, "q_len": q_len, "kv_len": kv_len, "num_heads": heads, "num_kv_heads": kv_heads},
        **{
            "head_dim": draw(st.sampled_from([1, 2, 3])),
            "value_dim": draw(st.sampled_from([1, 2])),
            "dtype": "float64",
        },
        causal=draw(st.booleans()),
        alignment=draw(st.sampled_from(["bottom_right", "top_left"])),
        window=(draw(distance), draw(distance)),
        softcap=draw(st.sampled_from([None, 0.5, 20.0])),
        scale=draw(st.sampled_from([None, 0.3, 2.0])),
        mask_shape=draw(four),
        bias_shape=draw(four),
        alibi_shape=draw(st.sampled_from([None, (heads,), (batch, heads)])),
        sinks=draw(st.booleans()),
        documents=len(documents) if packed else None,
        dropout=draw(st.sampled_from([0.0, 0.5])),
    )
    return fill(spec, draw(st.integers(0, 99)), [q for q, _ in documents], [k for _, k in documents])


@settings(max_examples=60, deadline=None)
@given(cases())
def test_forward_matches_loops_in_any_combination(case):
    assert_same(case)


# Gradients


def learned_case(name: str, **options: Any) -> Case:
    """The case of a call whose score function reads arrays with gradients."""
    call = learned_call(name, **options)
    return Case(call.spec, call.inputs, call.dout, call.dlse)


def loss(case: Case, inputs: Inputs) -> float:
    out, lse = reference.forward(case.spec, inputs)
    return float((out * case.dout).sum() + (np.where(np.isfinite(lse), lse, 0.0) * case.dlse).sum())


ALL_OPTIONS = {"causal": True, "softcap": 2.0, "sinks": True, "bias_shape": (1, 4, 7, 7), "bias_gradient": True}
DIFFERENTIATED: dict[str, Callable[[], Case]] = {
    **{name: partial(make, features, seed=1) for name, features in FEATURES.items()},
    **{f"{name}, learned": partial(learned_case, name) for name in LEARNED},
    **{f"{name}, learned, with options": partial(learned_case, name, **ALL_OPTIONS) for name in LEARNED},
}


@pytest.mark.parametrize("name", DIFFERENTIATED)
def test_backward_matches_finite_differences(name):
    case = DIFFERENTIATED[name]()
    out, lse = reference.forward(case.spec, case.inputs)
    gradients = reference.backward(case.spec, case.inputs, out, lse, case.dout, case.dlse)
    random = np.random.default_rng(2)
    for source in ("q", "k", "v", "bias", "sinks", *(AUX[number] for number in case.spec.aux_gradients)):
        value, gradient = getattr(case.inputs, source), getattr(gradients, f"d{source}")
        assert (gradient is None) == (value is None)
        if value is None:
            continue
        assert gradient.shape == value.shape
        for _ in range(3):
            direction, step = random.normal(size=value.shape), 1e-5
            ahead, behind = (
                loss(case, case.inputs._replace(**{source: value + sign * step * direction})) for sign in (1, -1)
            )
            np.testing.assert_allclose(
                (gradient * direction).sum(), (ahead - behind) / (2 * step), rtol=1e-6, atol=1e-7
            )


def test_every_single_gradient_of_a_tiny_call():
    tiny = {"batch": 1, "q_len": 2, "kv_len": 3, "num_heads": 4, "num_kv_heads": 2, "head_dim": 2, "value_dim": 1}
    case = make(
        {**tiny, "causal": True, "softcap": 0.8, "sinks": True, "bias_shape": (1, 4, 1, 3), "bias_gradient": True}
    )
    out, lse = reference.forward(case.spec, case.inputs)
    gradients = reference.backward(case.spec, case.inputs, out, lse, case.dout, case.dlse)
    for source, gradient in zip(("q", "k", "v", "bias", "sinks"), gradients[:5], strict=True):
        for index in np.ndindex(gradient.shape):
            values = []
            for step in (1e-6, -1e-6):
                moved = getattr(case.inputs, source).copy()
                moved[index] += step
                values.append(loss(case, case.inputs._replace(**{source: moved})))
            assert gradient[index] == pytest.approx((values[0] - values[1]) / 2e-6, rel=1e-5, abs=1e-8)


def test_no_gradient_of_the_lse_means_a_zero_gradient():
    case = make({})
    out, lse = reference.forward(case.spec, case.inputs)
    without = reference.backward(case.spec, case.inputs, out, lse, case.dout)
    zero = reference.backward(case.spec, case.inputs, out, lse, case.dout, np.zeros(lse.shape))
    assert all(np.array_equal(a, b) for a, b in zip(without[:3], zero[:3]))


# Edge cases


@pytest.mark.parametrize("sinks", [False, True])
def test_a_row_without_keys(sinks):
    case = make({"causal": True, "q_len": 7, "kv_len": 5, "sinks": sinks})
    out, lse = reference.forward(case.spec, case.inputs)
    assert (out[:, :2] == 0).all() and (out[:, 2:] != 0).all()
    alone = case.inputs.sinks[:, None] if sinks else -np.inf
    assert (lse[..., :2] == alone).all() and np.isfinite(lse[..., 2:]).all()
    gradients = reference.backward(case.spec, case.inputs, out, lse, case.dout, case.dlse)
    assert (gradients.dq[:, :2] == 0).all()
    assert all(np.isfinite(gradient).all() for gradient in gradients if gradient is not None)
    other = case.dout.copy(), case.dlse.copy()
    other[0][:, :2], other[1][..., :2] = np.nan, 1e3  # the gradient of such a row goes to its sink, if it has one
    again = reference.backward(case.spec, case.inputs, out, lse, *other)
    for before, after in zip(gradients[1:4], again[1:4]):
        assert (before is None and after is None) or np.array_equal(before, after)
    if sinks:
        more = (other[1] - case.dlse).sum((0, 2))  # of dlse alone, with weight 1
        np.testing.assert_allclose(again.dsinks - gradients.dsinks, more, rtol=1e-12)


@pytest.mark.parametrize("zero", [{"batch": 0}, {"q_len": 0}, {"kv_len": 0}, {"q_len": 0, "kv_len": 0}])
@pytest.mark.parametrize("extra", [{}, {"causal": True, "sinks": True}, {"window": (1, 1), "alibi_shape": (9,)}])
def test_zero_sizes_are_defined(zero, extra):
    case = make({**zero, **extra})
    out, lse = reference.forward(case.spec, case.inputs)
    assert out.shape == case.spec.out_shape and (out == 0).all()
    alone = case.inputs.sinks[:, None] if case.spec.sinks else -np.inf
    assert lse.shape == case.spec.lse_shape and (lse == alone).all()
    gradients = reference.backward(case.spec, case.inputs, out, lse, case.dout, case.dlse)
    for name, gradient in zip(("q", "k", "v"), gradients):
        assert gradient.shape == getattr(case.inputs, name).shape and (gradient == 0).all()


# NaN and Inf


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_nan_in_a_document_leaves_the_others_bit_identical(poison):
    case = make({**FEATURES["packed"], "bias_shape": (1, 9, 12, 14), "bias_gradient": True})
    stop_q, stop_k = LENGTHS_Q[0], LENGTHS_K[0]
    clean, dirty = results(case), results(poisoned(case, poison, slice(0, stop_q), slice(0, stop_k)))
    assert not np.isfinite(dirty["out"][:stop_q]).any()
    for name, start in {"out": stop_q, "dq": stop_q, "dk": stop_k, "dv": stop_k}.items():
        assert np.array_equal(clean[name][start:], dirty[name][start:]), name
    assert np.array_equal(clean["lse"][:, stop_q:], dirty["lse"][:, stop_q:])
    assert np.array_equal(clean["dbias"][..., stop_q:, :], dirty["dbias"][..., stop_q:, :])


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_nan_in_a_batch_row_leaves_the_others_bit_identical(poison):
    case = make({"causal": True})
    clean, dirty = results(case), results(poisoned(case, poison, 0, 0))
    assert all(np.array_equal(clean[name][1], dirty[name][1]) for name in clean)


def test_nan_in_a_query_stays_in_its_row():
    case = make({})
    q = case.inputs.q.copy()
    q[1, 3] = np.nan
    clean, dirty = results(case), results(case._replace(inputs=case.inputs._replace(q=q)))
    for name in ("out", "dq"):
        assert np.isnan(dirty[name][1, 3]).all()
        assert np.array_equal(np.delete(clean[name][1], 3, 0), np.delete(dirty[name][1], 3, 0))
        assert np.array_equal(clean[name][0], dirty[name][0])


@pytest.mark.parametrize("hidden_by", ["causal", "mask", "bias"])
def test_a_hidden_key_is_never_read(hidden_by):
    fields = {"causal": {"causal": True}, "mask": {"mask_shape": (1, 1, 1, 7)}, "bias": {"bias_shape": (1, 1, 1, 7)}}
    case = make(fields[hidden_by])
    rows = slice(0, 4) if hidden_by == "causal" else slice(0, 5)  # the last of 5 causal queries sees the last of 7 keys
    k, v, inputs = case.inputs.k.copy(), case.inputs.v.copy(), case.inputs
    k[:, -1], v[:, -1] = np.nan, np.nan
    if hidden_by == "mask":
        inputs = inputs._replace(mask=np.arange(7)[None, None, None] < 6)
    if hidden_by == "bias":
        inputs = inputs._replace(bias=np.where(np.arange(7) < 6, 0.0, -np.inf)[None, None, None])
    clean, _ = reference.forward(case.spec, inputs)
    dirty, _ = reference.forward(case.spec, inputs._replace(k=k, v=v))
    assert np.array_equal(clean[:, rows], dirty[:, rows])


def results(case: Case) -> dict[str, np.ndarray]:
    out, lse = reference.forward(case.spec, case.inputs)
    gradients = reference.backward(case.spec, case.inputs, out, lse, case.dout, case.dlse)
    return {"out": out, "lse": lse, **{name: part for name, part in gradients._asdict().items() if part is not None}}


def poisoned(case: Case, poison: float, at_q, at_k) -> Case:
    q, k, v, dout = (array.copy() for array in (case.inputs.q, case.inputs.k, case.inputs.v, case.dout))
    q[at_q], k[at_k], v[at_k], dout[at_q] = poison, poison, poison, poison
    return case._replace(inputs=case.inputs._replace(q=q, k=k, v=v), dout=dout)


def test_a_non_finite_value_reaches_every_row_that_sees_it():
    case = make({"causal": True})
    v = case.inputs.v.copy()
    v[0, 4, 0, 2] = np.inf  # queries 2, 3 and 4 see it, in the heads that read kv head 0
    out, _ = reference.forward(case.spec, case.inputs._replace(v=v))
    expected = np.zeros(out.shape, bool)
    expected[0, 2:, :3, 2] = True
    assert np.array_equal(np.isnan(out), expected)


# Dropout, bias, dtypes


def test_dropout_drops_its_share_and_follows_the_seed():
    indices = tuple(np.ogrid[:2, :3, :101, :103])
    for rate in (0.1, 0.5, 0.9):
        kept = dropout_keeps((5, 7), indices, rate)
        assert kept.shape == (2, 3, 101, 103)
        assert kept.mean() == pytest.approx(1 - rate, abs=0.01)
        assert np.array_equal(kept, dropout_keeps((5 + 2**32, 7 - 2**32), indices, rate))  # only the low 32 bits count
        for other in ((6, 7), (5, 8)):
            agree = (kept == dropout_keeps(other, indices, rate)).mean()
            assert agree == pytest.approx(rate**2 + (1 - rate) ** 2, abs=0.02)
    assert dropout_keeps((5, 7), indices, 0.0).all()


def test_the_mean_over_dropout_seeds_equals_no_dropout():
    case = make({"dropout": 0.25})
    plain, lse = reference.forward(altered(case, dropout=0.0).spec, case.inputs)
    outs = []
    for seed in range(400):
        out, same_lse = reference.forward(case.spec, case.inputs._replace(rng=(seed, 0)))
        assert np.array_equal(lse, same_lse)
        outs.append(out)
    spread = np.std(outs, axis=0) / math.sqrt(len(outs))
    assert (abs(np.mean(outs, axis=0) - plain) < 5.5 * spread + 1e-12).all()


def test_a_bias_of_minus_infinity_hides_like_the_mask():
    case = make({"mask_shape": (2, 1, 5, 7), "bias_shape": (2, 1, 5, 7), "bias_gradient": True, "sinks": True})
    mask = case.inputs.mask.copy()
    mask[0, 0, 2] = False
    masked = case._replace(inputs=case.inputs._replace(mask=mask))
    biased = case._replace(
        inputs=case.inputs._replace(mask=np.ones_like(mask), bias=np.where(mask, case.inputs.bias, -np.inf))
    )
    for name, expected in results(masked).items():
        assert np.array_equal(results(biased)[name], expected), name


@pytest.mark.parametrize("kind", [np.float16, np.float32, ml_dtypes.bfloat16])
def test_inputs_of_any_float_dtype_are_read_exactly(kind):
    case = make(FEATURES["everything"])
    low = Inputs(
        *(part.astype(kind) if part is not None and part.dtype == np.float64 else part for part in case.inputs)
    )
    wide = Inputs(*(part.astype(np.float64) if part is not None and part.dtype == kind else part for part in low))
    for a, b in zip(reference.forward(case.spec, low), reference.forward(case.spec, wide), strict=True):
        assert a.dtype == np.float64 and np.array_equal(a, b)
