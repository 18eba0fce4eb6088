"""Forward mode of every backend that claims it, through both frontends, against the float64 formula and its bounds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("jax")
import forward_mode
import jax
import jax.numpy as jnp
import torch
from both_frontends import (
    COMPILED_ON_GPUS,
    FRAMEWORKS,
    claimed,
    dropout_words,
    judged,
    module_on,
    number_of_draws,
    run_forward_mode,
    same_bits,
    target,
)
from forward_mode import NAMES, in_forward_mode, judge, tangents_of
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle_cases import FEATURES, make
from spec_strategies import MISREAD, Call, calls, corners, few_numbers, make_call, misread

import jax_frontend
import torch_frontend
from attn_core import backends
from attn_core.call.tensors import Tangents
from attn_core.correctness import reference
from attn_core.errors import SpecError
from attn_core.selection import forward_mode as selection

BACKENDS = tuple(name for name in backends.names() if backends.load(name).forward_mode is not None)
PLAIN = {
    **{"batch": 2, "q_len": 7, "kv_len": 11, "num_heads": 6, "num_kv_heads": 3, "head_dim": 13, "value_dim": 5},
    "dtype": "float32",
}


@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
def test_the_formula_is_the_derivative_of_the_reference(features: dict[str, Any]) -> None:
    """Against central differences in float64."""
    case = make(features)
    random, step = np.random.default_rng(5), 1e-5
    moved = {name: getattr(case.inputs, name) for name in NAMES}
    moved = {name: random.normal(size=array.shape) for name, array in moved.items() if array is not None}

    def at(by: float) -> tuple[np.ndarray, np.ndarray]:
        places = {name: getattr(case.inputs, name) + by * tangent for name, tangent in moved.items()}
        return reference.forward(case.spec, case.inputs._replace(**places))

    tangents = Tangents(**{f"d{name}": tangent for name, tangent in moved.items()})
    for actual, ahead, behind in zip(forward_mode.jvp(case.spec, case.inputs, tangents), at(step), at(-step)):
        seen = np.isfinite(ahead)  # the log-sum-exp of a row without keys and sinks is -inf, and its tangent 0
        slope = (np.where(seen, ahead, 0.0) - np.where(seen, behind, 0.0)) / (2 * step)
        np.testing.assert_allclose(actual, slope, rtol=1e-6, atol=1e-7)


def conforms(framework: str, call: Call, names: tuple[str, ...], backend: str | None, device: str) -> bool:
    """Whether the backend computes the tangents of a call. Asserts that they are right, or refused with all reasons."""
    call = in_forward_mode(call)
    tangents = tangents_of(call, names)
    requested = None if backend is None else (backend,)
    choice = selection.choose(call.spec, target(framework, device), requested)
    if choice.backend is None or not any(each is not None for each in tangents):
        return False
    results = run_forward_mode(framework, call, tangents, backend, device)
    inputs = call.inputs._replace(rng=dropout_words(framework, call, device))
    verdict = judge(call, tangents, results, inputs)
    assert verdict.ok, f"{choice} in {framework}: {call}, tangents of {names}\n{verdict}"
    return True


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize(("backend", "device"), claimed(BACKENDS))
def test_drawn_calls_match_the_claims(backend: str, device: str, framework: str) -> None:
    if missing := judged(framework, backend, device):
        pytest.skip(missing)
    if framework == "jax" and device == "cpu":
        pytest.skip("tests/jax_frontend runs these, because each call is compiled")
    claims: Any = module_on(backend, device).forward_mode.claims
    ran = [conforms(framework, call, NAMES, backend, device) for call in corners(claims).values()]
    assert all(ran), "a corner of the claims was not run"
    drawn = calls(claims, without=("mask_mod",))
    compiles = framework == "jax" or (device == "cuda" and backend in COMPILED_ON_GPUS)
    drawn = drawn.map(few_numbers) if compiles else drawn
    subsets = st.sampled_from((NAMES, NAMES, ("q",), ("k",), ("v",), ("q", "v"), ("bias", "sinks", "q")))

    @settings(max_examples=25 if device == "cpu" else number_of_draws(backend, device))
    @given(call=drawn, names=subsets)
    def every_call(call: Call, names: tuple[str, ...]) -> None:
        ran.append(conforms(framework, call, names, backend, device))

    every_call()
    assert sum(ran) > len(ran) / 3, "too few of the drawn calls were run to mean anything"


@pytest.mark.parametrize(
    "fields",
    [
        {**PLAIN, "causal": True, "softcap": 1.5},
        {**PLAIN, "causal": True, "sinks": True, "bias_shape": (1, 6, 1, 11)},
        {**PLAIN, "lengths": ((5, 0, 4), (3, 6, 5)), "window": (2, 1)},
    ],
)
def test_torch_and_jax_give_equal_bits(fields: dict[str, Any]) -> None:
    """For one backend, through the bridge."""
    call = in_forward_mode(make_call(**fields))
    tangents = tangents_of(call)
    both = [run_forward_mode(framework, call, tangents, "math") for framework in FRAMEWORKS]
    assert judge(call, tangents, both[0]).ok and same_bits(*both) == []


@pytest.mark.parametrize("fault", MISREAD)
def test_faults_are_caught(fault: str) -> None:
    call = in_forward_mode(make_call(**PLAIN, window=(2, 1), softcap=1.5, scale=1.0))
    tangents = tangents_of(call)
    assert judge(call, tangents, run_forward_mode("torch", call, tangents, "math")).ok
    verdict = judge(call, tangents, run_forward_mode("torch", misread(call, fault), tangents, "math"))
    assert verdict["dout"].use > 1 and verdict["dlse"].use > 1


@pytest.mark.parametrize("name", ["dq", "dk", "dv", "dsinks"])
def test_a_forgotten_tangent_is_caught(name: str) -> None:
    call = in_forward_mode(make_call(**PLAIN, causal=True, sinks=True))
    tangents = tangents_of(call)
    results = run_forward_mode("torch", call, tangents._replace(**{name: None}), "math")
    assert not judge(call, tangents, results).ok


def test_a_backend_without_forward_mode_says_so() -> None:
    q, x = torch.ones(1, 3, 2, 8), jnp.ones((1, 3, 2, 8))
    says = r"backend='sdpa_flash': expected reverse mode .*sdpa_flash: .* has no forward mode; backend=\"\w+\" has"
    with pytest.raises(SpecError, match=says):
        torch.func.jvp(lambda q: torch_frontend.attention(q, q, q, backend="sdpa_flash"), (q,), (q,))
    with pytest.raises(SpecError, match=says):
        jax.jvp(lambda x: jax_frontend.attention(x, x, x, backend="sdpa_flash"), (x,), (x,))


def test_an_argument_without_a_derivative_is_named() -> None:
    q = torch.ones(1, 3, 2, 8)
    table = torch.ones(5)

    def biased(table: torch.Tensor) -> torch.Tensor:
        return torch_frontend.attention(q, q, q, score_mod=lambda s, b, h, q, k, t: s + t[q - k + 2], aux=(table,))

    with pytest.raises(SpecError, match=r"tangent of aux\[0\]: the torch math kernel has none"):
        torch.func.jvp(biased, (table,), (table,))
    with pytest.raises(SpecError, match="alibi_slopes: expected no tangent"):
        torch.func.jvp(lambda s: torch_frontend.attention(q, q, q, alibi_slopes=s), (table[:2],), (table[:2],))
