"""Tests expressions where frameworks run them: FlexAttention, torch.compile, jax.jit, vmap, and on scalars."""

from __future__ import annotations

import math
import operator
from typing import Any

import expression_trees as trees
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attn_core.expressions import (
    Aux,
    Expression,
    Vocabulary,
    alibi,
    and_masks,
    block_indices,
    causal,
    compose_scores,
    documents,
    evaluate,
    evaluate_jax,
    evaluate_numpy,
    evaluate_torch,
    relative_bias,
    softcap,
    torch_mask_mod,
    torch_score_mod,
    trace_mask,
    trace_score,
    where,
)

torch = pytest.importorskip("torch")
LENGTH = 20
IDS = np.repeat(np.arange(4), 5)
TABLE = np.random.default_rng(2).normal(size=(2, 7)).astype(np.float32)
MASK = trace_mask(and_masks(causal(), documents(IDS)))
SCORE = trace_score(compose_scores(softcap(4.0), alibi(np.array([0.5, 0.25], np.float32)), relative_bias(TABLE)))


def tensors(arrays: Any) -> list[Any]:
    return [torch.from_numpy(np.array(array)) for array in arrays]


def attention_by_numpy(q: Any, k: Any, v: Any) -> np.ndarray:
    """float64 attention with MASK and SCORE on ``[batch, heads, q, head_dim]``."""
    q, k, v = (x.detach().numpy().astype(np.float64) for x in (q, k, v))
    indices = block_indices(1, 2, LENGTH, LENGTH)
    score = evaluate_numpy(SCORE.tree, indices, q @ k.swapaxes(-1, -2) / 4, SCORE.captured)
    seen = evaluate_numpy(MASK.tree, indices, aux=MASK.captured)
    weights = np.where(seen, np.exp(score), 0.0)
    return weights / weights.sum(-1, keepdims=True) @ v


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_runs_them(compiled: bool) -> None:
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, LENGTH, 16, device="cpu").unbind()
    mask_mod = torch_mask_mod(MASK.tree, tensors(MASK.captured))
    block_mask = flex.create_block_mask(mask_mod, 1, 2, LENGTH, LENGTH, device="cpu")
    score_mod = torch_score_mod(SCORE.tree, tensors(SCORE.captured))
    call = torch.compile(flex.flex_attention, fullgraph=True) if compiled else flex.flex_attention
    with torch.no_grad():
        out = call(q, k, v, score_mod=score_mod, block_mask=block_mask)
    assert np.abs(out.numpy() - attention_by_numpy(q, k, v)).max() < 2e-6


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_a_mask_of_flex_attention_keeps_its_meaning() -> None:
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    doc_id = torch.from_numpy(IDS)

    def document_causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        same = doc_id[q_idx] == doc_id[kv_idx]
        return torch.where(h == 0, same & (q_idx >= kv_idx), torch.abs(q_idx - kv_idx) < 3)

    traced = trace_mask(document_causal)
    expected = flex.create_mask(document_causal, 1, 2, LENGTH, LENGTH, device="cpu").numpy()
    aux = [each.numpy() for each in traced.captured]
    assert np.array_equal(evaluate_numpy(traced.tree, block_indices(1, 2, LENGTH, LENGTH), aux=aux), expected)


def test_torch_compile_follows_them_without_a_break() -> None:
    indices, aux = tensors(block_indices(1, 2, LENGTH, LENGTH)), tensors(SCORE.captured)
    score_mod = torch_score_mod(SCORE.tree, aux)
    score = torch.linspace(-9, 9, LENGTH * LENGTH, dtype=torch.float64, device="cpu").reshape(1, 1, LENGTH, LENGTH)
    compiled = torch.compile(lambda x: score_mod(x, *indices), backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(score), evaluate_torch(SCORE.tree, indices, score, aux))


def test_aux_arrays_have_gradients() -> None:
    jax = pytest.importorskip("jax")
    indices = block_indices(1, 2, LENGTH, LENGTH)
    score = np.random.default_rng(3).normal(size=(1, 2, LENGTH, LENGTH)).astype(np.float32)
    weights = np.random.default_rng(4).normal(size=score.shape).astype(np.float32)
    slopes, table = tensors(SCORE.captured)
    table.requires_grad_()
    (
        evaluate_torch(SCORE.tree, tensors(indices), *tensors([score]), [slopes, table]) * tensors([weights])[0]
    ).sum().backward()

    def total(bias: Any) -> Any:
        return (evaluate_jax(SCORE.tree, indices, score, [SCORE.captured[0], bias]) * weights).sum()

    expected = np.zeros(TABLE.shape)
    _, h, q, k = np.broadcast_arrays(*indices)
    np.add.at(expected, (h, np.clip(k - q, -3, 3) + 3), weights.astype(np.float64))
    for got in (table.grad.numpy(), np.asarray(jax.jit(jax.grad(total))(TABLE))):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


def test_jit_and_vmap_of_jax_run_them() -> None:
    jax = pytest.importorskip("jax")
    indices = block_indices(2, 3, 5, 7)
    score = np.random.default_rng(3).normal(size=(2, 3, 5, 7)).astype(np.float32)
    slopes = np.array([0.5, 0.25, 0.125], np.float32)
    tree = trace_score(alibi(slopes)).tree
    whole = jax.jit(lambda x, s: evaluate_jax(tree, indices, x, [s]))(score, slopes)
    by_row = jax.vmap(lambda b, x: evaluate_jax(tree, (b, *(i[0] for i in indices[1:])), x, [slopes]))
    expected = evaluate_numpy(tree, indices, score, [slopes])
    for got in (whole, by_row(np.arange(2, dtype=np.int32), score)):
        np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-6)


BY_ROW = trace_mask(
    lambda b, h, q, k, ids: (ids[b, q] == ids[b, k]) & (ids[b, q - k] > -3) & (ids[0, 1] < 9), [Aux((2, 5), "int32")]
).tree
ROWS = np.array([[0, 0, 1, 1, 1], [0, 1, 2, 2, 2]], np.int32)


def test_jax_export_leaves_the_length_of_an_aux_array_open() -> None:
    jax = pytest.importorskip("jax")
    jnp = jax.numpy

    def mask(ids: Any) -> Any:
        length = ids.shape[1]
        q, k = jnp.arange(length)[None, None, :, None], jnp.arange(length)[None, None, None, :]
        return evaluate_jax(BY_ROW, (jnp.arange(2)[:, None, None, None], jnp.int32(0), q, k), None, [ids])

    (length,) = jax.export.symbolic_shape("n")
    exported = jax.export.export(jax.jit(mask))(jax.ShapeDtypeStruct((2, length), jnp.int32))
    for rows in (ROWS, np.tile(ROWS, 2)):
        expected = evaluate_numpy(BY_ROW, block_indices(2, 1, rows.shape[1], rows.shape[1]), aux=[rows])
        assert np.array_equal(exported.call(rows), expected)


def test_torch_compile_takes_aux_arrays_of_any_length() -> None:
    def mask(ids: Any) -> Any:
        b, h = torch.arange(2, device="cpu")[:, None, None, None], torch.zeros(1, dtype=torch.int32, device="cpu")
        places = torch.arange(ids.shape[1], device="cpu")
        return torch_mask_mod(BY_ROW, [ids])(b, h, places[None, None, :, None], places[None, None, None, :])

    torch_mask_mod(BY_ROW, ())  # makes the steps
    compiled = torch.compile(mask, backend="aot_eager", fullgraph=True, dynamic=True)
    for rows in (ROWS, np.tile(ROWS, 2)):
        expected = evaluate_numpy(BY_ROW, block_indices(2, 1, rows.shape[1], rows.shape[1]), aux=[rows])
        assert np.array_equal(compiled(torch.from_numpy(rows)).numpy(), expected)


def on_scalars(tree: Expression, place: tuple[int, ...], score: float, aux: Any) -> Any:
    """One element with Python's own numbers, as a kernel would compute it with its registers."""

    def wrapped(value: Any) -> Any:
        is_int = isinstance(value, int) and not isinstance(value, bool)
        return (value + 2**31) % 2**32 - 2**31 if is_int else value

    operators = ("add", "subtract", "multiply", "divide", "floor_divide", "remainder", "negative", *trees.SHIFTS)
    names = ("add", "sub", "mul", "truediv", "floordiv", "mod", "neg", "lshift", "rshift")
    python = dict(zip(operators, names, strict=True))
    functions: dict[str, Any] = {
        op: lambda *values, name=name: wrapped(getattr(operator, name)(*values)) for op, name in python.items()
    }
    functions |= {"less": operator.lt, "less_equal": operator.le, "equal": operator.eq}
    functions |= {"and": operator.and_, "or": operator.or_, "not": operator.not_}
    functions |= {"abs": lambda x: wrapped(abs(x)), "minimum": min, "maximum": max, "exp": math.exp, "tanh": math.tanh}
    functions["where"] = lambda condition, a, b: a if condition else b
    casts = {"int": int, "float": float}
    words = Vocabulary(
        functions=functions,
        constant=lambda value, kind: value,
        cast=lambda value, kind: casts[kind](value),
        read=lambda array, indices: array[tuple(indices)].item(),
    )
    return evaluate(tree, words, place, score, aux)


@settings(max_examples=60)
@given(tree=st.sampled_from(["bool", "int"]).flatmap(lambda kind: trees.exact(kind, 3)))
def test_a_vocabulary_of_scalars_gives_the_same(tree: Expression) -> None:
    indices, score, aux = trees.operands()
    expected = evaluate_numpy(tree, indices, score, aux)
    for place in ((0, 0, 0, 0), (1, 2, 4, 6), (0, 1, 3, 2), (1, 0, 1, 5)):
        assert on_scalars(tree, place, float(score[place]), aux) == expected[place], tree


def test_constants_of_kernels_in_base_2() -> None:
    """Times log2(e) the lowest float would be -inf, which hides."""
    from attn_core.expressions.on_torch import torch_function
    from attn_core.expressions.rendering import LARGEST

    lowest = float(np.finfo(np.float32).min)
    tree = trace_score(lambda s, b, h, q, k: where(q > k, s, where(q == k, lowest, -math.inf)), ()).tree
    places = [torch.tensor(n) for n in (0, 0, 1)]
    for base_2, expected in ((False, lowest), (True, -LARGEST)):
        function = torch_function(tree, base_2).function
        scores = [function(torch.tensor(0.5), *places, torch.tensor(k), ()) for k in (0, 1, 2)]
        assert [float(each) for each in scores] == [0.5, float(np.float32(expected)), -math.inf]
    assert np.isfinite(np.float32(LARGEST) * np.float32(math.log2(math.e)))
