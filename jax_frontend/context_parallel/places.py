"""Reorders shards to blocks and back on JAX arrays, and cuts a tile's rows out of a block."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from attn_core.context_parallel import places
from attn_core.context_parallel.layout import Block, Layout

Array = jax.Array


class Order(NamedTuple):
    """Where the places of each part's block are in its ranks' shards, end to end.

    Attributes:
        table: int ``[parts, places]``; places without a position come last. One row if all parts are alike; None if
            every place is in order already.
    """

    table: tuple[tuple[int, ...], ...] | None

    def sorted(self, array: Array, part: Any) -> Array:
        """``[batch, places, ...]`` of a part's shards in the order of its block."""
        return array if self.table is None else _taken(array, np.asarray(self.table), part)

    def unsorted(self, array: Array, part: Any) -> Array:
        """The inverse of ``sorted``."""
        return array if self.table is None else _taken(array, np.argsort(np.asarray(self.table), axis=1), part)


@lru_cache(maxsize=256)
def order(layout: Layout, blocks: tuple[Block, ...]) -> Order:
    """The order of each part's block."""
    rows = []
    for block in blocks:
        held = places.places_of_block(layout, block)
        rest = np.setdiff1d(np.arange(len(block.ranks) * layout.shard), held)
        rows.append(tuple(np.concatenate([held, rest]).tolist()))
    rows = rows[:1] if len(set(rows)) == 1 else rows
    return Order(None if all(row == tuple(range(len(row))) for row in rows) else tuple(rows))


def _taken(array: Array, table: np.ndarray, part: Any) -> Array:
    if len(table) == 1:
        return taken(array, table[0], axis=1)
    return jnp.take(array, jnp.asarray(table, jnp.int32)[part], axis=1, mode="clip")


def taken(array: Array, index: np.ndarray, axis: int) -> Array:
    """The entries at ``index``, cut by slices if they are in few ranges."""
    ranges = places.contiguous_ranges(index)
    if ranges is None:
        return jnp.take(array, jnp.asarray(index, jnp.int32), axis=axis, mode="clip")
    if ranges == [(0, array.shape[axis])]:
        return array
    parts = [lax.slice_in_dim(array, start, stop, axis=axis) for start, stop in ranges]
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=axis)


def put(whole: Array, part: Array, index: np.ndarray, axis: int) -> Array:
    """``whole`` with ``part`` at the places of ``index``."""
    ranges = places.contiguous_ranges(index)
    if ranges is None:
        where = (slice(None),) * axis + (jnp.asarray(index, jnp.int32),)
        return whole.at[where].set(part, unique_indices=True)
    if ranges == [(0, whole.shape[axis])]:
        return part
    at = 0
    for start, stop in ranges:
        piece = lax.slice_in_dim(part, at, at + stop - start, axis=axis)
        whole = lax.dynamic_update_slice_in_dim(whole, piece, start, axis=axis)
        at += stop - start
    return whole
