"""Meshes of JAX's CPU devices, on a machine with GPUs, too.

A test that uses them requests the fixture ``four_devices``, which skips it if JAX has fewer.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType


def missing(count: int = 4) -> str | None:
    """Returns the reason why JAX does not have ``count`` CPU devices, or None if it does."""
    try:
        present = len(jax.devices("cpu"))
    except RuntimeError as error:  # JAX_PLATFORMS leaves the CPU out
        return f"needs {count} CPU devices: {error}"
    if present >= count:
        return None
    return f"needs {count} CPU devices: JAX has {present} with XLA_FLAGS={os.environ.get('XLA_FLAGS', '')!r}"


def devices(count: int = 4) -> list[Any]:
    """Returns the first ``count`` CPU devices."""
    return jax.devices("cpu")[:count]


def mesh(sizes: Sequence[int], names: Sequence[str], kind: AxisType = AxisType.Auto) -> Any:
    """Returns a mesh of CPU devices whose axes are all of one kind."""
    count = 1
    for size in sizes:
        count *= size
    return jax.make_mesh(tuple(sizes), tuple(names), axis_types=(kind,) * len(names), devices=devices(count))
