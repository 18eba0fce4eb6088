"""Tests that an export of a call on torch's kernels names ``export_checks`` before JAX refuses it."""

from __future__ import annotations

import warnings
from contextvars import Context

import jax
import jax.export
import jax.numpy as jnp
import pytest

from jax_frontend import attention, export_checks

# Each test has an empty context, because other tests of the process have called ``export_checks`` in its own.


def exported(backend: str, checks: bool) -> None:
    program = jax.jit(lambda q: attention(q, q, q, backend=backend))
    jax.export.export(program, disabled_checks=export_checks() if checks else ())(jnp.zeros((1, 3, 2, 8)))


def test_an_export_without_the_checks_warns() -> None:
    def run() -> None:
        with pytest.warns(UserWarning, match=r"^jax.export refuses .*disabled_checks=jax_frontend.export_checks\(\)"):
            exported("math", checks=False)

    with pytest.raises(ValueError, match="Cannot serialize code with custom calls"):
        Context().run(run)


@pytest.mark.parametrize(("backend", "checks"), [("math", True), ("jax_xla", False)])
def test_an_export_that_succeeds_does_not_warn(backend: str, checks: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Context().run(exported, backend, checks)
