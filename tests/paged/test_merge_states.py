"""Tests that the results of attention over parts of the keys merge into the result over all of them, with gradients."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from frameworks import BOTH, EVERYWHERE, TORCH, Framework, as_numpy
from hypothesis import given, settings
from hypothesis import strategies as st

import jax_frontend
import torch_frontend
from attn_core import DTypeError, SeqInfo, ShapeError, SpecError

pytestmark = pytest.mark.sampled

Parts = tuple[list[np.ndarray], list[np.ndarray]]


def in_float64(outs: Any, lses: Any) -> tuple[np.ndarray, np.ndarray]:
    """The definition, on numpy's float64."""
    scores = np.stack([np.asarray(lse, np.float64) for lse in lses])
    with np.errstate(divide="ignore", invalid="ignore"):
        lse = np.logaddexp.reduce(scores, 0)
        weights = np.nan_to_num(np.exp(scores - lse), nan=0.0)
    shares = np.swapaxes(weights, -1, -2)[..., None]
    values = np.stack([np.asarray(out, np.float64) for out in outs])
    return np.where(shares == 0, 0, shares * values).sum(0), lse


def merged(f: Framework, outs: Any, lses: Any, dtype: str = "float32") -> tuple[np.ndarray, np.ndarray]:
    """dtype: of the outs."""
    with f.as_default():
        out, lse = f.frontend.merge_states([f.array(each, dtype) for each in outs], [*map(f.array, lses)])
        assert out.dtype == getattr(f.namespace, dtype)
        assert f.name == "jax" or out.device.type == f.device
        return as_numpy(out), as_numpy(lse)


@st.composite
def parts(draw: Any) -> Parts:
    packed = draw(st.booleans())
    batch, rows, heads, dim = (2, 5, 3, 4)
    random = np.random.default_rng(draw(st.integers(0, 2**16)))
    shape, lse_shape = (
        ((rows, heads, dim), (heads, rows)) if packed else ((batch, rows, heads, dim), (batch, heads, rows))
    )
    outs, lses = [], []
    for _ in range(draw(st.integers(1, 5))):
        out = random.standard_normal(shape).astype(np.float32)
        lse = (draw(st.sampled_from((0.1, 10.0, 300.0))) * random.standard_normal(lse_shape)).astype(np.float32)
        empty = random.random(lse_shape) < draw(st.sampled_from((0.0, 0.4, 1.0)))
        lse[empty] = -np.inf
        out[np.swapaxes(empty, -1, -2)] = draw(st.sampled_from((0.0, np.nan)))
        outs, lses = [*outs, out], [*lses, lse]
    return outs, lses


def is_right(actual: tuple[np.ndarray, np.ndarray], outs: Any, lses: Any) -> bool:
    expected, expected_lse = in_float64(outs, lses)
    sizes = in_float64([abs(out) for out in outs], lses)[0]
    # exp of a difference of two numbers up to 1000 loses their rounding: 1000 * 2**-24
    finite = np.nan_to_num(np.stack(lses), neginf=0.0)
    slack = 2.0**-20 + 4 * abs(finite).max(initial=0) * 2.0**-24
    close = (abs(actual[0] - expected) <= slack * sizes + 1e-30).all()
    with np.errstate(invalid="ignore"):
        near = abs(actual[1] - expected_lse) <= 2.0**-21 * np.maximum(1, abs(expected_lse))
    return bool(close and (near | (actual[1] == expected_lse)).all())


@pytest.mark.parametrize("f", BOTH, ids=str)
@settings(max_examples=60)
@given(parts())
def test_any_parts_merge_as_the_definition_says(f: Framework, each: Parts) -> None:
    assert is_right(merged(f, *each), *each)


@pytest.mark.parametrize("f", BOTH, ids=str)
def test_a_part_without_keys_changes_no_bit(f: Framework) -> None:
    random = np.random.default_rng(0)
    out, lse = random.standard_normal((2, 5, 3, 4), np.float32), random.standard_normal((2, 3, 5), np.float32)
    nothing = np.full_like(out, np.nan), np.full_like(lse, -np.inf)
    for outs, lses in (([out], [lse]), ([out, nothing[0]], [lse, nothing[1]]), ([nothing[0], out], [nothing[1], lse])):
        actual = merged(f, outs, lses)
        np.testing.assert_array_equal(actual[0], out)
        np.testing.assert_array_equal(actual[1], lse)
    empty = merged(f, [nothing[0]] * 2, [nothing[1]] * 2)
    assert not empty[0].any() and (empty[1] == -np.inf).all()


@pytest.mark.parametrize("f", EVERYWHERE, ids=str)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_parts_of_a_device(dtype: str, packed: bool, f: Framework) -> None:
    """On a GPU torch merges with a Triton kernel: many rows, a width that is no power of two, and empty parts."""
    random = np.random.default_rng(4)
    lead, rows, heads, dim = (() if packed else (2,)), 301, 5, 72
    outs, lses = [], []
    for number in range(3):
        out = random.standard_normal((*lead, rows, heads, dim)).astype(np.float32)
        lse = 10 * random.standard_normal((*lead, heads, rows)).astype(np.float32)
        lse[..., number::7] = -np.inf
        out[np.swapaxes(lse, -1, -2) == -np.inf] = np.nan
        outs, lses = [*outs, torch.from_numpy(out).to(getattr(torch, dtype)).float().numpy()], [*lses, lse]
    out, lse = merged(f, outs, lses, dtype)
    if dtype == "float32":
        assert is_right((out, lse), outs, lses)
        return
    expected, expected_lse = in_float64(outs, lses)
    np.testing.assert_allclose(out, expected, rtol=2.0**-7, atol=2.0**-7)
    np.testing.assert_allclose(lse, expected_lse, rtol=2.0**-20, atol=2.0**-20)


@pytest.mark.parametrize("fault", ["base 2", "lse of another head", "mean"])
def test_planted_faults_are_seen(fault: str) -> None:
    random = np.random.default_rng(0)
    outs = [random.standard_normal((5, 3, 4), np.float32) for _ in range(2)]
    lses = [random.standard_normal((3, 5), np.float32) for _ in range(2)]
    wrong = {
        "base 2": (outs, [lse / np.float32(np.log(2)) for lse in lses]),
        "lse of another head": (outs, [lse[::-1].copy() for lse in lses]),
        "mean": (outs, [np.zeros_like(lse) for lse in lses]),
    }[fault]
    assert not is_right(merged(TORCH, *wrong), outs, lses)


# With attention


def test_a_shared_prefix_and_each_suffix_are_the_whole_row() -> None:
    torch.manual_seed(0)
    prefix, q = torch.randn(2, 23, 2, 8), torch.randn(3, 5, 4, 8)
    suffix = torch.randn(2, 3, 7, 2, 8)
    rows = [torch.cat((prefix[side].expand(3, -1, -1, -1), suffix[side]), 1) for side in (0, 1)]
    expected = torch_frontend.attention(q, *rows, causal=True, return_lse=True)
    # all queries see all of the prefix, so it is one call without a batch: its keys are read once
    once, once_lse = torch_frontend.attention(q.reshape(1, 15, 4, 8), *(each[None] for each in prefix), return_lse=True)
    once, once_lse = once.view(3, 5, 4, 8), once_lse.view(4, 3, 5).transpose(0, 1)
    own = torch_frontend.attention(q, *suffix, causal=True, return_lse=True)
    actual = torch_frontend.merge_states([once, own[0]], [once_lse, own[1]])
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    in_jax = jax_frontend.merge_states(
        [jnp.asarray(once.numpy()), jnp.asarray(own[0].numpy())],
        [jnp.asarray(once_lse.numpy()), jnp.asarray(own[1].numpy())],
    )
    np.testing.assert_allclose(in_jax[0], expected[0].numpy(), rtol=1e-5, atol=1e-5)


def test_gradients_are_those_of_the_whole_call_in_torch() -> None:
    q = torch.randn(5, 4, 8, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(9, 2, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))

    def packed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        info = SeqInfo.from_lengths([len(q)], [len(k)])
        return torch_frontend.attention(q, k, v, seq_info=info, return_lse=True)

    def loss(out: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
        return (out * torch.arange(8)).sin().sum() + lse.square().sum()

    expected = torch.autograd.grad(loss(*packed(q, k, v)), (q, k, v))
    halves = [packed(q, k[:4], v[:4]), packed(q, k[4:], v[4:])]
    actual = torch.autograd.grad(loss(*torch_frontend.merge_states(*zip(*halves, strict=True))), (q, k, v))
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other)


def gradient_case() -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Parts of which some see nothing, with rows that no part sees."""
    random = np.random.default_rng(0)
    outs = [random.standard_normal((5, 3, 4)) for _ in range(3)]
    lses = [random.standard_normal((3, 5)) for _ in range(3)]
    for number, lse in enumerate(lses):
        lse[number] = -np.inf
        lse[:, 4] = -np.inf
    return outs, lses


def test_gradients_beside_empty_parts() -> None:
    outs, lses = gradient_case()
    tensors = [torch.tensor(each, requires_grad=True) for each in (*outs, *lses)]
    out, lse = torch_frontend.merge_states(tensors[:3], tensors[3:])
    loss = out.sin().sum() + torch.where(lse == -torch.inf, 0, lse).square().sum()
    gradients = torch.autograd.grad(loss, tensors)
    assert all(gradient.isfinite().all() for gradient in gradients)

    def in_jax(*arrays: Any) -> Any:
        out, lse = jax_frontend.merge_states(arrays[:3], arrays[3:])
        return jnp.sin(out).sum() + jnp.square(jnp.where(lse == -jnp.inf, 0, lse)).sum()

    with jax.enable_x64(True):
        others = jax.jit(jax.grad(in_jax, argnums=tuple(range(6))))(*map(jnp.asarray, (*outs, *lses)))
    for one, other in zip(gradients, others, strict=True):
        np.testing.assert_allclose(one.numpy(), other, rtol=1e-9, atol=1e-12)
    # finite differences of the definition, where there are keys
    step, at = 1e-6, (1, 2)
    for number in (0, 2):
        moved = [each.copy() for each in lses]
        moved[number][at] += step
        both = [in_float64(outs, each) for each in (moved, lses)]
        with np.errstate(invalid="ignore"):
            losses = [np.sin(o).sum() + np.square(np.where(e == -np.inf, 0, e)).sum() for o, e in both]
        assert abs((losses[0] - losses[1]) / step - float(gradients[3 + number][at])) < 1e-4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_stacked_parts_and_transforms(dtype: str) -> None:
    outs, lses = torch.randn(3, 2, 5, 4, 8).to(getattr(torch, dtype)), torch.randn(3, 2, 4, 5)
    expected = torch_frontend.merge_states(list(outs), tuple(lses))
    compiled = torch.compile(torch_frontend.merge_states, fullgraph=True, backend="eager")
    mapped = torch.func.vmap(torch_frontend.merge_states, in_dims=(1, 1))  # packed, one of a batch at a time
    for run in (torch_frontend.merge_states, compiled, mapped):
        for one, other in zip(run(outs, lses), expected, strict=True):
            assert one.dtype is other.dtype
            torch.testing.assert_close(one, other)


def test_transforms_of_jax() -> None:
    outs, lses = (
        np.random.default_rng(0).standard_normal((3, 2, 5, 4, 8), np.float32),
        np.zeros((3, 2, 4, 5), np.float32),
    )
    expected = jax_frontend.merge_states(list(map(jnp.asarray, outs)), list(map(jnp.asarray, lses)))
    mapped = jax.vmap(jax_frontend.merge_states, in_axes=(1, 1))  # packed, one of a batch at a time
    for run in (jax.jit(jax_frontend.merge_states), mapped):
        for one, other in zip(run(jnp.asarray(outs), jnp.asarray(lses)), expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6)


BAD: dict[str, tuple[Any, Any, type[Exception], str]] = {
    "no part": ([], [], SpecError, "outs: expected one part or more"),
    "fewer lses": ([(5, 3, 4)] * 2, [(3, 5)], SpecError, "lses: expected as many parts as outs, 2, got 1"),
    "another shape": ([(5, 3, 4), (5, 3, 8)], [(3, 5)] * 2, ShapeError, r"outs\[1\]: expected the shape of outs\[0\]"),
    "lse as out": (
        [(5, 3, 4)],
        [(5, 3)],
        ShapeError,
        r"lses\[0\]: expected .*\[heads, tokens\], \[3, 5\], got \[5, 3\]",
    ),
    "dense and packed": ([(2, 5, 3, 4)], [(3, 5)], ShapeError, r"lses\[0\]: expected .* \[2, 3, 5\], got \[3, 5\]"),
    "two axes": ([(5, 4)], [(5,)], ShapeError, r"outs\[0\]: expected \[batch, q_len, heads, value_dim\]"),
    "one array of three axes": (
        (5, 3, 4),
        (3, 5),
        ShapeError,
        "outs: expected a list of parts, or one array of 4 or 5",
    ),
    "numbers": ([1.0], [2.0], TypeError, r"outs\[0\]: expected a"),
    "nothing": (None, None, TypeError, "outs: expected a"),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("f", BOTH, ids=str)
def test_bad_input_is_one_clear_error(f: Framework, name: str) -> None:
    def make(shape: Any) -> Any:
        if isinstance(shape, list):
            return list(map(make, shape))
        return f.zeros(*shape) if isinstance(shape, tuple) else shape

    outs, lses, kind, text = BAD[name]
    with pytest.raises(kind, match=text):
        f.frontend.merge_states(make(outs), make(lses))


def test_bad_dtypes_are_refused() -> None:
    out, lse = torch.zeros(5, 3, 4), torch.zeros(3, 5)
    with pytest.raises(DTypeError, match=r"lses\[0\]: expected float32 or float64, got float16"):
        torch_frontend.merge_states([out], [lse.half()])
    with pytest.raises(DTypeError, match=r"outs\[1\]: expected the dtype of outs\[0\], float32, got float16"):
        torch_frontend.merge_states([out, out.half()], [lse, lse])
    with pytest.raises(DTypeError, match=r"outs\[0\]: expected one of float64"):
        torch_frontend.merge_states([out.int()], [lse])
