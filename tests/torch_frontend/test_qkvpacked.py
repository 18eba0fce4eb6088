"""Tests that attention_qkvpacked equals attention on three views, in both frontends, and has one array as its
gradient."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("jax")
import jax
import jax.numpy as jnp
import torch
from frameworks import BOTH, TORCH, Framework

import jax_frontend
import torch_frontend
from attn_core import DTypeError, SeqInfo, ShapeError, masks
from torch_frontend.dispatch import offsets

CASES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "dense": ((2, 11, 3, 6, 16), {"causal": True}),
    "window and softcap": ((2, 11, 3, 6, 16), {"causal": True, "window": 3, "softcap": 5.0}),
    "documents": ((17, 3, 6, 16), {"seq_info": SeqInfo.from_lengths([5, 0, 9, 3]), "causal": True}),
    "documents in one row": ((1, 17, 3, 6, 16), {"seq_info": SeqInfo.from_lengths([5, 0, 9, 3])}),
    "log-sum-exp": ((2, 11, 3, 6, 16), {"return_lse": True, "backend": "math"}),
    "key ranges": ((2, 11, 3, 6, 16), {"key_ranges": masks.shared_prefix(4, [3, 4])}),
    "functions": (
        (2, 11, 3, 6, 16),
        {"mask_mod": lambda b, h, q, k: k <= q + b, "score_mod": lambda s, b, h, q, k: s * 0.5, "backend": "math"},
    ),
}
BACKENDS = ("sdpa_flash", "math", "jax_xla")


def normal(shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def results(framework: Framework, qkv: np.ndarray, whole: bool, options: dict[str, Any]) -> list[np.ndarray]:
    """out (and lse) and the gradient, through qkv as one array or as three slices of it."""

    def attend(qkv: Any) -> Any:
        if whole:
            return framework.frontend.attention_qkvpacked(qkv, **options)
        return framework.frontend.attention(*(qkv[..., which, :, :] for which in range(3)), **options)

    return framework.gradients(attend, {"qkv": qkv})


@pytest.mark.sampled
@pytest.mark.parametrize("framework", BOTH, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES)
def test_it_equals_attention_on_three_views(case: str, backend: str, framework: Framework) -> None:
    shape, options = CASES[case]
    options = {**options, "backend": options.get("backend", backend)}
    if framework.name == "torch" and options["backend"] == "jax_xla":
        pytest.skip("jax_xla runs in JAX only")
    if "softcap" in options and backend == "sdpa_flash":
        pytest.skip("sdpa_flash has no softcap")
    one, three = (results(framework, normal(shape), whole, options) for whole in (True, False))
    assert one[-1].shape == shape
    for whole, apart in zip(one, three, strict=True):
        np.testing.assert_array_equal(whole, apart)


@pytest.mark.parametrize("case", ["dense", "documents"])
def test_torch_and_jax_give_the_same_bits(case: str) -> None:
    shape, options = CASES[case]
    actual = [results(framework, normal(shape), True, {**options, "backend": "math"}) for framework in BOTH]
    for ours, theirs in zip(*actual, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_bias_and_sinks_have_gradients() -> None:
    def together(qkv: Any, sinks: Any, bias: Any) -> Any:
        return torch_frontend.attention_qkvpacked(qkv, sinks=sinks, bias=bias, backend="math")

    def apart(qkv: Any, sinks: Any, bias: Any) -> Any:
        return torch_frontend.attention(*qkv.unbind(2), sinks=sinks, bias=bias, backend="math")

    arrays = {"qkv": normal((2, 7, 3, 4, 8)), "sinks": normal((4,)), "bias": normal((1, 4, 7, 7))}
    for one, other in zip(*(TORCH.gradients(call, arrays) for call in (together, apart)), strict=True):
        np.testing.assert_array_equal(one, other)


def test_jax_reads_the_array_in_place() -> None:
    """One operand and one result reach the kernel, not three slices."""
    qkv = jnp.asarray(normal((2, 7, 3, 4, 8)))
    program = jax.make_jaxpr(jax.grad(lambda x: jax_frontend.attention_qkvpacked(x, backend="math").sum()))(qkv)
    calls = [equation for equation in program.eqns if equation.primitive.name.startswith("attn_")]
    assert [len(equation.outvars) for equation in calls] == [2, 1]
    assert calls[0].invars[0].aval.shape == qkv.shape == calls[1].outvars[0].aval.shape


def test_vmap_and_compile() -> None:
    qkv = normal((3, 2, 7, 3, 4, 8))
    rows = jnp.stack([jax_frontend.attention_qkvpacked(jnp.asarray(row), causal=True, backend="math") for row in qkv])
    mapped = jax.vmap(lambda row: jax_frontend.attention_qkvpacked(row, causal=True, backend="math"))(jnp.asarray(qkv))
    np.testing.assert_array_equal(rows, mapped)
    leaf = torch.from_numpy(qkv[0]).requires_grad_()
    compiled = torch.compile(torch_frontend.attention_qkvpacked, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(leaf, causal=True), torch_frontend.attention_qkvpacked(leaf, causal=True))


@pytest.mark.parametrize("framework", BOTH, ids=str)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    "shape", [(2, 7, 4, 8), (2, 7, 2, 4, 8), (3, 4, 8), (1, 2, 7, 3, 4, 8), (2, 7, 3, 4, 8), (7, 3, 4, 8)]
)
def test_other_shapes_are_refused(shape: tuple[int, ...], packed: bool, framework: Framework) -> None:
    if (shape == (2, 7, 3, 4, 8) and not packed) or (shape == (7, 3, 4, 8) and packed):
        return  # these shapes are right
    info = SeqInfo.from_lengths([3, 4]) if packed else None
    with pytest.raises(ShapeError, match=r"^qkv: expected shape (\[batch, seq|packed \[tokens), 3, heads, head_dim\]"):
        framework.frontend.attention_qkvpacked(framework.zeros(*shape), seq_info=info)


@pytest.mark.parametrize("framework", BOTH, ids=str)
def test_other_dtypes_are_refused_by_the_name_of_the_argument(framework: Framework) -> None:
    with pytest.raises(DTypeError, match=r"^qkv: expected one of float64, float32, bfloat16, float16, got int32"):
        framework.frontend.attention_qkvpacked(framework.zeros(2, 7, 3, 4, 8, dtype="int32"))


@pytest.mark.parametrize("framework", BOTH, ids=str)
def test_warm_up_answers_as_explain_does(framework: Framework) -> None:
    q, k, v = (framework.zeros(2, 7, 4, 8) for _ in range(3))
    options = {"causal": True, "softcap": 3.0, "needs_backward": True}
    assert framework.frontend.warm_up(q, k, v, **options) == framework.frontend.explain(q, k, v, **options)
    with pytest.raises(NotImplementedError, match="never falls back"):
        framework.frontend.warm_up(q, k, v, softcap=3.0, backend="sdpa_flash")


@pytest.mark.parametrize(
    ("given", "safe"),
    [
        ([0, 3, 3, 9], [0, 3, 3, 9]),
        ([2, 3, 1, 4], [0, 3, 3, 4]),
        ([-5, 100, 4, 8], [0, 9, 9, 9]),
        ([0, -1], [0, 0]),
    ],
)
def test_offsets_on_a_device_become_safe(given: list[int], safe: list[int]) -> None:
    assert offsets.clamp(torch.tensor(given, dtype=torch.int32), 9).tolist() == safe
