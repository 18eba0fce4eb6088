"""Pages of a pool in host memory, for ``PagedKVCache.swap_out``."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array
PINNED = "pinned_host"
"""JAX's memory kind that a GPU reads and writes directly."""


def to_host(pool: Array, pages: tuple[int, ...]) -> Any:
    """Copies pages of a pool to the host: an array ``[count, page_size, kv_heads, dim]`` in pinned memory.

    The count is that of ``_padded``. The result is a numpy array if a device of the pool has no pinned memory.
    """
    taken = _take_pages(pool, _padded(pages, 0))
    kinds = [{memory.kind for memory in device.addressable_memories()} for device in taken.sharding.device_set]
    if not all(PINNED in each for each in kinds):
        return np.asarray(taken)
    # Waits, because the pages are lost if the host has no memory, and JAX would say so only later.
    return jax.block_until_ready(jax.device_put(taken, taken.sharding.with_memory_kind(PINNED)))


def from_host(pool: Array, array: Any, pages: tuple[int, ...]) -> Array:
    """Returns the pool with an array of ``to_host`` in these pages. JAX takes the pool's memory for it."""
    if isinstance(array, np.ndarray) or not pool.committed:
        # device_put would commit the pool to its device, and every program that takes it would be compiled again.
        there = np.asarray(array)
    else:
        there = jax.device_put(array, array.sharding.with_memory_kind(pool.sharding.memory_kind))
    return _put_pages(pool, there, _padded(pages, pool.shape[0]))


def _padded(pages: tuple[int, ...], with_page: int) -> np.ndarray:
    """Returns the pages, int32, up to the next power of two, because a program is compiled for each number of them."""
    padded = np.full(1 << max(len(pages) - 1, 0).bit_length(), with_page, np.int32)
    padded[: len(pages)] = pages
    return padded


@jax.jit
def _take_pages(pool: Array, pages: Array) -> Array:
    return pool[pages]


@partial(jax.jit, donate_argnums=0)
def _put_pages(pool: Array, array: Array, pages: Array) -> Array:
    return pool.at[pages].set(jnp.asarray(array, pool.dtype), mode="drop")  # the padding is a page behind the pool
