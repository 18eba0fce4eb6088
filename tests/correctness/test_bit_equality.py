"""Tests that one backend gives torch and JAX the same bits, and the same bits every time."""

from __future__ import annotations

from collections.abc import Callable
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
from both_frontends import (
    COMPILED_ON_GPUS,
    DEVICES,
    FRAMEWORKS,
    Results,
    backends_of,
    claimed,
    compiles_for_long,
    module_on,
    number_of_draws,
    reachable,
    run,
    same_bits,
    target,
    with_every_token,
)
from hypothesis import HealthCheck, assume, given, settings
from oracle_cases import rounded
from spec_strategies import SIGNATURES, Call, calls, compiled_calls, few_numbers, make_call

import jax_frontend
import torch_frontend
from attn_core import Target, backends, explain

pytestmark = pytest.mark.sampled

BRIDGED = backends_of("torch")


def accepted_by(framework: str, backend: str, call: Call, device: str) -> Call | None:
    """The call, or the same call without gradients, or None: the most that the backend accepts."""
    for attempt in (call, call.inference):
        if explain(with_every_token(attempt), target(framework, device), backend).backend is not None:
            return attempt
    return None


def deterministic_call(call: Call, backend: str, device: str) -> Call:
    """Returns the call with ``deterministic=True`` if only that promises equal bits (a GPU may add in any order)."""
    if device == "cpu" or not module_on(backend, device).forward_claims.deterministic:
        return call
    return replace(call, spec=replace(call.spec, deterministic=True))


def results_of_the_kernel(call: Call, results: Results) -> Results:
    """The results without dsinks if a row sees no key, because each framework adds the gradient of such a row
    itself."""
    if "dsinks" not in results or "lse" not in results:
        return results
    alone = results["lse"] == call.arrays()["sinks"].astype(results["lse"].dtype)[:, None]
    return {name: actual for name, actual in results.items() if name != "dsinks" or not alone.any()}


def drawn_for(backend: str, device: str, framework: str = "jax") -> Any:
    claims = module_on(backend, device).forward_claims
    if compiles_for_long(backend, device):
        return compiled_calls(claims)
    without = ("dropout",) if framework == "jax" or not claims.portable_dropout else ()
    random_arrays = calls(claims, without=without, squares=(64, 192) if claims.approximate else ())
    return random_arrays.map(few_numbers) if backend == "flash4" else random_arrays


@pytest.mark.parametrize(("backend", "device"), claimed(BRIDGED))
def test_torch_and_jax_give_the_same_bits(backend: str, device: str) -> None:
    """out, lse, dq, dk, dv, dbias and dsinks inside ``jax.jit``; inputs are contiguous, because JAX has no others."""
    compared: list[bool] = []
    claims = module_on(backend, device).forward_claims
    if missing := reachable("jax", backend, device):
        pytest.skip(missing)

    # Few calls are drawn for a GPU, fewer still if each compiles. So calls that are refused do not count there.
    counted = device == "cpu" or claims.approximate
    count = number_of_draws(backend, device)
    count = (count + 1) // 2 if device == "cuda" and backend in COMPILED_ON_GPUS else count

    @settings(max_examples=count, suppress_health_check=list(HealthCheck))
    @given(call=drawn_for(backend, device))
    def every_call(call: Call) -> None:
        call = deterministic_call(replace(call, layout="contiguous"), backend, device)
        accepted = accepted_by("jax", backend, call, device)
        assume(accepted is not None or counted)
        compared.append(accepted is not None)
        if accepted is not None:
            results = [results_of_the_kernel(accepted, run(name, accepted, backend, device)) for name in FRAMEWORKS]
            if not claims.deterministic:  # its log-sum-exp and gradients may differ from run to run
                results = [{"out": actual["out"]} for actual in results]
            different = same_bits(*results)
            assert different == [], f"{backend}: {accepted}"

    every_call()
    if claims.approximate and not any(compared):
        pytest.skip(f"{backend} refuses all that was drawn")
    assert claims.approximate or sum(compared) > len(compared) / 4  # else too few calls were compared


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize(("backend", "device"), claimed(BRIDGED))
def test_deterministic_means_the_same_bits_every_time(backend: str, device: str, framework: str) -> None:
    if missing := reachable(framework, backend, device):
        pytest.skip(missing)
    requested: list[bool] = []

    @settings(max_examples=(number_of_draws(backend, device) + 1) // 3)
    @given(call=drawn_for(backend, device, framework))
    def every_call(call: Call) -> None:
        accepted = accepted_by(framework, backend, replace(call, spec=replace(call.spec, deterministic=True)), device)
        requested.append(accepted is not None)
        if accepted is not None:
            first, *others = (run(framework, accepted, backend, device) for _ in range(3))
            assert all(same_bits(first, other) == [] for other in others), f"{backend} in {framework}: {accepted}"

    every_call()
    if not any(requested):
        pytest.skip(f"{backend} promises no bits, or refuses all that was drawn")


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


ON_CPU = tuple(param.values[0] for param in claimed(BRIDGED, "cpu"))


@pytest.mark.parametrize("transformation", ["eager", "jit", "checkpoint", "scan", "value_and_grad"])
@pytest.mark.parametrize("backend", ON_CPU)
def test_jax_transformations_give_the_same_bits(backend: str, transformation: str) -> None:
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
    if transformation == "value_and_grad" and backends.load(backend).backward_claims is None:
        pytest.skip(f"{backend} has no gradient")
    way = ways.get(transformation) or {"scan": jax.jit(scanned), "value_and_grad": valued}[transformation]
    assert same_bits({"out": np.asarray(way(q, k, v))}, {"out": expected}) == []


@pytest.mark.parametrize("backend", ON_CPU)
def test_torch_with_and_without_gradients_gives_the_same_bits(backend: str) -> None:
    """Whether a gradient is required must not choose another kernel of the same name."""
    if backends.load(backend).backward_claims is None:
        pytest.skip(f"{backend} has no gradient")
    for fields in ({}, {"causal": True}, {"window": (2, 1)}):
        call = make_call(5, **SIZES, **fields, needs_backward=True)
        trained, inferred = run("torch", call, backend), run("torch", call.inference, backend)
        assert same_bits({"out": trained["out"]}, inferred) == []


def scaled(dtype: str, values: float, gradients: float) -> Call:
    """A call whose v and dout are standard normal times a power of two far from 1."""
    sizes = {"batch": 1, "q_len": 9, "kv_len": 9, "num_heads": 2, "num_kv_heads": 2, "head_dim": 16, "value_dim": 16}
    call = make_call(**sizes, dtype=dtype, causal=True, needs_backward=True)
    v, dout = rounded(call.inputs.v * values, dtype), rounded(call.dout * gradients, dtype)
    return replace(call, inputs=call.inputs._replace(v=v), dout=dout)


TRAINABLE = [name for name in ON_CPU if backends.load(name).backward_claims is not None]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64", "float16"])
@pytest.mark.parametrize("backend", TRAINABLE)
def test_large_and_signed_values_give_the_same_bits(backend: str, dtype: str) -> None:
    large = 2.0**10 if dtype == "float16" else 2.0**100
    call = scaled(dtype, large, large)
    call.inputs.v[:, ::2], call.dout[:, 1::2] = -0.0, -0.0
    assert same_bits(*(run(framework, call, backend) for framework in FRAMEWORKS)) == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("backend", TRAINABLE)
def test_subnormal_values_give_the_same_bits(backend: str, dtype: str) -> None:
    tiny = 2.0**-1025 if dtype == "float64" else 2.0**-128
    for factors in ((tiny, 1.0), (1.0, tiny)):
        call = scaled(dtype, *factors)
        assert same_bits(*(run(framework, call, backend) for framework in FRAMEWORKS)) == []


CALLS_ON_GPUS: dict[str, tuple[dict[str, Any], ...]] = {
    "flash3": ({}, {"packed": True}, {"dim": 72}, {"window": (40, 3)}, {"sinks": True}),
    "sdpa_flash": ({}, {"packed": True}, {"dim": 72}, {"window": (40, 0)}, {"sinks": True}, {"lse": True}),
    "sdpa_efficient": (
        *({}, {"packed": True}, {"dim": 72}, {"window": (40, 0)}, {"sinks": True}, {"lse": True}),
        *({"dtype": "float32"}, {"bias": True}, {"mask": True}, {"mask": True, "dtype": "float32"}),
    ),
    "sdpa_cudnn": ({}, {"dim": 72}, {"sinks": True}, {"bias": True}, {"mask": True}, {"lse": True}, {"wide": 64}),
}


@pytest.mark.cuda
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    ("backend", "changes"), [(name, each) for name, calls in CALLS_ON_GPUS.items() for each in calls], ids=str
)
def test_torchs_kernels_give_torchs_bits_by_callback(backend: str, changes: dict[str, Any], training: bool) -> None:
    """Gradients of q, k and v are compared to the last bits, because these kernels add in any order.

    Sinks are in float32 beside a bfloat16 q; their gradient is summed in one order.
    """
    missing = dict(Target.here("jax", "sm90").unavailable).get(backend, "")
    if missing or (training and backend == "flash3"):
        pytest.skip(missing or "the installed build has no backward")
    rng, dtype, changes = np.random.default_rng(0), changes.get("dtype", "bfloat16"), dict(changes)
    dim, rows = changes.get("dim", 128), (300,) if "packed" in changes else (2, 150)
    sizes = ((4, dim), (2, dim), (2, changes.get("wide", dim)))
    arrays = [rng.standard_normal((*rows, *size)).astype(np.float32) for size in sizes]
    tables = {
        "bias": rng.standard_normal((1, 4, 150, 150)).astype(np.float32) if "bias" in changes else None,
        "mask": rng.random((2, 1, 150, 150)) > 0.3 if "mask" in changes else None,
        "sinks": np.linspace(-1, 1, 4, dtype=np.float32) if "sinks" in changes else None,
    }
    static = {"backend": backend, "causal": "mask" not in changes, "return_lse": changes.get("lse", not training)}
    static |= {"window": changes["window"]} if "window" in changes else {}
    lengths = [130, 1, 169] if "packed" in changes else None

    def run(framework: Any, move: Callable[[Any], Any]) -> tuple[Any, Any, Any]:
        """Returns the call as a function, its arrays and its other options."""
        seq_info = {} if lengths is None else {"seq_info": framework.SeqInfo.from_lengths(lengths)}
        kept = {name: move(each) for name, each in tables.items() if each is not None}
        return partial(framework.attention, **static, **seq_info), [move(each) for each in arrays], kept

    def keeps_its_dtype(array: Any) -> bool:
        return array.dtype == bool or array is tables["sinks"]

    def to_jax(array: Any) -> Any:
        return jnp.asarray(array, None if keeps_its_dtype(array) else dtype)

    def to_torch(array: Any) -> Any:
        tensor = torch.from_numpy(array).cuda()
        return tensor if keeps_its_dtype(array) else tensor.to(getattr(torch, dtype))

    call, given, kept = run(jax_frontend, to_jax)
    in_torch, tensors, others = run(torch_frontend, to_torch)
    if not training:
        compiled = jax.jit(lambda *x: call(*x, **kept)).lower(*given).compile()
        text = compiled.as_text()
        assert "attn_core.callback" in text
        for one, other in zip(compiled(*given), in_torch(*tensors, **others), strict=True):
            np.testing.assert_array_equal(np.asarray(one.astype(jnp.float32)), other.float().cpu().numpy())
        return

    def total(results: Any) -> Any:
        return sum((each * each).sum() for each in results) if isinstance(results, tuple) else (results * results).sum()

    learned = ["sinks"] if "sinks" in changes else []
    given += [kept.pop(name) for name in learned]
    leaves = [tensor.requires_grad_() for tensor in (*tensors, *[others.pop(name) for name in learned])]

    def loss(attend: Any, kept: Any, q: Any, k: Any, v: Any, *more: Any) -> Any:
        return total(attend(q, k, v, **dict(zip(learned, more, strict=True)), **kept))

    gradient = jax.jit(jax.grad(lambda *x: loss(call, kept, *x).astype(jnp.float32), argnums=tuple(range(len(given)))))
    text = gradient.lower(*given).compile().as_text()
    assert "attn_core.callback" in text
    theirs = torch.autograd.grad(loss(in_torch, others, *leaves), leaves)
    for place, (one, other) in enumerate(zip(gradient(*given), theirs, strict=True)):
        assert str(one.dtype) == str(other.dtype).removeprefix("torch.")
        exact = other.float().cpu().numpy()
        limit = 0.02 if place < 3 else 0.0
        np.testing.assert_allclose(np.asarray(one.astype(jnp.float32)), exact, atol=limit * np.abs(exact).max(), rtol=0)
