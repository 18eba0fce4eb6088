"""Faults planted into context parallelism in JAX: the checks of its tests find them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import pytest
from context_jax_cases import CASES, check

from attn_core.context_parallel.on_torch import step as step_torch
from attn_core.context_parallel.on_torch import tiles as tiles_torch
from jax_frontend.bridge import targets
from jax_frontend.context_parallel import exchange, tiles

pytestmark = pytest.mark.usefixtures("four_devices", "x64")


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> Any:
    jax.clear_caches()
    monkeypatch.setattr(targets, "_callbacks", {})  # what they have prepared goes with them
    yield monkeypatch
    jax.clear_caches()


def test_planted_a_merge_with_a_wrong_log_sum_exp(planted):
    """XLA's operations merge in branches; torch's operations merge if the host calls kernels back."""
    for module, name, backend in ((tiles, "merge", "jax_xla"), (tiles_torch, "merge", "math")):
        right = getattr(module, name)
        planted.setattr(module, name, lambda *arrays, right=right: right(*arrays[:3], arrays[3] + 1e-6))
        with pytest.raises(AssertionError):
            check(CASES["ring-3-causal"], backend=backend)


def test_planted_a_host_that_takes_a_device_for_another_part(planted):
    right = step_torch.prepare_part
    planted.setattr(step_torch, "prepare_part", lambda call, part, device: right(call, 1 - part, device))
    with pytest.raises(AssertionError):
        check(replace(CASES["ring-2-scores"], batch=1), backend="math")


@pytest.mark.parametrize("case", ["ring-3-causal", "ring-4-halo"])  # of a whole block, and of a border
def test_planted_gradients_that_are_not_brought_home(planted, case):
    right = exchange.KVPair.hop
    planted.setattr(exchange.KVPair, "hop", lambda pair, axes, far: pair if far < 0 else right(pair, axes, far))
    with pytest.raises(AssertionError):
        check(CASES[case])


def test_planted_sinks_in_every_tile(planted):
    right = tiles.with_sinks
    planted.setattr(tiles, "with_sinks", lambda out, lse, sinks: right(*right(out, lse, sinks), sinks))
    with pytest.raises(AssertionError):
        check(CASES["ulysses-2-zigzag-rows"])
