"""Tests rows whose logits are all large: only masks hide keys, and the weights sum to 1 in the backward, too."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("jax")
import torch
from both_frontends import judge, reachable, run
from frameworks import JAX, TORCH
from spec_strategies import LARGE, make_call

import torch_frontend
from attn_core.expressions import where

FRAMEWORKS = ("torch", "jax")
EXACT = (("torch", "math"), ("torch", "sdpa_flash"), ("jax", "math"), ("jax", "sdpa_flash"), ("jax", "jax_xla"))
QKV = (("q", 5, 4), ("k", 7, 2), ("v", 7, 2))
LOWEST = float(np.finfo(np.float32).min)
NEGATIVE, LOWEST_BFLOAT16 = -(2.0**30), LARGE["bfloat16"][-2]
SIZES = {"batch": 2, "q_len": 5, "kv_len": 7, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "value_dim": 8}


def gradients(framework: str, backend: str | None, dout: np.ndarray, **options: Any) -> list[np.ndarray]:
    """The output and the gradients of q, k and v of random numbers; arrays among the options are converted."""
    on = TORCH if framework == "torch" else JAX
    random = np.random.default_rng(0)
    arrays = {name: random.standard_normal((2, n, heads, 8), np.float32) for name, n, heads in QKV}
    return on.gradients(partial(on.frontend.attention, backend=backend, **on.arrays(options)), arrays, dout)


@pytest.mark.parametrize("value", [-1e4, -1e6, -1e9, -1e30, LOWEST, 1e9, 3e38])
@pytest.mark.parametrize(("framework", "backend"), [*EXACT, ("torch", None), ("jax", None)])
def test_the_weights_of_a_backward_sum_to_1(framework: str, backend: str | None, value: float) -> None:
    bias = np.zeros((1, 1, 5, 7), np.float32)
    bias[:, :, 2] = value
    dout = np.zeros((2, 5, 4, 8), np.float32)
    dout[:, 2] = 1.0
    _, _, _, dv = gradients(framework, backend, dout, bias=bias)
    # Each of the two query heads of a group gives its row's weights to the keys.
    np.testing.assert_allclose(dv.sum(1), 2.0, rtol=1e-3)


@pytest.mark.parametrize(("framework", "backend"), [*EXACT, ("torch", None), ("jax", None)])
def test_slopes_make_all_logits_large_if_a_mask_hides_near_keys(framework: str, backend: str | None) -> None:
    mask = abs(np.arange(5)[:, None] + 2 - np.arange(7)) == 2  # as alignment=bottom_right counts distances
    slopes = {"mask": mask[None, None], "alibi_slopes": np.full(4, 1e8, np.float32)}
    _, _, _, dv = gradients(framework, backend, np.ones((2, 5, 4, 8), np.float32), **slopes)
    np.testing.assert_allclose(dv.sum(1), 10.0, rtol=1e-3)


@pytest.mark.parametrize(("framework", "backend"), EXACT)
def test_a_large_bias_beside_alibi(framework: str, backend: str) -> None:
    """float32 loses the distances beside the bias, so all that is known of the weights is that they are a softmax's."""
    call = make_call(192, **SIZES, dtype="float32", bias_shape=(1, 4, 5, 7), alibi_shape=(4,), large=NEGATIVE)
    result = run(framework, call, backend)
    assert judge(framework, call, result).ok
    assert not judge(framework, call, {**result, "out": result["out"] * 16}).ok
    learned = replace(call, spec=replace(call.spec, needs_backward=True))
    assert judge(framework, learned, run(framework, learned, backend)).ok


@pytest.mark.parametrize("kind", ["bias", "mask", "alibi", "window", "causal", "sinks"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_torchs_cpu_kernel_computes_large_queries_apart(kind: str, dtype: str) -> None:
    """Rows of one batch row, of one head, and beside other tables; several blocks of the kernel's queries."""
    sizes = {**SIZES, "q_len": 150, "kv_len": 170, "dtype": dtype, "needs_backward": True}
    tables: dict[str, dict[str, Any]] = {
        "mask": {"mask_shape": (2, 1, 150, 170)},
        "alibi": {"alibi_shape": (2, 4)},
        "window": {"window": (9, 3)},
        "causal": {"causal": True},
        "sinks": {"sinks": True},
    }
    call = make_call(3, **sizes, bias_shape=(2, 4, 150, 170), **tables.get(kind, {}))
    bias = call.inputs.bias.copy()
    bias[0, 1, 5], bias[1, :, 40:47] = LOWEST / 2, LOWEST / 2
    call = replace(call, inputs=call.inputs._replace(bias=bias))
    verdict = judge("torch", call, run("torch", call, "sdpa_flash"))
    assert verdict.ok, verdict


@pytest.mark.parametrize(("framework", "backend"), [("torch", "math"), ("jax", "math"), ("jax", "jax_xla")])
def test_tiles_of_one_size_have_the_same_weights(framework: str, backend: str) -> None:
    bias = np.zeros((1, 1, 5, 7), np.float32)
    bias[:, :, 1], bias[:, :, 2], bias[:, :, 3, :4] = LOWEST, -1e9, 3e38
    dout = np.ones((2, 5, 4, 8), np.float32)
    plain, *_ = gradients(framework, backend, dout, bias=bias, causal=True)
    for invariant in ("batch", "prefix"):
        out, *_, dv = gradients(framework, backend, dout, bias=bias, invariant=invariant, causal=True)
        np.testing.assert_allclose(dv.sum(1), 10.0, rtol=1e-3)
        np.testing.assert_allclose(out, plain, atol=1e-5)


@pytest.mark.parametrize("fill", [LOWEST, -1e9, 3e38])
@pytest.mark.parametrize(("framework", "backend"), [("torch", "math"), ("jax", "math"), ("jax", "jax_xla")])
def test_a_score_function_hides_only_by_minus_infinity(framework: str, backend: str, fill: float) -> None:
    """Row 0 of ``q > k`` has equal scores, so it is the mean of the values."""
    dout = np.zeros((2, 5, 4, 8), np.float32)
    dout[:, 0] = 1.0
    scored = {"score_mod": lambda s, b, h, q, k: where(q > k, s, fill)}
    out, _, _, dv = gradients(framework, backend, dout, **scored)
    random = np.random.default_rng(0)
    _, _, v = (random.standard_normal((2, n, heads, 8), np.float32) for _, n, heads in QKV)
    np.testing.assert_allclose(out[:, 0], np.repeat(v.mean(1), 2, 1), atol=1e-5)
    np.testing.assert_allclose(dv, 2 / 7, rtol=1e-5)


@pytest.mark.parametrize(("framework", "backend"), [("torch", "math"), ("jax", "math"), ("jax", "jax_xla")])
def test_a_sum_beyond_the_largest_float_counts_as_it(framework: str, backend: str) -> None:
    bias = np.full((1, 1, 5, 7), LOWEST, np.float32)
    scored = {"score_mod": lambda s, b, h, q, k: where(q > k, s, LOWEST)}
    out, *_, dv = gradients(framework, backend, np.ones((2, 5, 4, 8), np.float32), bias=bias, **scored)
    assert np.isfinite(out).all()
    np.testing.assert_allclose(dv.sum(1), 10.0, rtol=1e-5)


@pytest.mark.parametrize("large", LARGE["float32"])
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_largest_logit(framework: str, large: float) -> None:
    call = make_call(**SIZES, dtype="float32", bias_shape=(2, 4, 5, 7), large=large)
    on = TORCH if framework == "torch" else JAX
    q, k, v, bias = (on.array(getattr(call.inputs, name), "float32") for name in ("q", "k", "v", "bias"))
    attention = partial(on.frontend.attention, return_max_logit=True)
    _, top = attention(q, k, v, bias=bias)
    # float32 loses the scores beside a large bias
    expected = np.full((2, 4), large) if large > 0 else np.asarray(top, np.float64)
    np.testing.assert_allclose(np.asarray(top, np.float64), expected)
    alone = attention(q[:, :1], k, v, bias=bias[:, :, :1])[1]
    np.testing.assert_allclose(np.asarray(alone, np.float64), large, rtol=1e-6)


@pytest.mark.parametrize("large", [LOWEST, 1.75 * 2.0**127])
def test_forward_mode(large: float) -> None:
    """Their tangents are those of a bias of 0, because equal logits are equal at any size."""
    torch.manual_seed(0)
    q, k, v, *moved = (torch.randn(1, n, 2, 8) for n in (5, 7, 7, 5, 7, 7))
    q.zero_()
    results = []
    for value in (large, 0.0):
        bias = torch.full((1, 1, 5, 7), value)

        def out(*qkv: Any, bias: Any = bias) -> Any:
            return torch_frontend.attention(*qkv, bias=bias, backend="math")

        still = (torch.zeros_like(q), torch.zeros_like(k), moved[2])
        results.append(torch.func.jvp(out, (q, k, v), still))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


OURS_ON_GPU = [("torch", "math"), ("jax", "jax_xla")]
FOREIGN_ON_GPU = [
    *(("torch", name) for name in ("sdpa_efficient", "sdpa_cudnn", "xformers", "flex")),
    ("jax", "jax_cudnn"),
]


def of_gpu(framework: str, backend: str, large: float) -> Any:
    missing = reachable(framework, backend, "cuda")
    if missing:
        pytest.skip(missing)
    sizes = {**SIZES, "q_len": 64, "kv_len": 128, "head_dim": 64, "value_dim": 64}
    return make_call(**sizes, dtype="bfloat16", bias_shape=(2, 4, 64, 128), large=large, needs_backward=True)


@pytest.mark.cuda
@pytest.mark.parametrize("large", [NEGATIVE, LOWEST_BFLOAT16])
@pytest.mark.parametrize(("framework", "backend"), OURS_ON_GPU)
def test_kernels_of_ours_on_a_gpu(framework: str, backend: str, large: float) -> None:
    call = of_gpu(framework, backend, large)
    verdict = judge(framework, call, run(framework, call, backend, "cuda"), "cuda")
    assert verdict.ok, verdict


@pytest.mark.cuda
@pytest.mark.parametrize(("framework", "backend"), FOREIGN_ON_GPU)
def test_the_forward_of_other_kernels_is_as_documented(framework: str, backend: str) -> None:
    call = of_gpu(framework, backend, NEGATIVE).inference
    verdict = judge(framework, call, run(framework, call, backend, "cuda"), "cuda")
    assert verdict.ok, verdict
    call = of_gpu(framework, backend, LOWEST_BFLOAT16).inference
    out = run(framework, call, backend, "cuda")["out"].astype(np.float32)
    assert not out[:, ::3].any() and out[:, 1::3].all()  # every third row has the lowest bias


@pytest.mark.cuda
@pytest.mark.xfail(reason="semantics.md does not promise it of kernels that are not ours", strict=False)
@pytest.mark.parametrize(("framework", "backend"), FOREIGN_ON_GPU)
def test_the_backward_of_other_kernels(framework: str, backend: str) -> None:
    call = of_gpu(framework, backend, NEGATIVE)
    assert judge(framework, call, run(framework, call, backend, "cuda"), "cuda").ok
