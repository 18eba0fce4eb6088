"""Reads and writes some places of an axis of positions, on JAX arrays; and reorders shards to blocks and back."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from attn_core.context_parallel import index_arrays
from attn_core.context_parallel.layout import Block, Layout

Array = jax.Array


class BlockOrder(NamedTuple):
    """The order of each part's block in its ranks' shards, end to end.

    Attributes:
        table: int ``[parts, places]``: for each place of the block its place in the shards; places without a position
            come last. One row if all parts have the same order; None if every place is in order already.
    """

    table: tuple[tuple[int, ...], ...] | None

    def to_block(self, array: Array, part: Array | int) -> Array:
        """Returns ``[batch, places, ...]`` of a part's shards in the order of its block."""
        return array if self.table is None else _reorder(array, np.asarray(self.table), part)

    def to_shards(self, array: Array, part: Array | int) -> Array:
        """The inverse of ``to_block``."""
        return array if self.table is None else _reorder(array, np.argsort(np.asarray(self.table), axis=1), part)


@lru_cache(maxsize=256)
def block_order(layout: Layout, blocks: tuple[Block, ...]) -> BlockOrder:
    """Returns the order of each part's block."""
    rows = []
    for block in blocks:
        filled = index_arrays.places_of_block(layout, block)
        empty = np.setdiff1d(np.arange(len(block.ranks) * layout.shard), filled)
        rows.append(tuple(np.concatenate([filled, empty]).tolist()))
    rows = rows[:1] if len(set(rows)) == 1 else rows
    return BlockOrder(None if all(row == tuple(range(len(row))) for row in rows) else tuple(rows))


def _reorder(array: Array, table: np.ndarray, part: Array | int) -> Array:
    if len(table) == 1:
        return take(array, table[0], axis=1)
    # A table, because one program runs in every part. "clip", because the indices are valid: the default would test
    # them.
    return jnp.take(array, jnp.asarray(table, jnp.int32)[part], axis=1, mode="clip")


def take(array: Array, index: np.ndarray, axis: int) -> Array:
    """Returns the entries at ``index``; slices them if they are in few ranges, which is faster than a gather."""
    ranges = index_arrays.contiguous_ranges(index)
    if ranges is None:
        return jnp.take(array, jnp.asarray(index, jnp.int32), axis=axis, mode="clip")
    if ranges == [(0, array.shape[axis])]:
        return array
    parts = [lax.slice_in_dim(array, start, stop, axis=axis) for start, stop in ranges]
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=axis)


def put(array: Array, values: Array, index: np.ndarray, axis: int) -> Array:
    """Returns the array with ``values`` at the places of ``index``."""
    ranges = index_arrays.contiguous_ranges(index)
    if ranges is None:
        # The places are distinct, which allows XLA to write them in any order.
        where = (slice(None),) * axis + (jnp.asarray(index, jnp.int32),)
        return array.at[where].set(values, unique_indices=True)
    if ranges == [(0, array.shape[axis])]:
        return values
    for (start, _), piece in _pieces(values, ranges, axis):
        array = lax.dynamic_update_slice_in_dim(array, piece, start, axis=axis)
    return array


def add(array: Array, values: Array, index: np.ndarray, axis: int) -> Array:
    """Returns the array with ``values`` added at the places of ``index``.

    Ranges are padded with zeros instead of updated in place: XLA fused such an update with the kernel whose result it
    changes, and refused its own fusion (jax 0.11.2 on GPUs: "DUS target must be a fusion parameter").
    """
    ranges = index_arrays.contiguous_ranges(index)
    if ranges is None:
        where = (slice(None),) * axis + (jnp.asarray(index, jnp.int32),)
        return array.at[where].add(values, unique_indices=True)
    for (start, stop), piece in _pieces(values, ranges, axis):
        around = [(0, 0, 0)] * array.ndim
        around[axis] = (start, array.shape[axis] - stop, 0)
        array = array + lax.pad(piece, jnp.zeros((), array.dtype), around)
    return array


def _pieces(values: Array, ranges: list[tuple[int, int]], axis: int) -> Iterator[tuple[tuple[int, int], Array]]:
    """Yields each range with the values that belong in it."""
    at = 0
    for start, stop in ranges:
        yield (start, stop), lax.slice_in_dim(values, at, at + stop - start, axis=axis)
        at += stop - start
