"""The proof of the bridge: for one backend, torch's results and JAX's are equal bit for bit, and so are repeated runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("jax")
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import torch  # noqa: E402
from both_frontends import DEVICES, FRAMEWORKS, backends_of, run, same_bits, target  # noqa: E402
from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from spec_strategies import SIGNATURES, Call, calls, make_call  # noqa: E402

import jax_frontend  # noqa: E402
import torch_frontend  # noqa: E402
from attn_core import backends, explain  # noqa: E402

BRIDGED = backends_of("torch")


def accepted_by(framework: str, backend: str, call: Call, device: str) -> Call | None:
    """The call, or the same without gradients, or None: the most that the backend accepts."""
    for attempt in (call, call.inference):
        if explain(attempt.spec, target(framework, device), backend).backend is not None:
            return attempt
    return None


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", BRIDGED)
def test_torch_and_jax_give_the_same_bits(backend: str, device: str) -> None:
    """out, lse, dq, dk, dv, dbias and dsinks, inside ``jax.jit``; contiguous inputs, as JAX has no others."""
    compared: list[bool] = []

    @given(call=calls(backends.load(backend).FORWARD, without=("dropout",)))
    def every_call(call: Call) -> None:
        call = replace(call, layout="contiguous")
        accepted = accepted_by("jax", backend, call, device)
        compared.append(accepted is not None)
        if accepted is not None:
            different = same_bits(run("torch", accepted, backend, device), run("jax", accepted, backend, device))
            assert different == [], f"{backend}: {accepted}"

    every_call()
    runs_here = backends.load(backend).FORWARD.runs_on(target("jax", device).device)
    assert sum(compared) > len(compared) / 2 if runs_here else not any(compared)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("backend", BRIDGED)
def test_deterministic_means_the_same_bits_every_time(framework: str, backend: str, device: str) -> None:
    @given(call=calls(backends.load(backend).FORWARD, without=("dropout",) if framework == "jax" else ()))
    def every_call(call: Call) -> None:
        accepted = accepted_by(framework, backend, replace(call, spec=replace(call.spec, deterministic=True)), device)
        if accepted is not None:
            first, *others = (run(framework, accepted, backend, device) for _ in range(3))
            assert all(same_bits(first, other) == [] for other in others), f"{backend} in {framework}: {accepted}"

    every_call()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", backends_of("jax"))
@pytest.mark.parametrize("signature", [1, 5, 10])
def test_jax_kernels_are_deterministic(backend: str, signature: int, device: str) -> None:
    fields = SIGNATURES[signature]
    lengths = ((5, 0, 7, 1), (4, 3, 10, 0)) if "documents" in fields else None
    call = make_call(7, lengths, **fields, needs_backward=True, deterministic=True)
    if explain(call.spec, target("jax", device), backend).backend is None:
        pytest.skip(f"{backend} refuses this call")
    first, *others = (run("jax", call, backend, device) for _ in range(5))
    assert all(same_bits(first, other) == [] for other in others)


HEADS = {"num_heads": 6, "num_kv_heads": 2, "head_dim": 16, "value_dim": 16}
SIZES = {"batch": 2, "q_len": 29, "kv_len": 31, **HEADS, "dtype": "float32"}


@pytest.mark.parametrize("transformation", ["eager", "jit", "checkpoint", "scan", "value_and_grad"])
@pytest.mark.parametrize("backend", BRIDGED)
def test_every_way_into_jax_gives_the_same_bits(backend: str, transformation: str) -> None:
    call = make_call(3, **SIZES, causal=True)
    expected = run("torch", call, backend)["out"]
    q, k, v = (jnp.asarray(call.arrays()[name], "float32") for name in "qkv")

    def attend(q: Any, k: Any, v: Any) -> Any:
        return jax_frontend.attention(q, k, v, causal=True, backend=backend)

    def scanned(q: Any, k: Any, v: Any) -> Any:
        return jax.lax.scan(lambda carry, row: (carry, attend(row, k, v)), 0, q[None])[1][0]

    def valued(q: Any, k: Any, v: Any) -> Any:
        def total(q: Any) -> tuple[Any, Any]:
            out = attend(q, k, v)
            return out.sum(), out

        return jax.value_and_grad(total, has_aux=True)(q)[0][1]

    ways = {"eager": attend, "jit": jax.jit(attend), "checkpoint": jax.checkpoint(attend)}
    if transformation == "value_and_grad" and backends.load(backend).BACKWARD is None:
        pytest.skip(f"{backend} has no gradient")
    way = ways.get(transformation) or {"scan": jax.jit(scanned), "value_and_grad": valued}[transformation]
    assert same_bits({"out": np.asarray(way(q, k, v))}, {"out": expected}) == []


@pytest.mark.parametrize("backend", BRIDGED)
def test_torch_with_and_without_gradients_gives_the_same_bits(backend: str) -> None:
    """Whether anybody wants a gradient must not choose another kernel behind the same name."""
    if backends.load(backend).BACKWARD is None:
        pytest.skip(f"{backend} has no gradient")
    for fields in ({}, {"causal": True}, {"window": (2, 1)}):
        call = make_call(5, **SIZES, **fields, needs_backward=True)
        trained, inferred = run("torch", call, backend), run("torch", call.inference, backend)
        assert same_bits({"out": trained["out"]}, inferred) == []


@given(bits=st.lists(st.integers(0, 2**16 - 1), min_size=1, max_size=40))
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_single_key_is_handed_over_untouched(dtype: str, bits: list[int]) -> None:
    """With one key the output is v, whatever its bits say: zeros of either sign, subnormals, the largest numbers."""
    v = torch.tensor(bits, dtype=torch.int32).to(torch.int16).view(getattr(torch, dtype))
    v = torch.where(v.isfinite(), v, 0)[None, None, None, :]
    q = torch.ones((1, 1, 1, 3), dtype=v.dtype)
    ours = torch_frontend.attention(q, q, v, backend="math")
    theirs = jax_frontend.attention(*(jnp.asarray(t.float().numpy(), dtype) for t in (q, q, v)), backend="math")
    assert torch.equal(ours, v)
    np.testing.assert_array_equal(np.asarray(theirs).astype(np.float32), v.float().numpy())
