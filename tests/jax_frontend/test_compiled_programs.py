"""Programs that earlier modules compiled do not stay for a whole run, and what was jitted works on."""

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


def test_programs_go_where_memory_is_short_and_functions_work_on() -> None:
    traced = []

    @jax.jit
    def attend(x):
        traced.append(x.shape)
        return jax_frontend.attention(x, x, x, causal=True, backend="math")

    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 5, 2, 3)), jnp.float32)
    before = np.asarray(attend(x))
    jax_frontend.attention(x, x, x, softcap=3.0)
    held = programs()
    assert compiled_programs.let_go(limit=0)
    assert programs() < held
    np.testing.assert_array_equal(attend(x), before)
    assert len(traced) == 2


def test_programs_stay_where_there_is_memory() -> None:
    held = programs()
    assert not compiled_programs.let_go(limit=2**62)
    assert programs() >= held
