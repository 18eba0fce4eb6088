"""Rotary embeddings of both frontends: against the float64 reference, bit for bit, and in planted faults."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
import jax.numpy as jnp
import rotary_reference as reference
from both_frontends import _numpy
from frameworks import BOTH, JAX_ON_GPU, Framework, jax_on
from hypothesis import given, settings
from hypothesis import strategies as st
from xla_compiler import as_users_have_it

import jax_frontend
import torch_frontend
from attn_core.errors import DTypeError, ShapeError, SpecError

pytestmark = pytest.mark.sampled

DTYPES = ("float32", "bfloat16", "float16")
UNITS = {"float64": 2.0**-53, "float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}


def draw(
    shape: tuple[int, ...] = (7, 3, 22),
    rotary_dim: int = 22,
    positions: int = 41,
    dtype: str = "float32",
    table: str = "float32",
    seed: int = 0,
) -> tuple[Any, Any, Any, np.ndarray]:
    """x, cos, sin and positions, as torch tensors and a numpy array."""
    random = np.random.default_rng(seed)
    angle = random.uniform(-9, 9, (positions, rotary_dim // 2))
    x = torch.tensor(random.standard_normal(shape)).to(getattr(torch, dtype))
    cos, sin = (torch.tensor(f(angle)).to(getattr(torch, table)) for f in (np.cos, np.sin))
    return x, cos, sin, random.integers(0, positions, shape[:-2]).astype(np.int32)


def in_jax(tensor: Any) -> Any:
    return jnp.asarray(_numpy(tensor.float())).astype(str(tensor.dtype).removeprefix("torch."))


def is_right(out: Any, x: Any, cos: Any, sin: Any, positions: np.ndarray, interleaved: bool) -> bool:
    """Whether every element is within the bound of the reference."""
    arrays = [_numpy(tensor.double()) for tensor in (x, cos, sin)]
    error = np.abs(_numpy(out.double()) - reference.rotate(*arrays, positions, interleaved))
    unit = UNITS[str(x.dtype).removeprefix("torch.")]
    return bool((error <= reference.bound(*arrays, positions, interleaved, unit)).all())


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_rotation(data: Any) -> None:
    dim = data.draw(st.integers(1, 40))
    rotary_dim = 2 * data.draw(st.integers(1, max(1, dim // 2))) if dim > 1 else 2
    leading = data.draw(st.lists(st.integers(1, 5), min_size=0, max_size=3))
    dtype, interleaved = data.draw(st.sampled_from(DTYPES)), data.draw(st.booleans())
    call = draw(
        (*leading, data.draw(st.integers(1, 3)), max(dim, 2)),
        rotary_dim,
        data.draw(st.integers(1, 30)),
        dtype,
        data.draw(st.sampled_from(("float32", dtype))),
        data.draw(st.integers(0, 99)),
    )
    x, cos, sin, positions = call
    out = torch_frontend.apply_rotary(x, cos, sin, positions=positions, interleaved=interleaved)
    assert out.dtype == x.dtype and out.shape == x.shape
    assert is_right(out, *call, interleaved)
    arrays = [in_jax(tensor) for tensor in (x, cos, sin)]
    same = jax_frontend.apply_rotary(*arrays, positions=positions, interleaved=interleaved)
    assert same.dtype == arrays[0].dtype
    assert np.array_equal(_numpy(out.float()), np.asarray(same.astype(jnp.float32)))


@pytest.mark.parametrize("interleaved", [False, True])
def test_bits_of_many_products(interleaved: bool) -> None:
    """XLA would fuse a product and a sum in a quarter of these elements, if it could."""
    x, cos, sin, positions = draw((997, 3, 64), 64)
    expected = _numpy(torch_frontend.apply_rotary(x, cos, sin, positions=positions, interleaved=interleaved))
    arrays = [in_jax(tensor) for tensor in (x, cos, sin)]
    for places in (positions, jnp.asarray(positions)):
        rotate = partial(jax_frontend.apply_rotary, positions=places, interleaved=interleaved)
        rotate = jax.jit(rotate, compiler_options=as_users_have_it())
        assert np.array_equal(expected, np.asarray(rotate(*arrays)))
    first, second, angle = (np.float32(each) for each in np.random.default_rng(0).standard_normal((3, 9973)))
    fused = jax.jit(lambda a, b, c: a * c - b * b, compiler_options=as_users_have_it())(first, second, angle)
    assert (np.asarray(fused) != first * angle - second * second).mean() > 0.1, "then the function above needs no care"


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
def test_a_gpu_has_the_bits_of_a_cpu(interleaved: bool, dtype: str) -> None:
    """The kernel, torch's operations if there is a gradient, and XLA's program."""
    x, cos, sin, positions = draw((997, 3, 64), 48, dtype=dtype)
    options = {"interleaved": interleaved}
    expected = torch_frontend.apply_rotary(x, cos, sin, positions=positions, **options)
    there = [tensor.cuda() for tensor in (x, cos, sin, torch.tensor(positions))]
    for each in (there[0], there[0].clone().requires_grad_()):
        actual = torch_frontend.apply_rotary(each, *there[1:3], positions=there[3], **options)
        assert torch.equal(actual.detach().cpu(), expected)
    with jax_on("cuda"):
        arrays = [JAX_ON_GPU.array(np.asarray(in_jax(tensor)), dtype) for tensor in (x,)]
        angles = [JAX_ON_GPU.array(tensor.numpy()) for tensor in (cos, sin)]
        actual = jax_frontend.apply_rotary(*arrays, *angles, positions=JAX_ON_GPU.array(positions), **options)
        assert np.array_equal(np.asarray(actual.astype(jnp.float32)), expected.float().numpy())


def test_planted_faults_are_found() -> None:
    call = draw(positions=300)
    x, cos, sin, positions = call
    out = torch_frontend.apply_rotary(x, cos, sin, positions=np.minimum(positions + 1, 299))
    assert not is_right(out, *call, False)
    out = torch_frontend.apply_rotary(x, cos, sin, positions=positions, interleaved=True)
    assert not is_right(out, *call, False) and is_right(out, *call, True)
    out = torch_frontend.apply_rotary(x, cos, -sin, positions=positions)
    assert not is_right(out, *call, False)
    out = torch_frontend.apply_rotary(x, cos[:, :-1].contiguous(), sin[:, :-1].contiguous(), positions=positions)
    assert not is_right(out, *call, False)


@pytest.mark.slow
@pytest.mark.parametrize("interleaved", [False, True])
def test_float64_and_its_gradient(interleaved: bool) -> None:
    call = draw(dtype="float64", table="float64")
    x, cos, sin, positions = call
    x, cos, sin = (tensor.requires_grad_() for tensor in (x, cos, sin))
    options = {"positions": positions, "interleaved": interleaved}
    assert torch.autograd.gradcheck(lambda *each: torch_frontend.apply_rotary(*each, **options), (x, cos, sin))
    with jax.enable_x64(True):
        arrays = [jnp.asarray(tensor.detach().numpy()) for tensor in (x, cos, sin)]
        rotate = partial(jax_frontend.apply_rotary, **options)
        with torch.no_grad():
            assert np.array_equal(torch_frontend.apply_rotary(x, cos, sin, **options), rotate(*arrays))
        grads = jax.grad(lambda *each: (rotate(*each) ** 2).sum(), argnums=(0, 1, 2))(*arrays)
    (torch_frontend.apply_rotary(x, cos, sin, **options) ** 2).sum().backward()
    for tensor, grad in zip((x, cos, sin), grads, strict=True):
        np.testing.assert_allclose(tensor.grad, grad, rtol=1e-12, atol=1e-12)


def test_torch_compiles_it() -> None:
    x, cos, sin, positions = draw()
    rotate = torch.compile(torch_frontend.apply_rotary, fullgraph=True, backend="aot_eager")
    expected = torch_frontend.apply_rotary(x, cos, sin, positions=positions)
    assert torch.equal(rotate(x, cos, sin, positions=torch.tensor(positions)), expected)
    with pytest.raises(SpecError, match=r"positions\[0\]=41: expected 0 to 40"):
        rotate(x, cos, sin, positions=torch.full((7,), 41))
    meta = torch_frontend.apply_rotary(
        *(each.to("meta") for each in (x, cos, sin, torch.tensor(positions))[:3]),
        positions=torch.empty(7, dtype=torch.int32, device="meta"),
    )
    assert meta.shape == x.shape
    batched = torch.vmap(lambda row, at: torch_frontend.apply_rotary(row, cos, sin, positions=at))
    assert torch.equal(batched(x, torch.tensor(positions)), expected)


def test_jax_maps_it_over_rows() -> None:
    x, cos, sin, positions = draw((3, 7, 2, 22))
    arrays = [in_jax(tensor) for tensor in (x, cos, sin)]
    expected = jax_frontend.apply_rotary(*arrays, positions=positions)
    mapped = jax.vmap(lambda row, at: jax_frontend.apply_rotary(row, *arrays[1:], positions=at))
    assert np.array_equal(mapped(arrays[0], jnp.asarray(positions)), expected)


def test_traced_positions_are_clamped() -> None:
    x, cos, sin, _ = draw((4, 2, 22))
    arrays, at = [in_jax(tensor) for tensor in (x, cos, sin)], jnp.asarray([-(2**31), -1, 41, 2**31 - 1])
    rotate = jax.jit(lambda at: jax_frontend.apply_rotary(*arrays, positions=at))
    expected = jax_frontend.apply_rotary(*arrays, positions=np.array([0, 0, 40, 40]))
    assert np.array_equal(rotate(at), expected)


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "one axis": ({"x": np.zeros(4)}, ShapeError, r"x: expected \[\.\.\., heads, head_dim\], got \[4\]"),
    "whole numbers": ({"x": np.zeros((7, 3, 22), np.int32)}, DTypeError, "x: expected one of .*, got int32"),
    "too wide": ({"cos": np.zeros((5, 12)), "sin": np.zeros((5, 12))}, ShapeError, "cos: expected at most 11 angles"),
    "cos of one axis": (
        {"cos": np.zeros(5)},
        ShapeError,
        r"cos: expected \[max_positions, rotary_dim / 2\], got \[5\]",
    ),
    "no positions": ({"cos": np.zeros((0, 4)), "sin": np.zeros((0, 4))}, ShapeError, r"cos: expected .*, got \[0, 4\]"),
    "other sin": ({"sin": np.zeros((5, 4))}, ShapeError, r"sin: expected the shape of cos, \[41, 11\], got \[5, 4\]"),
    "sin of ints": ({"sin": np.zeros((41, 11), np.int32)}, DTypeError, "sin: expected one of .*, got int32"),
    "other positions": ({"positions": np.zeros(6, np.int32)}, ShapeError, r"positions: .*, shape \[7\], got \[6\]"),
    "float positions": ({"positions": np.zeros(7, np.float32)}, DTypeError, "positions: expected dtype int32 or int64"),
    "large": ({"positions": np.array([0, 1, 41, 0, 0, 0, 0])}, SpecError, r"positions\[2\]=41: expected 0 to 40"),
    "negative": ({"positions": np.array([0, -1, 0, 0, 0, 0, 0])}, SpecError, r"positions\[1\]=-1: expected 0 to 40"),
    "interleaved": ({"interleaved": 1}, SpecError, "interleaved=1: expected True or False"),
    "a list": ({"positions": [0] * 7}, TypeError, "positions: expected"),
    "unknown": ({"offset": 1}, TypeError, "offset"),
}


@pytest.mark.parametrize("f", BOTH, ids=str)
@pytest.mark.parametrize("name", BAD)
def test_bad_input(name: str, f: Framework) -> None:
    changed, error, text = BAD[name]
    x, cos, sin, positions = draw()
    call = {"x": x.numpy(), "cos": cos.numpy(), "sin": sin.numpy(), "positions": positions, **changed}
    for key in ("x", "cos", "sin"):
        call[key] = f.array(call[key], "float32" if call[key].dtype == np.float64 else None)
    with pytest.raises(error, match=text):
        f.frontend.apply_rotary(**call)


def test_float64_tables_need_float64_data() -> None:
    x, cos, sin, positions = draw()
    with pytest.raises(DTypeError, match="cos: expected one of float32, bfloat16, float16, got float64; cast it"):
        torch_frontend.apply_rotary(x, cos.double(), sin, positions=positions)
