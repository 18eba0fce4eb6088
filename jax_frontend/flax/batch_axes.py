"""Arrays with any number of batch axes, as Flax's layers take them, folded into the one batch axis of attention."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attn_core.call.segments import Segments
from attn_core.errors import ShapeError
from jax_frontend.dispatch.plan import as_array
from jax_frontend.flax.layer import LayerCall


def fold_tables(call: LayerCall, batch: tuple[int, ...], seq: int) -> LayerCall:
    """Returns a call whose tables have one batch axis. With one batch axis already, ``attention`` takes them as they
    are.

    Raises:
        ShapeError: naming the table.
    """
    if len(batch) == 1:
        return call
    folded = dict(call.given)
    for name, table in call.given.items():
        if name in ("mask", "bias"):
            folded[name] = four_axes(name, as_array(name, table), batch)
        elif name == "alibi_slopes":
            folded[name] = _fold_slopes(as_array(name, table), batch)
        elif name == "key_ranges" and isinstance(table, np.ndarray | jax.Array):
            folded[name] = _fold_ranges(table, batch)
        elif name in Segments._fields:
            folded[name] = _fold_tokens(name, table, batch)
    return call._replace(given=folded, positions=row_positions("positions", call.positions, batch, seq))


def four_axes(name: str, array: jax.Array, batch: tuple[int, ...]) -> jax.Array:
    """Returns a mask or bias of up to ``[batch..., heads, q, kv]`` with four axes, ``[batch or 1, heads, q, kv]``."""
    rank = len(batch) + 3
    if array.ndim > rank:
        raise ShapeError(f"{name}: expected at most {rank} axes [batch..., heads, q, kv], got {list(array.shape)}")
    return _fold(name, array.reshape((1,) * (rank - array.ndim) + array.shape), batch)


def row_positions(name: str, positions: Any, batch: tuple[int, ...], length: int) -> jax.Array | None:
    """Returns positions that broadcast to ``[batch..., length]`` as ``[batch, length]``; None for None."""
    if positions is None:
        return None
    array = as_array("positions", positions)
    full = (*batch, length)
    missing = len(full) - array.ndim
    if missing < 0 or any(size not in (1, axis) for size, axis in zip(array.shape, full[missing:], strict=True)):
        raise ShapeError(f"{name}: expected [batch..., length] = {list(full)}, got {list(array.shape)}")
    return jnp.broadcast_to(array, full).reshape(math.prod(batch), length)


def _fold_slopes(slopes: jax.Array, batch: tuple[int, ...]) -> jax.Array:
    if slopes.ndim == 1:
        return slopes
    if slopes.shape[:-1] != batch:
        raise ShapeError(
            f"alibi_slopes: expected [heads] or [batch..., heads] with the batch {list(batch)}, got "
            f"{list(slopes.shape)}"
        )
    return slopes.reshape(math.prod(batch), slopes.shape[-1])


def _fold_tokens(name: str, array: Any, batch: tuple[int, ...]) -> Any:
    """Folds segment ids or positions ``[batch..., length]``. ``attention`` checks length, dtype and type."""
    shape = getattr(array, "shape", None)
    if shape is None:
        return array
    if len(shape) != len(batch) + 1 or tuple(shape[:-1]) != batch:
        raise ShapeError(f"{name}: expected [batch..., length] with the batch {list(batch)}, got {list(shape)}")
    return array.reshape(math.prod(batch), shape[-1])


def _fold_ranges(ranges: Any, batch: tuple[int, ...]) -> Any:
    """Folds ``[batch..., kv_heads or 1, kv_len, ranges, 2]``; ``[1, kv_heads or 1, ...]`` is shared by all rows."""
    if ranges.ndim == 5 and ranges.shape[0] == 1:
        return ranges
    if ranges.ndim != len(batch) + 4:
        raise ShapeError(
            f"key_ranges: expected [batch..., kv_heads or 1, kv_len, ranges, 2] with the batch {list(batch)}, or "
            f"[1, kv_heads or 1, kv_len, ranges, 2], got {list(ranges.shape)}"
        )
    return _fold("key_ranges", ranges, batch)


def _fold(name: str, array: Any, batch: tuple[int, ...]) -> Any:
    """Folds the batch axes of an array of numpy or JAX, each of which may be 1; all of 1 become one axis of 1."""
    lead, tail = array.shape[: len(batch)], array.shape[len(batch) :]
    if all(size == 1 for size in lead):
        return array.reshape(1, *tail)  # the batch shares it, so no row needs a copy
    if any(size not in (1, full) for size, full in zip(lead, batch, strict=True)):
        raise ShapeError(f"{name}: expected batch axes broadcastable to {list(batch)}, got {list(lead)}")
    broadcast_to = np.broadcast_to if isinstance(array, np.ndarray) else jnp.broadcast_to
    return broadcast_to(array, (*batch, *tail)).reshape(math.prod(batch), *tail)
