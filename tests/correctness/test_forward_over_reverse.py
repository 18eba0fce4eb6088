"""Forward over reverse, the tangents of gradients, in both frontends: against differences of the float64 reference."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("jax")
import jax
import jax.numpy as jnp
import torch
from oracle_cases import FEATURES, make

import jax_frontend
import torch_frontend
from attn_core import SeqInfo
from attn_core.backends.math import backend as math
from attn_core.backends.shared.plain import attention as plain_attention
from attn_core.backends.shared.plain import second_tangents
from attn_core.backends.shared.plain.block_operands import SavedTensors
from attn_core.backends.shared.plain.second_tangents import gradient_tangents
from attn_core.call.tensors import Gradients, Inputs, Tangents
from attn_core.correctness import reference
from attn_core.errors import SpecError

pytestmark = pytest.mark.sampled

NAMES = ("q", "k", "v", "bias", "sinks")
STEP = 1e-5


def tensor(array: Any) -> Any:
    return None if array is None else torch.from_numpy(np.ascontiguousarray(array))


def by_differences(features: dict[str, Any]) -> tuple[Gradients, list[Any]]:
    """Returns central differences of the reference's gradients, and ``gradient_tangents``' arguments for the same."""
    case, random = make(features), np.random.default_rng(5)
    wants = {"needs_backward": True, "return_lse": True, "bias_gradient": case.inputs.bias is not None}
    spec = replace(case.spec, dtype="float64", bias_dtype=None, **wants)
    moved = {name: getattr(case.inputs, name) for name in NAMES if getattr(case.inputs, name) is not None}
    moved = {name: random.normal(size=array.shape) for name, array in moved.items()}
    # A backend's log-sum-exp of a row without keys is -inf, without the sink, and the frontends add it.
    seen = np.isfinite(math.forward(spec, Inputs(*map(tensor, case.inputs)))[1].numpy())
    dout, of_dout = (random.normal(size=spec.out_shape) for _ in range(2))
    dlse, of_dlse = (np.where(seen, random.normal(size=spec.lse_shape), 0.0) for _ in range(2))

    def at(by: float) -> tuple[Any, Any, Gradients]:
        inputs = case.inputs._replace(**{name: getattr(case.inputs, name) + by * way for name, way in moved.items()})
        out, lse = reference.forward(spec, inputs)
        lse = np.where(seen, lse, -np.inf)
        return out, lse, reference.backward(spec, inputs, out, lse, dout + by * of_dout, dlse + by * of_dlse)

    ahead, behind, (out, lse, _) = at(STEP), at(-STEP), at(0.0)
    slope = lambda one, other: None if one is None else (one - other) / (2 * STEP)  # noqa: E731
    of_out = slope(ahead[0], behind[0])
    of_lse = slope(*(np.where(seen, each[1], 0.0) for each in (ahead, behind)))
    tangents = Tangents(*(tensor(moved.get(name)) for name in NAMES))
    saved = SavedTensors(*map(tensor, (out, lse, dout, dlse)))
    arguments = [spec, Inputs(*map(tensor, case.inputs)), saved, tangents]
    return Gradients(*map(slope, ahead[2], behind[2])), [
        *arguments,
        SavedTensors(*map(tensor, (of_out, of_lse, of_dout, of_dlse))),
    ]


def worst(actual: Gradients, expected: Gradients) -> float:
    errors = [0.0]
    for one, other in zip(actual, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            errors.append(float(np.abs(one.numpy() - other).max() / (1 + np.abs(other).max())))
    return max(errors)  # NaN compares as no error here, so callers test for less


@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
def test_tangents_of_gradients_are_the_differences_of_the_reference(features: dict[str, Any]) -> None:
    expected, arguments = by_differences(features)
    actual = gradient_tangents(*arguments)
    assert all(bool(each.isfinite().all()) for each in actual if each is not None)
    assert worst(actual, expected) < 1e-6


@pytest.mark.parametrize("at", range(4))
def test_a_tangent_that_is_left_out_is_a_zero(at: int) -> None:
    """Of out, lse, dout and dlse, and then of q, k and v."""
    _, (spec, inputs, saved, tangents, moved) = by_differences(FEATURES["everything"])
    call = partial(gradient_tangents, spec, inputs, saved)
    cut = [None if number == at else each for number, each in enumerate(moved)]
    zero = [torch.zeros_like(each) if number == at else each for number, each in enumerate(moved)]
    rows = [None if number == at else each for number, each in enumerate(tangents)]
    zeros = [torch.zeros_like(each) if number == at else each for number, each in enumerate(tangents)]
    pairs = (
        (tangents, SavedTensors(*cut), tangents, SavedTensors(*zero)),
        (Tangents(*rows), moved, Tangents(*zeros), moved),
    )
    for one_tangents, one, other_tangents, other in pairs:
        for actual, expected in zip(call(one_tangents, one), call(other_tangents, other), strict=True):
            assert (actual is None and expected is None) or torch.allclose(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["causal", "everything", "packed, window, alibi, dropout"])
def test_blocks_in_chunks_share_no_memory(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of larger calls write their scores to common memory, through which no tangent passes."""
    expected, arguments = by_differences(FEATURES[name])
    monkeypatch.setattr(plain_attention, "CACHED_SCORES", 8)
    monkeypatch.setattr(plain_attention, "FEWEST_ROWS", 2)
    monkeypatch.setattr(plain_attention, "block_sizes", plain_attention.block_sizes.__wrapped__)
    assert plain_attention.block_sizes(arguments[0], True)[2] > 0
    assert worst(gradient_tangents(*arguments), expected) < 1e-6


def lost(name: str) -> Any:
    """A backward that sees no tangent of an argument."""

    def faulty(spec: Any, inputs: Inputs, out: Any, lse: Any, *rest: Any, **how: Any) -> Gradients:
        seen = {"out": out, "lse": lse, **inputs._asdict()}
        seen[name] = torch.from_numpy(np.array(seen[name].tolist()))
        inputs = inputs._replace(**{each: seen[each] for each in Inputs._fields})
        return plain_attention.backward(spec, inputs, seen["out"], seen["lse"], *rest, **how)

    return faulty


FAULTS = {f"no tangent of {name}": lost(name) for name in ("q", "out", "lse", "bias", "sinks")}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_caught(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, arguments = by_differences(FEATURES["everything"])
    monkeypatch.setattr(second_tangents, "backward", FAULTS[fault])
    assert not worst(gradient_tangents(*arguments), expected) < 1e-3


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
def test_products_in_torch(name: str) -> None:
    options = dict(CALLS[name])
    if "seq_info" in options:
        options["seq_info"] = SeqInfo(*(torch.tensor(each, dtype=torch.int32) for each in OFFSETS), 70, 66)
    primals, ways = ([torch.from_numpy(each) for each in arrays()] for _ in range(2))
    ways = [torch.cos(3 * way) for way in ways]
    gradient = torch.func.grad(partial(loss, torch_frontend.attention, options), tuple(range(5)))
    product = torch.func.jvp(gradient, tuple(primals), tuple(ways))[1]
    for actual, expected in zip(product, differences(gradient, primals, ways), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5 * (1 + np.abs(expected).max()))


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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_in_other_dtypes(dtype: str) -> None:
    """Against float64, from the same numbers."""
    primals = [torch.from_numpy(each).to(getattr(torch, dtype)) for each in arrays()[:3]]
    ways = [torch.cos(3 * each) for each in primals]
    call = lambda q, k, v: (torch_frontend.attention(q, k, v, causal=True, softcap=2.0).double() ** 2).sum()  # noqa: E731
    gradient = torch.func.grad(call, (0, 1, 2))
    actual = torch.func.jvp(gradient, tuple(primals), tuple(ways))[1]
    expected = torch.func.jvp(gradient, *(tuple(each.double() for each in side) for side in (primals, ways)))[1]
    for one, other in zip(actual, expected, strict=True):
        assert str(one.dtype) == f"torch.{dtype}" and bool(one.isfinite().all())
        relative = (one.double() - other).norm() / other.norm()
        assert relative < {"float32": 1e-5, "bfloat16": 3e-2}[dtype], relative


def test_calls_without_these_tangents_say_so() -> None:
    q, x = torch.ones(1, 3, 2, 8), jnp.ones((1, 3, 2, 8))
    says = r"backend='sdpa_flash': expected reverse mode .* got second derivatives .*has no forward mode; .* has them"
    of_torch = lambda q: torch_frontend.attention(q, q, q, softcap=None, backend="sdpa_flash").sum()  # noqa: E731
    with pytest.raises(SpecError, match="has no forward mode"):  # the forward's tangents come first
        torch.func.jvp(torch.func.grad(of_torch), (q,), (q,))
    with pytest.raises(SpecError, match=says):
        jax.jvp(jax.grad(lambda x: jax_frontend.attention(x, x, x, backend="sdpa_flash").sum()), (x,), (x,))
    with pytest.raises(SpecError, match="has tangents of its gradients in torch alone"):
        jax.jvp(jax.grad(lambda x: jax_frontend.attention(x, x, x, backend="math").sum()), (x,), (x,))
    table = torch.ones(3)

    def learned(table: torch.Tensor) -> torch.Tensor:
        shifted = lambda s, b, h, i, j, table: s + table[j]  # noqa: E731
        return torch_frontend.attention(q, q, q, score_mod=shifted, aux=(table,)).square().sum()

    with pytest.raises(SpecError, match=r"tangent of aux\[0\]: the torch math kernel has none"):
        torch.func.jvp(torch.func.grad(learned), (table,), (table,))
    with pytest.raises(RuntimeError, match="attention has no second derivative of this kind"):
        torch.autograd.functional.hvp(lambda q: torch_frontend.attention(q, q, q, softcap=2.0).square().sum(), q, q)
