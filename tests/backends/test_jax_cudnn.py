"""Tests cuDNN through jax.nn: its arguments, what is refused, and the arithmetic around it with XLA in its place."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
import jax.numpy as jnp
from oracle_cases import fill

from attn_core import AttentionSpec, Target, explain
from attn_core.backends import jax_cudnn
from attn_core.backends.shared import known_bad
from attn_core.backends.shared.claims import unmet_claims
from attn_core.backends.support import Build
from attn_core.call.tensors import Gradients, Inputs
from attn_core.correctness import accuracy

SPEC = AttentionSpec(
    batch=2, q_len=6, kv_len=10, num_heads=4, num_kv_heads=2, head_dim=16, value_dim=16, dtype="bfloat16"
)
SQUARE = replace(SPEC, q_len=10)
PLAIN = {"scale": 0.25, "implementation": "cudnn", "return_residual": False}
NEW, OLD = Build("cuDNN 9.26.1", version=(9, 26, 1)), Build("cuDNN 9.19.0", version=(9, 19, 0))


def reasons(spec: AttentionSpec, device: str = "sm90", build: Build | None = NEW) -> tuple[str, ...]:
    """Every reason of the claims, of the module's own rules and of the known faults."""
    claims = jax_cudnn.BACKWARD if spec.needs_backward else jax_cudnn.FORWARD
    faults = known_bad.refusals("jax_cudnn", spec, device, build.version if build else ())
    return (*unmet_claims(claims, spec, device), *jax_cudnn.refuses(spec, device, build), *faults)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (SPEC, {}),
        (replace(SPEC, needs_backward=True), {"return_residual": True}),
        (replace(SPEC, causal=True, alignment="top_left"), {"is_causal": True}),
        (replace(SQUARE, causal=True), {"is_causal": True}),
        (replace(SPEC, q_len=1, causal=True), {}),  # one query at the end sees every key
        (replace(SQUARE, causal=True, window=(3, None)), {"is_causal": True, "local_window_size": (3, 0)}),
        (replace(SQUARE, window=(3, 0)), {"is_causal": True, "local_window_size": (3, 0)}),
        (replace(SQUARE, window=(0, 0)), {"is_causal": True, "local_window_size": (0, 0)}),
        (replace(SQUARE, window=(9, 0)), {"is_causal": True}),  # the window reaches every key before the diagonal
        (replace(SQUARE, window=(9, 9)), {}),
        (replace(SQUARE, mask_shape=(2, 1, 10, 10), causal=True), {"is_causal": True}),
        (replace(SQUARE, mask_shape=(2, 1, 10, 10), causal=True, window=(3, 0)), {}),  # part of the additive array
        (replace(SPEC, bias_shape=(1, 4, 6, 10), causal=True), {}),
        (replace(SPEC, mask_shape=(2, 1, 1, 10), dtype="float16"), {}),
    ],
)
def test_lower(spec: AttentionSpec, expected: dict[str, Any]) -> None:
    assert jax_cudnn.lower(spec) == {**PLAIN, **expected}
    assert reasons(spec) == ()


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (
            replace(SPEC, causal=True),
            "alignment=bottom_right with q_len 6 and kv_len 10: cuDNN through jax.nn has top_left",
        ),
        (
            replace(SQUARE, window=(3, 1)),
            "window=(3, 1): cuDNN through jax.nn has none that is open or positive to the right",
        ),
        (
            replace(SQUARE, window=(3, None)),
            "window=(3, None): cuDNN through jax.nn has none that is open or positive to the right",
        ),
        (
            replace(SPEC, q_len=13, window=(2, 0), alignment="top_left"),
            "window=(2, 0) with q_len 13 and kv_len 10: cuDNN through jax.nn has no rows that see nothing",
        ),
        (
            replace(SPEC, q_len=11, window=(2, 0), alignment="top_left"),
            "window=(2, 0) with q_len 11 and kv_len 10: cuDNN has windows for q_len <= kv_len",
        ),
        (
            replace(SPEC, batch=32, q_len=1024, kv_len=1024, mask_shape=(32, 1, 1, 1024)),
            "mask of shape [32, 1, 1, 1024]: cuDNN through jax.nn needs all rows and keys, 33554432 elements; "
            "at most 16777216 are added",
        ),
        (
            replace(SPEC, bias_shape=(1, 1, 6, 10), bias_dtype="float32"),
            "bias in float32 with bfloat16: cuDNN through jax.nn would round it",
        ),
        (
            replace(SPEC, bias_shape=(1, 1, 6, 10), bias_gradient=True, needs_backward=True),
            "gradient of the bias: cuDNN through jax.nn has none",
        ),
        (
            replace(SPEC, q_len=5, needs_backward=True),
            "backward: q_len 5 and kv_len 10: jax.nn has gradients of cuDNN's attention for even lengths",
        ),
        (replace(SPEC, kv_len=1), "kv_len=1: cuDNN's kernel needs two keys"),
        (replace(SPEC, batch=65536), "batch=65536: cuDNN stops at 65535"),
        (replace(SPEC, softcap=2.0), "softcap=2.0: cuDNN through jax.nn has none"),
        (replace(SPEC, return_lse=True), "return_lse: cuDNN through jax.nn has no log-sum-exp output"),
        (replace(SPEC, head_dim=12, value_dim=12), "head_dim=12: cuDNN through jax.nn takes multiples of 8"),
        (replace(SPEC, batch=1, documents=2), "seq_info with packed documents: cuDNN through jax.nn has none"),
        (replace(SPEC, needs_backward=True, deterministic=True), "deterministic=True: cuDNN through jax.nn has none"),
    ],
)
def test_refusals_name_the_value(spec: AttentionSpec, expected: str) -> None:
    assert reasons(spec) == (expected,)


def test_the_cudnn_version_decides_what_is_supported() -> None:
    wide = replace(SPEC, head_dim=256, value_dim=256)
    assert reasons(wide) == reasons(wide, "sm90", OLD) == ()
    assert reasons(wide, "sm100") == ("head_dim=256 on sm100: cuDNN 9.26.1 stops at 128",)
    assert reasons(wide, "sm90", None)[0] == "head_dim=256 on sm90: cuDNN (of unknown version) stops at 128"
    nan = replace(SPEC, q_len=64, kv_len=192, needs_backward=True)
    masked = replace(nan, causal=True, q_len=192, mask_shape=(1, 1, 192, 192))
    for spec in (nan, masked):
        (why,) = reasons(spec, "sm90", OLD)
        assert why.startswith("backward: kv_len=192, ") and "NaN in dq" in why and "cuDNN 9.19.0" in why
    assert reasons(nan) == reasons(nan, "sm80", OLD) == reasons(replace(nan, kv_len=128), "sm90", OLD) == ()
    assert reasons(replace(nan, causal=True, q_len=192), "sm90", OLD) == ()


def test_only_jax_can_use_it() -> None:
    assert "runs in JAX only" in explain(SPEC, Target("torch", "sm90"), "jax_cudnn").reasons("jax_cudnn")
    there = Target("jax", "sm90", builds=(("jax_cudnn", OLD),))
    assert explain(SPEC, there, "jax_cudnn").backend == "jax_cudnn"
    nan = replace(SPEC, q_len=64, kv_len=192, needs_backward=True)
    assert "cuDNN 9.19.0" in explain(nan, there, "jax_cudnn").reasons("jax_cudnn")[0]


def test_the_build_is_the_version_of_the_loaded_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax_cudnn, "_cudnn_version", lambda: 91900)
    assert jax_cudnn.build() == OLD and jax_cudnn.probe() == jax.__version__
    monkeypatch.undo()
    monkeypatch.setattr(jax_cudnn, "VERSIONS", ("no_such_plugin",))
    with pytest.raises(ImportError, match="no_such_plugin"):
        jax_cudnn.probe()


# The arithmetic around jax.nn, with its XLA implementation, which takes the same arguments


@pytest.fixture
def without_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    real = jax_cudnn.attention_of_jax()

    def run(*arrays: Any, **keywords: Any) -> Any:
        return real(*arrays, **{**keywords, "implementation": "xla"})

    monkeypatch.setattr(jax_cudnn, "attention_of_jax", lambda: run)


@pytest.mark.sampled
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"q_len": 10, "causal": True, "window": (3, None)},
        {"causal": True, "alignment": "top_left", "q_len": 12},
        {"mask_shape": (2, 1, 6, 10)},
        {"mask_shape": (1, 4, 10, 10), "q_len": 10, "causal": True},
        {"mask_shape": (2, 1, 1, 10), "causal": True},
        {"mask_shape": (2, 1, 6, 10), "window": (3, 2)},
        {"mask_shape": (2, 1, 6, 10), "bias_shape": (1, 4, 6, 1)},
        {"bias_shape": (1, 4, 6, 10)},
        {"bias_shape": (2, 1, 10, 10), "q_len": 10, "causal": True},
    ],
)
def test_forward_and_gradients_match_the_reference(changes: dict[str, Any], without_cudnn: None) -> None:
    spec = replace(SPEC, needs_backward=True, **changes)
    assert reasons(spec) == ()
    case = fill(spec, 3)
    given = case.inputs
    if given.mask is not None:
        last = given.mask.shape[2] - 1
        given.mask[0, 0, min(2, last)] = (
            False  # one row is empty by the mask alone, one by the mask and causal together
        )
        given.mask[-1, -1, min(3, last), :4] = False
    arrays = Inputs(*(None if a is None else jnp.asarray(a, bool if a.dtype == bool else spec.dtype) for a in given))
    dout = jnp.asarray(case.dout, spec.dtype)
    out, lse = jax.jit(lambda inputs: jax_cudnn.forward(spec, inputs))(arrays)
    actual = jax.jit(lambda *tensors: jax_cudnn.backward(spec, tensors[0], out, lse, tensors[1], None))(arrays, dout)
    assert lse is None and out.dtype == spec.dtype
    expected = accuracy.expect(spec, given, dout=np.asarray(case.dout))
    gradients = Gradients(*(None if part is None else np.asarray(part) for part in actual))
    verdict = expected.judge(out=np.asarray(out), lse=None, gradients=gradients)
    assert verdict.ok, verdict
    if given.mask is not None:
        empty = (slice(None), 2) if spec.mask_shape == (1, 4, 10, 10) else (0, 2)
        heads = np.s_[0] if spec.mask_shape == (1, 4, 10, 10) else np.s_[:]
        assert not np.asarray(out[empty])[..., heads, :].any() and not np.asarray(actual.dq[empty])[..., heads, :].any()


def test_the_exported_custom_calls_are_those_of_jax() -> None:
    names = pytest.importorskip("jax._src.cudnn.fused_attention_stablehlo")._custom_name_maps.values()
    assert set(jax_cudnn.CUSTOM_CALLS) == {name for name in names if not name.endswith("F8")}


@pytest.mark.cuda
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("gradients", [False, True])
def test_a_program_with_cudnn_is_exported(bias: bool, gradients: bool) -> None:
    import jax.export

    import jax_frontend

    rng = np.random.default_rng(4)
    q, k, v = (jnp.asarray(rng.standard_normal((2, 12, 2, 16)), jnp.bfloat16) for _ in range(3))
    table = jnp.asarray(rng.standard_normal((1, 2, 12, 12)), jnp.bfloat16) if bias else None

    def call(q: Any, k: Any, v: Any) -> Any:
        return jax_frontend.attention(q, k, v, bias=table, backend="jax_cudnn")

    run = jax.jit(jax.grad(lambda *x: call(*x).astype(jnp.float32).sum(), (0, 1, 2)) if gradients else call)
    exported = jax.export.export(run, disabled_checks=jax_frontend.export_checks())(q, k, v)
    for result, expected in zip(jax.tree.leaves(exported.call(q, k, v)), jax.tree.leaves(run(q, k, v)), strict=True):
        assert np.array_equal(np.asarray(result, np.float32), np.asarray(expected, np.float32))
