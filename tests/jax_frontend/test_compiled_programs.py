"""Tests that compiled programs are freed during a long run, and that functions which were jitted before still work."""

from __future__ import annotations

import pytest

pytest.importorskip("jax")
import compiled_programs
import jax
import jax.numpy as jnp
import numpy as np

import jax_frontend


def programs() -> int:
    return len(jax.devices("cpu")[0].client.live_executables())


def test_programs_are_freed_above_the_limit_and_functions_compile_again() -> None:
    traced = []

    @jax.jit
    def attend(x):
        traced.append(x.shape)
        return jax_frontend.attention(x, x, x, causal=True, backend="math")

    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 5, 2, 3)), jnp.float32)
    before = np.asarray(attend(x))
    jax_frontend.attention(x, x, x, softcap=3.0)
    count = programs()
    assert compiled_programs.free(limit=0)
    assert programs() < count
    np.testing.assert_array_equal(attend(x), before)
    assert len(traced) == 2


def test_programs_stay_below_the_limit() -> None:
    count = programs()
    assert not compiled_programs.free(limit=2**62)
    assert programs() >= count
