"""Forward over reverse, the tangents of gradients, in JAX: against differences of gradients."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("jax")
import jax
import jax.numpy as jnp
import torch

import jax_frontend
import torch_frontend
from attn_core import SeqInfo
from attn_core.errors import SpecError

pytestmark = pytest.mark.sampled

STEP = 1e-5

SHAPES = {"q": (2, 150, 4, 8), "k": (2, 140, 2, 8), "v": (2, 140, 2, 8)}
"""More queries than a block has; the first 10 of a bottom-right diagonal see no key."""
OFFSETS = [0, 70, 70, 140, 150], [0, 66, 70, 130, 140]
CALLS: dict[str, dict[str, Any]] = {
    "causal with empty rows": {"causal": True, "softcap": 2.0},
    "window": {"window": (20, 3), "scale": 0.4},
    "score function": {"score_mod": lambda s, b, h, q, k: s * s * 0.1 - 0.01 * abs(q - k)},
    "documents": {"causal": True, "seq_info": OFFSETS},
}


def loss(attention: Any, options: dict[str, Any], q: Any, k: Any, v: Any, sinks: Any, bias: Any) -> Any:
    """A number that depends on every array, and on the log-sum-exp if every row sees a key."""
    packed = "seq_info" in options
    q, k, v = (q[0], k[0], v[0]) if packed else (q, k, v)
    options = options if packed else options | {"sinks": sinks, "bias": bias}
    out, lse = attention(q, k, v, **options, return_lse=True)
    return (out**2 * (1 + out)).sum() + ((lse**2).sum() if "window" in options else 0.0)


def arrays(names: tuple[str, ...] = (*SHAPES, "sinks", "bias")) -> list[np.ndarray]:
    random = np.random.default_rng(0)
    shapes = SHAPES | {"sinks": (4,), "bias": (1, 4, 1, 140)}
    return [random.normal(size=shapes[name]) for name in names]


def differences(gradient: Any, primals: list[Any], ways: list[Any]) -> list[np.ndarray]:
    ahead, behind = (gradient(*[x + by * way for x, way in zip(primals, ways, strict=True)]) for by in (STEP, -STEP))
    return [np.asarray((one - other) / (2 * STEP)) for one, other in zip(ahead, behind, strict=True)]


@pytest.mark.parametrize("name", CALLS)
def test_products_in_jax_by_the_automatic_choice(name: str) -> None:
    options = dict(CALLS[name])
    with jax.enable_x64(True):
        if "seq_info" in options:
            options["seq_info"] = SeqInfo(*(jnp.asarray(each, jnp.int32) for each in OFFSETS), 70, 66)
        primals = [jnp.asarray(each) for each in arrays()]
        ways = [jnp.cos(3 * each) for each in primals]
        kernel = jax_frontend.explain(*(x[0] if "seq_info" in options else x for x in primals[:3]), **options).backend
        gradient = jax.jit(jax.grad(partial(loss, jax_frontend.attention, options), tuple(range(5))))
        product = jax.jit(lambda *p: jax.jvp(gradient, p[:5], p[5:])[1])(*primals, *ways)
        for actual, expected in zip(product, differences(gradient, primals, ways), strict=True):
            np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5 * (1 + np.abs(expected).max()))
    assert name != "documents" or kernel != "jax_xla", "no call ran on a kernel of torch"


WAYS: dict[str, Any] = {
    "linearize": lambda f, q: jax.linearize(jax.grad(f), q)[1](q),
    "of a tangent": lambda f, q: jax.jvp(lambda q: jax.jvp(f, (q,), (q,))[1], (q,), (q,))[1],
    "vmap": lambda f, q: jax.vmap(lambda way: jax.jvp(jax.grad(f), (q,), (way,))[1])(jnp.stack([q, 2 * q])),
    "of a vmap": lambda f, q: jax.jvp(jax.grad(lambda qs: jax.vmap(f)(qs).sum()), (q[None],), (q[None],))[1],
    "remat": lambda f, q: jax.jvp(jax.grad(jax.checkpoint(f)), (q,), (q,))[1],
}


@pytest.mark.parametrize("way", WAYS)
def test_compositions_in_jax_equal_those_of_jax_xla(way: str) -> None:
    q, k, v = (jnp.asarray(each[0], jnp.float32) for each in arrays()[:3])
    info = SeqInfo(*(jnp.asarray(each, jnp.int32) for each in OFFSETS), 70, 66)
    call = lambda q, name: (jax_frontend.attention(q, k, v, seq_info=info, causal=True, backend=name) ** 2).sum()  # noqa: E731
    assert jax_frontend.explain(q, k, v, seq_info=info, causal=True, needs_backward=True).backend != "jax_xla"
    actual, expected = (
        jax.jit(lambda q, name=name: WAYS[way](partial(call, name=name), q))(q) for name in (None, "jax_xla")
    )
    np.testing.assert_allclose(actual, expected, rtol=1e-3, atol=1e-4 * float(abs(expected).max()))


def test_calls_without_these_tangents_say_so() -> None:
    q, x = torch.ones(1, 3, 2, 8), jnp.ones((1, 3, 2, 8))
    says = r"backend='sdpa_flash': expected reverse mode .* got second derivatives .*has no forward mode; .* has them"
    with pytest.raises(SpecError, match=says):
        jax.jvp(jax.grad(lambda x: jax_frontend.attention(x, x, x, backend="sdpa_flash").sum()), (x,), (x,))
    with pytest.raises(SpecError, match="has no tangents of its gradients"):
        jax.jvp(jax.grad(lambda x: jax_frontend.attention(x, x, x, backend="math").sum()), (x,), (x,))
    of_torch = lambda q: torch_frontend.attention(q, q, q, softcap=2.0).square().sum()  # noqa: E731
    for product in (
        lambda: torch.func.jvp(torch.func.grad(of_torch), (q,), (q,)),
        lambda: torch.autograd.functional.hvp(of_torch, q, q),
    ):
        with pytest.raises(RuntimeError, match="attention has no second derivative in torch"):
            product()
