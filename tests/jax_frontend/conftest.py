"""Meshes of two by two CPU devices, for the tests of sharding."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture(params=["Auto", "Explicit"])
def mesh(request: pytest.FixtureRequest, four_devices: None) -> Any:
    """A mesh of each kind of axes."""
    return _two_by_two(request.param)


@pytest.fixture
def auto_mesh(four_devices: None) -> Any:
    return _two_by_two("Auto")


def _two_by_two(kind: str) -> Any:
    import cpu_meshes
    from jax.sharding import AxisType

    return cpu_meshes.mesh((2, 2), ("data", "model"), AxisType[kind])
