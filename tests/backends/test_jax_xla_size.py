"""Tests the size of jax_xla's programs beside jax.nn's: what XLA has to compile, and what JAX has to trace."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

jax = pytest.importorskip("jax")
import jax.numpy as jnp

from jax_frontend import attention

ARRAY = jax.ShapeDtypeStruct((2, 256, 8, 64), jnp.float32)


def ours(q: Any, k: Any, v: Any) -> Any:
    return attention(q, k, v, causal=True, backend="jax_xla")


def unmasked(q: Any, k: Any, v: Any) -> Any:
    return attention(q, k, v, backend="jax_xla")


def theirs(q: Any, k: Any, v: Any) -> Any:
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def gradient(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(q: Any, k: Any, v: Any, dout: Any) -> Any:
        return jax.vjp(function, q, k, v)[1](dout)

    return run


def layers(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(q: Any, k: Any, v: Any) -> Any:
        for _ in range(24):
            q = q + function(q, k, v)
        return q.sum()

    return jax.grad(run, (0, 1, 2))


def operations(function: Callable[..., Any], arrays: int) -> list[str]:
    """The names of the operations in the program that XLA compiles."""
    program = jax.jit(function).lower(*[ARRAY] * arrays).as_text()
    return re.findall(r"stablehlo\.(\w+)", program)


@pytest.mark.parametrize("function", [ours, unmasked])
def test_a_small_call_has_no_loop(function):
    """And at most one branch, for NaN in hidden values. The products are the two of attention and one in the branch.

    A program for a GPU has this product without the branch."""
    forward, training = operations(function, 3), operations(gradient(function), 4)
    masked = function is ours
    assert "while" not in forward + training
    assert forward.count("dot_general") == 2 + masked
    assert training.count("dot_general") == 7 + masked
    compiled = jax.jit(function).lower(*[ARRAY] * 3).compile().as_text()
    assert len(re.findall(r" conditional\(", compiled)) == masked


def test_a_small_call_has_few_operations_beside_jax_nn():
    """The branch and jax.numpy's constants count here; XLA removes most of them before it compiles."""
    assert len(operations(ours, 3)) <= 2.2 * len(operations(theirs, 3))
    assert len(operations(gradient(ours), 4)) <= 2.2 * len(operations(gradient(theirs), 4))
    assert len(operations(unmasked, 3)) <= len(operations(theirs, 3))


def test_equal_layers_are_one_function():
    """JAX lowers the 24 layers of a model to calls of one function."""
    assert len(operations(layers(ours), 3)) <= 0.3 * len(operations(layers(theirs), 3))


def test_one_query_copies_no_keys():
    """XLA multiplies the keys of all heads as they are in memory: the program moves no array as large as they are."""
    q, k = (jax.ShapeDtypeStruct((8, length, 8, 64), jnp.float32) for length in (1, 2048))
    program = jax.jit(unmasked).lower(q, k, k).compile().as_text()
    usual = program[program.index("ENTRY") :]
    copied = re.findall(r"= f32\[8,(?:2048,8,64|8,2048,64|8,64,2048)\]\S* (?:fusion|copy|transpose)\(", usual)
    assert copied == []


def compiled_gradient(queries: int, keys: int, kv_heads: int, dtype: Any) -> str:
    """The compiled program of a causal call and its gradient, two rows of 8 heads of 64 channels."""
    q, k = (jax.ShapeDtypeStruct((2, *shape, 64), dtype) for shape in ((queries, 8), (keys, kv_heads)))

    def run(q: Any, k: Any, v: Any, dout: Any) -> Any:
        out, pull = jax.vjp(ours, q, k, v)
        return out, pull(dout)

    return jax.jit(run).lower(q, k, k, q).compile().as_text()


@pytest.mark.parametrize("kv_heads", [8, 2, 1])
def test_a_gradient_of_few_queries_computes_its_scores_once(kv_heads):
    """The products are those of a larger call: scores, sums, three gradients, dweights, and one in the branch."""
    program = compiled_gradient(9, 9, kv_heads, jnp.bfloat16)
    assert len(re.findall(r" dot\(", program)) == 7


def test_a_gradient_in_bfloat16_widens_only_v():
    """The test for NaN in v sums it in float32. The other operands stay in bfloat16 until they are multiplied."""
    program = compiled_gradient(256, 256, 8, jnp.bfloat16)
    usual = program[program.index("ENTRY") :]
    assert len(re.findall(r"= f32\[2,256,8,64\]", usual)) == 1


def test_the_gradients_of_keys_are_copied_once():
    """XLA writes each of dk and dv with one transpose of the product, not with a copy of it and a transpose."""
    program = compiled_gradient(256, 256, 8, jnp.bfloat16)
    usual = program[program.index("ENTRY") :]
    assert "{1,3,2,0} fusion" not in usual


def test_a_forward_copies_no_scores():
    """XLA computes the scores, the softmax and the sums in its kernels for products, without a loop of its own."""
    program = jax.jit(unmasked).lower(ARRAY, ARRAY, ARRAY).compile().as_text()
    assert re.findall(r"= \w+\[[\d,]*256,256\]\S* fusion\(.*kind=kLoop", program) == []
