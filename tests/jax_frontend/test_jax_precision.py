"""Tests the precision of XLA's float32 products in the lowered program, because a CPU always multiplies in full."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from attn_core.errors import SpecError
from jax_frontend import attention, dot_product_attention
from jax_frontend.flax.hook import attention_fn

pytestmark = pytest.mark.sampled

CALLS: dict[str, dict[str, Any]] = {
    "blocks": {"causal": True, "softcap": 5.0},
    "jax.nn": {"causal": True},
    "sinks": {"sinks": jnp.zeros(2)},
}


def precisions(call: dict[str, Any]) -> set[str]:
    """The precisions of the products in the lowered forward and backward."""
    x = jnp.ones((1, 16, 2, 8))
    total = jax.grad(lambda x: attention(x, x, x, backend="jax_xla", **call).sum())
    return set(precisions_in(jax.jit(total).lower(x).as_text()))


def precisions_in(program: str) -> list[str]:
    """The precision of each product in a lowered program.

    Products of zeros and ones, which count NaNs, are exact in any precision and are left out.
    """
    actual, of_bools = [], {}
    for line in program.splitlines():
        if made := re.match(r"\s*(%\w+) = ", line):
            of_bools[made[1]] = "stablehlo.convert" in line and "xi1>)" in line
        product = re.search(r"dot_general (%\w+), (%\w+),.*precision = \[(\w+), \w+\]", line)
        if product and not (of_bools.get(product[1]) and of_bools.get(product[2])):
            actual.append(product[3])
    return actual


@pytest.mark.parametrize("call", CALLS.values(), ids=list(CALLS))
@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (None, "HIGHEST"),
        ("highest", "HIGHEST"),
        ("float32", "HIGHEST"),
        ("tensorfloat32", "HIGH"),
        ("high", "HIGH"),
        ("bfloat16", "DEFAULT"),
        ("default", "DEFAULT"),
    ],
)
def test_float32_products_have_the_requested_precision_or_full(
    said: str | None, expected: str, call: dict[str, Any]
) -> None:
    with jax.default_matmul_precision(said):
        assert precisions(call) == {expected}


def test_one_jitted_function_follows_a_changed_precision() -> None:
    x = jnp.ones((1, 16, 2, 8))
    jitted = jax.jit(lambda x: dot_product_attention(x, x, x, implementation="xla"))
    for said, expected in (("default", "DEFAULT"), ("highest", "HIGHEST"), ("default", "DEFAULT")):
        with jax.default_matmul_precision(said):
            jitted(x)
            assert f"precision = [{expected}, {expected}]" in jitted.lower(x).as_text()


@pytest.mark.parametrize("said", [None, "highest", "high", "default", "BF16_BF16_F32"])
@pytest.mark.parametrize("precision", [None, "default", "high", "highest", *jax.lax.Precision, ("high", "highest")])
def test_a_layer_requests_no_more_than_the_given_precision(precision: Any, said: str | None) -> None:
    x = jnp.ones((1, 8, 2, 8))
    pair = precision if isinstance(precision, tuple) else (precision, precision)
    requested = max(jax.lax.Precision(each).value for each in pair)
    levels = {None: 2, "highest": 2, "high": 1, "default": 0, "BF16_BF16_F32": 0}
    with jax.default_matmul_precision(said):
        if requested <= levels[said]:
            attention_fn()(x, x, x, precision=precision)
        else:
            with pytest.raises(SpecError, match=f"jax.default_matmul_precision is {said!r}"):
                attention_fn()(x, x, x, precision=precision)
        half = x.astype(jnp.bfloat16)
        attention_fn()(half, half, half, precision=precision)  # a single precision exists there


@pytest.mark.parametrize("precision", ["bogus", ["high"], jax.lax.DotAlgorithmPreset.F32_F32_F32])
def test_an_unknown_precision_is_refused_by_name(precision: Any) -> None:
    x = jnp.ones((1, 8, 2, 8))
    with pytest.raises(SpecError, match=r"precision=.*: expected None, a jax.lax.Precision or its name"):
        attention_fn()(x, x, x, precision=precision)


def calls_of_layers(precision: Any) -> dict[str, Any]:
    """A call of each layer with 1 head of 16 channels, on x [1, 16, 16]."""
    flax_nnx = pytest.importorskip("flax.nnx")
    from jax_frontend import linen, nnx

    layer, twin = (
        linen.Attention(1, precision=precision),
        nnx.Attention(1, 16, precision=precision, rngs=flax_nnx.Rngs(0)),
    )
    params = linen.Attention(1).init(jax.random.key(0), jnp.ones((1, 16, 16)))
    return {"linen": lambda x: layer.apply(params, x), "nnx": twin}


@pytest.mark.parametrize("layer", ["linen", "nnx"])
@pytest.mark.parametrize("precision", ["default", jax.lax.Precision.HIGH, "highest"])
def test_a_layer_projects_with_its_precision_and_attends_with_no_less(layer: str, precision: Any) -> None:
    call, x = calls_of_layers(precision)[layer], jnp.ones((1, 16, 16))
    products = precisions_in(jax.jit(lambda x: call(x)).lower(x).as_text())
    name = jax.lax.Precision(precision).name
    assert products.count(name) >= 4  # the projections
    assert set(products) == {name, "HIGHEST"}


@pytest.mark.parametrize("layer", ["linen", "nnx"])
def test_a_layer_refuses_what_attention_cannot_honour(layer: str) -> None:
    x = jnp.ones((1, 16, 16))
    with pytest.raises(SpecError, match=r"precision='bogus': expected None, a jax.lax.Precision or its name"):
        calls_of_layers("bogus")[layer](x)
    with (
        jax.default_matmul_precision("high"),
        pytest.raises(SpecError, match=r"precision='highest': jax\.default_matmul_precision is 'high' here"),
    ):
        calls_of_layers("highest")[layer](x)
