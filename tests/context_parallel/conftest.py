"""float64 in JAX, for the tests that compare with the float64 reference."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture
def x64() -> Iterator[None]:
    """JAX with float64 for one test."""
    jax = pytest.importorskip("jax")
    with jax.enable_x64(True):
        yield
