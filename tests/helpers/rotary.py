"""A rotary embedding for tests of layers, for arrays of torch and of JAX, with the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def rope_in_torch(q: Any, k: Any, positions: Any) -> tuple[Any, Any]:
    """Rotates halves of the channels by angles that grow with the position."""
    import torch

    rates = 0.3 ** torch.arange(q.shape[-1] // 2, dtype=torch.float32, device=positions.device)
    angles = positions[..., None, None] * rates  # [batch, seq, 1, half]
    return _rotated(q, k, angles.cos(), angles.sin(), torch.cat)


def rope_in_jax(q: Any, k: Any, positions: Any) -> tuple[Any, Any]:
    """Rotates halves of the channels by angles that grow with the position."""
    import jax.numpy as jnp

    angles = positions[..., None, None] * (0.3 ** jnp.arange(q.shape[-1] // 2))  # [batch, seq, 1, half]
    return _rotated(q, k, jnp.cos(angles), jnp.sin(angles), jnp.concatenate)


def _rotated(q: Any, k: Any, cos: Any, sin: Any, concatenate: Callable[..., Any]) -> tuple[Any, Any]:
    def rotated(array: Any) -> Any:
        half = array.shape[-1] // 2
        first, second = array[..., :half], array[..., half:]
        return concatenate([first * cos - second * sin, second * cos + first * sin], -1)

    return rotated(q), rotated(k)
