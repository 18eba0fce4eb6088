"""Tests jax_splash in Pallas's TPU interpret mode on a CPU: against the reference, by the mask probe, and its lowering.

The kernels never ran on a TPU. Interpret mode computes what they say, block by block, with NaN in memory that they have
not written; and a program that lowers for a TPU contains them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
import cpu_meshes
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pallas_tpu
from jax.sharding import NamedSharding, PartitionSpec
from oracle_cases import Case, fill

import jax_frontend
from attn_core import AttentionSpec, Target, explain
from attn_core.backends.jax_splash import backend as jax_splash
from attn_core.backends.jax_splash.visibility import InBand
from attn_core.call.masks import Band
from attn_core.call.tensors import Gradients, Inputs
from attn_core.correctness import accuracy
from jax_frontend.dispatch import plan

COLLECTIVE = re.compile(r" (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(")
SIZES = {"batch": 1, "num_heads": 2, "num_kv_heads": 1, "head_dim": 11, "value_dim": 13, "dtype": "float32"}
DENSE = AttentionSpec(**SIZES, q_len=131, kv_len=137, needs_backward=True)  # two blocks, mostly padding
LENGTHS = ((31, 0, 53, 40, 3), (29, 11, 0, 71, 3))
PACKED = replace(DENSE, q_len=127, kv_len=114, documents=5, max_len_q=53, max_len_k=71)
CASES = {
    "plain": DENSE,
    "whole blocks": replace(DENSE, q_len=128, kv_len=256, num_kv_heads=2),
    "two rows, causal": replace(DENSE, batch=2, causal=True),
    "causal, top left, rows that see nothing": replace(
        DENSE, q_len=300, causal=True, window=(5, 0), alignment="top_left"
    ),
    "causal, rows that see nothing": replace(DENSE, q_len=137, kv_len=5, causal=True, sinks=True),
    "window": replace(DENSE, window=(7, 3)),
    "softcap, sinks": replace(DENSE, softcap=1.5, sinks=True, scale=0.9, num_heads=4, num_kv_heads=2),
    "bfloat16, causal": replace(DENSE, dtype="bfloat16", causal=True, sinks=True, head_dim=72, scale=None),
    "bfloat16, scaled by a power of two": replace(DENSE, dtype="bfloat16", head_dim=64, scale=None),
    "packed": PACKED,
    "packed, causal, sinks": replace(PACKED, causal=True, sinks=True),
    "packed, window, top left": replace(PACKED, window=(4, 2), alignment="top_left", softcap=2.0),
}


def case_of(spec: AttentionSpec) -> Case:
    return fill(spec, 3, *(LENGTHS if spec.packed else ()))


def arrays_of(spec: AttentionSpec, inputs: Inputs) -> Inputs:
    """The inputs as JAX arrays of the call's dtype; offsets stay int32."""
    dtypes = {"cu_seqlens_q": jnp.int32, "cu_seqlens_k": jnp.int32, "sinks": jnp.float32}
    return Inputs(
        *(
            None if array is None else jnp.asarray(array, dtypes.get(name, spec.dtype))
            for name, array in inputs._asdict().items()
        )
    )


def double(array: Any) -> Any:
    return None if array is None else np.asarray(array, np.float64)


def results_of(spec: AttentionSpec, inputs: Inputs, dout: Any = None) -> tuple[Any, Any, Gradients | None]:
    """out, lse and the gradients of a call in interpret mode, in float64."""
    arrays = arrays_of(spec, inputs)
    with pallas_tpu.force_tpu_interpret_mode():
        out, lse = jax.jit(lambda inputs: jax_splash.forward(spec, inputs))(arrays)
        gradients = None
        if dout is not None:
            dout = jnp.asarray(dout, spec.dtype)
            gradients = jax.jit(lambda *args: jax_splash.backward(spec, *args, None))(arrays, out, lse, dout)
    assert out.dtype == spec.dtype and lse.dtype == "float32"
    lse = double(lse)
    if spec.sinks:  # the frontends insert the sink of a row that sees no key
        lse = np.where(lse == -np.inf, inputs.sinks[:, None], lse)
    return double(out), lse, gradients and Gradients(*map(double, gradients))


@pytest.mark.sampled
@pytest.mark.parametrize("name", CASES)
def test_it_is_right_in_interpret_mode(name: str) -> None:
    spec = CASES[name]
    assert explain(spec, Target("jax", "tpu"), "jax_splash").reasons("jax_splash") == ()
    case = case_of(spec)
    out, lse, gradients = results_of(spec, case.inputs, case.dout)
    verdict = accuracy.check(spec, case.inputs, out=out, lse=lse, gradients=gradients, dout=case.dout)
    assert verdict.ok, verdict


PROBES = {
    "causal window": replace(DENSE, value_dim=137, causal=True, window=(9, 0), needs_backward=False),
    "documents": replace(PACKED, value_dim=114, causal=True, needs_backward=False),
}


@pytest.mark.parametrize("name", PROBES)
def test_the_mask_probe_sees_exactly_the_visible_keys(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = PROBES[name]
    inputs = case_of(spec).inputs
    probe = accuracy.mask_probe(spec, cu_seqlens_q=inputs.cu_seqlens_q, cu_seqlens_k=inputs.cu_seqlens_k)
    assert probe.calls == 1

    def shown() -> np.ndarray:
        return probe.visible_pairs(results_of(spec, inputs)[0] for inputs in probe.inputs())

    assert (shown() == probe.expected).all()
    # A planted fault: one more key to the right.
    moved = dict(jax_splash.lower(spec))
    moved["visible"] = InBand(moved["visible"].edge._replace(right=1), moved["visible"].kv_len)
    monkeypatch.setattr(jax_splash, "lower", lambda spec: moved)
    assert (shown() != probe.expected).any()


@pytest.mark.parametrize(
    "changes", [{"dtype": "bfloat16", "causal": True}, {"sinks": True, "softcap": 3.0, "batch": 2}]
)
@pytest.mark.parametrize("spec", [DENSE, PACKED], ids=["dense", "packed"])
def test_it_lowers_for_a_tpu(spec: AttentionSpec, changes: dict[str, Any]) -> None:
    spec = replace(spec, **{name: value for name, value in changes.items() if name != "batch" or not spec.packed})
    case = case_of(spec)
    arrays, dout = arrays_of(spec, case.inputs), jnp.asarray(case.dout, spec.dtype)

    def both(inputs: Inputs, dout: Any) -> Any:
        out, lse = jax_splash.forward(spec, inputs)
        return out, lse, jax_splash.backward(spec, inputs, out, lse, dout, None)

    program = jax.export.export(jax.jit(both), platforms=["tpu"])(arrays, dout)
    # Two forwards, which XLA merges, and the kernels of dq, and of dk and dv.
    assert program.mlir_module().count("tpu_custom_call") == 4
    assert [aval.shape for aval in program.out_avals[:2]] == [spec.out_shape, spec.lse_shape]


LOWERED = {
    "blocks": (128, 128),
    "lengths": (256, 256),
    "path": "whole",
    "rest": False,
    "scale": DENSE.scale,
    "softcap": None,
    "visible": None,
    "widths": (128, 128),
}


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (replace(DENSE, q_len=256, kv_len=256), {"blocks": (256, 256)}),
        (
            DENSE,  # padded keys must be hidden
            {"path": "band", "blocks": (256, 256), "visible": InBand(Band(None, None, 6), 137)},
        ),
        (
            replace(DENSE, q_len=1024, kv_len=1152, causal=True),
            {
                "path": "band",
                "blocks": (512, 128),
                "lengths": (1024, 1152),
                "visible": InBand(Band(None, 0, 128), 1152),
            },
        ),
        (
            replace(DENSE, q_len=384, kv_len=384, causal=True, alignment="top_left", dtype="bfloat16", head_dim=65),
            {
                **{
                    "path": "band",
                    "blocks": (128, 128),
                    "lengths": (384, 384),
                    "visible": InBand(Band(None, 0, 0), 384),
                },
                **{"rest": True, "widths": (256, 128)},
            },
        ),
        (
            replace(
                DENSE, q_len=384, kv_len=384, dtype="bfloat16", head_dim=256, value_dim=200, softcap=2.0, scale=None
            ),
            {"lengths": (384, 384), "scale": 1 / 16, "widths": (256, 256), "softcap": 2.0},
        ),
        (PACKED, {"path": "packed", "lengths": (128, 128)}),
        (
            replace(PACKED, window=(3, 2)),
            {"path": "packed", "lengths": (128, 128), "visible": InBand(Band(3, 2, 0), 128)},
        ),
    ],
)
def test_lower(spec: AttentionSpec, expected: dict[str, Any]) -> None:
    assert jax_splash.lower(spec) == {**LOWERED, **expected}


@pytest.fixture
def on_a_tpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As on a TPU: planned for one, with Pallas's other interpret mode, which has no effects that JAX would forbid."""
    from jax.experimental import pallas

    compiled = pallas.pallas_call
    monkeypatch.setattr(plan, "device_name", lambda array: "tpu")
    monkeypatch.setattr(pallas, "pallas_call", lambda *args, **named: compiled(*args, **{**named, "interpret": True}))
    jax.clear_caches()  # the kernels of other tests are compiled for other modes
    yield
    jax.clear_caches()


def test_batch_and_heads_stay_split_over_a_mesh(on_a_tpu: None, four_devices: None) -> None:
    mesh = cpu_meshes.mesh((2, 2), ("data", "model"))
    q, k, v = (jnp.asarray(np.random.default_rng(5).normal(size=(2, *shape)), "float32") for shape in SHAPES)

    # Forward alone: XLA may compile an interpreted backward over a mesh for more than ten minutes.
    attend = partial(jax_frontend.attention, causal=True)
    place = NamedSharding(mesh, PartitionSpec("data", None, "model"))
    split = [jax.device_put(array, place) for array in (q, k, v)]
    program = jax.jit(partial(attend, backend="jax_splash")).lower(*split).compile()
    assert not COLLECTIVE.findall(program.as_text())
    out = program(*split)
    np.testing.assert_allclose(out, attend(q, k, v, backend="jax_xla"), rtol=2e-5, atol=2e-5)
    assert out.sharding.is_equivalent_to(place, 4)


def test_a_scan_of_remat(on_a_tpu: None) -> None:
    """Two layers that are recomputed in the backward."""
    q, k, v = (jnp.asarray(np.random.default_rng(5).normal(size=(1, *shape)), "float32") for shape in SHAPES)

    def loss(q: Any, backend: str = "jax_splash") -> Any:
        attend = jax.checkpoint(lambda q, _: (jax_frontend.attention(q, k, v, causal=True, backend=backend), None))
        return (jax.lax.scan(attend, q, None, length=2)[0] ** 2).sum()

    results, expected = (jax.value_and_grad(partial(loss, backend=name))(q) for name in ("jax_splash", "jax_xla"))
    for actual, wanted in zip(results, expected, strict=True):
        np.testing.assert_allclose(actual, wanted, rtol=2e-5, atol=2e-5)


def test_the_front_door_runs_it_by_name_on_a_tpu(on_a_tpu: None) -> None:
    q, k, v = (jnp.asarray(np.random.default_rng(5).normal(size=(2, *shape)), "float32") for shape in SHAPES)
    sinks = jnp.asarray([0.5, -1.0, 0.0, 2.0])

    def loss(backend: str | None) -> Any:
        def run(q: Any, k: Any, v: Any, sinks: Any) -> Any:
            out = jax_frontend.attention(q, k, v, causal=True, sinks=sinks, backend=backend)
            return (out**2).sum()

        return jax.grad(run, argnums=(0, 1, 2, 3))(q, k, v, sinks)

    for actual, expected in zip(loss("jax_splash"), loss(None), strict=True):
        np.testing.assert_allclose(actual, expected, atol=2e-5)
    out, lse = jax_frontend.attention(q, k, v, causal=True, sinks=sinks, backend="jax_splash", return_lse=True)
    same, same_lse = jax_frontend.attention(q, k, v, causal=True, sinks=sinks, return_lse=True)
    np.testing.assert_allclose(out, same, atol=2e-6)
    np.testing.assert_allclose(lse, same_lse, atol=2e-6)


SHAPES = ((19, 4, 8), (17, 2, 8), (17, 2, 8))
"""Of q, k and v without the batch; the first two queries see no key."""
