"""Tests windows and scales that are traced: the same numbers as fixed ones, in one program, and errors by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("jax")
import jax
import jax.numpy as jnp

from attn_core import DTypeError, NoBackendError, ShapeError, SpecError
from attn_core.expressions import trace_score
from jax_frontend import SeqInfo, attention, explain

pytestmark = pytest.mark.sampled

Q, K, V = (
    jax.random.normal(jax.random.key(seed), (2, length, heads, 16))
    for seed, length, heads in ((0, 9, 4), (1, 13, 2), (2, 13, 2))
)


def slope(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return score - 0.1 * abs(q - k)


@pytest.mark.parametrize(
    ("traced", "fixed"),
    [
        (lambda n: {"causal": True, "window": n}, {"causal": True, "window": 4}),
        (lambda n: {"window": (n, 2)}, {"window": (4, 2)}),
        (lambda n: {"window": (3, n), "alignment": "top_left"}, {"window": (3, 4), "alignment": "top_left"}),
        (lambda n: {"window": (n, n), "mask_mod": lambda b, h, q, k: q != k}, None),
        (lambda n: {"scale": n * 0.1, "causal": True}, {"scale": 0.4, "causal": True}),
        (
            lambda n: {"scale": n * 0.1, "softcap": 5.0, "score_mod": slope},
            {"scale": 0.4, "softcap": 5.0, "score_mod": slope},
        ),
        (lambda n: {"scale": n * 0.1, "score_mod": trace_score(slope)}, {"scale": 0.4, "score_mod": slope}),
        (lambda n: {"scale": n * 0.1, "window": (n, None)}, {"scale": 0.4, "window": (4, None)}),
    ],
)
@pytest.mark.parametrize("backend", ["jax_xla", "math"])
def test_a_traced_number_gives_the_numbers_of_a_fixed_one(traced: Any, fixed: Any, backend: str) -> None:
    fixed = fixed or {"window": (4, 4), "mask_mod": lambda b, h, q, k: q != k}
    result = jax.jit(lambda n: attention(Q, K, V, **traced(n), backend=backend))(jnp.int32(4))
    np.testing.assert_allclose(result, attention(Q, K, V, **fixed, backend=backend), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("window", "causal"),
    [
        (lambda n: n, True),
        (lambda n: (n, n), True),
        (lambda n: (n, 1), False),
        (lambda n: (n, n), False),
        (lambda n: (1, n), False),
    ],
)
def test_a_traced_window_of_positions(window: Any, causal: bool) -> None:
    positions = np.random.default_rng(0).integers(0, 9, (2, 9), np.int32)
    options = {"q_segment_ids": positions % 2, "q_positions": positions, "causal": causal, "backend": "jax_xla"}
    k, v = K[:, :9], V[:, :9]
    for number in (2, 4):
        result = jax.jit(lambda n: attention(Q, k, v, **options, window=window(n)))(jnp.int32(number))
        np.testing.assert_allclose(result, attention(Q, k, v, **options, window=window(number)), rtol=2e-5, atol=2e-6)


def test_layers_of_a_scan_alternate_local_and_global() -> None:
    def layer(x: Any, window: Any) -> Any:
        return attention(x, K, V, causal=True, window=window), None

    result, _ = jax.jit(lambda x: jax.lax.scan(layer, x, jnp.array([3, 2**30])))(Q)
    expected = attention(attention(Q, K, V, causal=True, window=3), K, V, causal=True)
    np.testing.assert_allclose(result, expected, rtol=2e-5, atol=2e-6)


def test_a_traced_scale_has_a_gradient() -> None:
    def loss(scale: Any) -> Any:
        return (attention(Q, K, V, scale=scale, causal=True, backend="jax_xla") ** 2).sum()

    step = 1e-2
    slope_of_loss = (loss(0.3 + step) - loss(0.3 - step)) / (2 * step)
    np.testing.assert_allclose(jax.grad(loss)(jnp.float32(0.3)), slope_of_loss, rtol=1e-2)


NUMBERS = {
    "scale": ({"causal": True}, lambda s: {"scale": s}),
    "scale, softcap": ({"softcap": 5.0}, lambda s: {"scale": s}),
    "aux": ({}, lambda s: {"score_mod": lambda score, b, h, q, k, t: score * t, "aux": (s,)}),
}
WAYS = {
    "grad": jax.grad,
    "value_and_grad": lambda f: lambda s: jax.value_and_grad(f)(s)[1],
    "vjp": lambda f: lambda s: jax.vjp(f, s)[1](jnp.float32(1))[0],
    "jacrev": jax.jacrev,
    "jacfwd": jax.jacfwd,
    "jit of grad": lambda f: jax.jit(jax.grad(f)),
    "grad of jit": lambda f: jax.grad(jax.jit(f)),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize(("fixed", "options"), NUMBERS.values(), ids=NUMBERS)
@pytest.mark.parametrize("number", [0.3, np.float32(0.3), np.array(0.3, np.float32)], ids=["float", "numpy", "0-d"])
def test_any_number_has_the_gradient_of_an_array(way: Any, fixed: Any, options: Any, number: Any) -> None:
    """JAX differentiates a Python number as an object of its own."""

    def loss(s: Any) -> Any:
        return (attention(Q, K, V, **fixed, **options(s), backend="jax_xla") ** 2).sum()

    np.testing.assert_allclose(way(loss)(number), jax.grad(loss)(jnp.float32(0.3)), rtol=1e-3)


def test_a_window_beside_a_differentiated_scale() -> None:
    def loss(scale: Any, window: Any) -> Any:
        return (attention(Q, K, V, scale=scale, causal=True, window=window, backend="jax_xla") ** 2).sum()

    gradient, _ = jax.grad(loss, (0, 1), allow_int=True)(0.3, 4)
    np.testing.assert_allclose(gradient, jax.grad(loss)(jnp.float32(0.3), 4), rtol=1e-3)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"scale": jnp.ones(2)}, ShapeError, r"scale: .* got shape \[2\]"),
        ({"scale": jnp.int32(2)}, DTypeError, "scale: expected dtype float, got int32"),
        ({"window": jnp.int32(3)}, SpecError, "window: expected causal=True"),
        ({"window": jnp.float32(3), "causal": True}, DTypeError, "window: expected dtype int32, got float32"),
        ({"window": (jnp.int32(3), -1)}, SpecError, "window: expected a right distance of 0 or more, .* got -1"),
        ({"window": (jnp.int32(3),)}, SpecError, "window: expected a pair"),
        ({"softcap": jnp.float32(3.0)}, SpecError, "softcap"),
        ({"causal": jnp.bool_(True)}, SpecError, "causal"),
    ],
)
def test_a_bad_traced_number_is_named(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        jax.jit(lambda: attention(Q, K, V, **options))()


def test_calls_that_take_none_are_refused_by_name() -> None:
    info = SeqInfo.from_lengths([4, 5], [6, 7])
    with pytest.raises(SpecError, match="window: expected ints on the host with seq_info"):
        attention(Q[0], K[0], V[0], causal=True, window=jnp.int32(3), seq_info=info)
    with pytest.raises(NoBackendError, match="mask_mod: the aten CPU flash kernel has none"):
        attention(Q, K, V, causal=True, window=jnp.int32(3), backend="sdpa_flash")
    assert "mask_mod" in str(explain(Q, K, V, causal=True, window=jnp.int32(3)))
