"""The pools of pages: PagedKVCache, which has those of all layers; how many pages fit; pools of other libraries."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from attn_core.call.hints import SharedOptions
from attn_core.call.keywords import CachedKeywords
from attn_core.errors import DeviceError, DTypeError, SpecError, shown
from attn_core.paged import pools as paged_pools
from attn_core.paged.allocator import Copies
from attn_core.paged.cache import CacheSizes, PagedCache
from attn_core.paged.pools import PoolSizes
from attn_core.paged.step import Step
from jax_frontend.dispatch import plan
from jax_frontend.paged.append import append_kv
from jax_frontend.paged.attention import paged_attention

Array = jax.Array
Keywords = CachedKeywords[Array]
PINNED = "pinned_host"
"""JAX's memory kind that a GPU reads and writes directly."""


_shared = SharedOptions(paged_attention, {*CachedKeywords.__optional_keys__, "return_lse"})


class PagedKVCache(PagedCache[Array]):
    """The keys and values of all layers, in pages that the sequences share.

    Args:
        dtype, device: the dtype and the device of the pools. The device is one of JAX's, or a sharding.
        num_layers, num_pages, page_size, kv_heads, head_dim, value_dim, kv_dtype: as in ``PagedCache``.
    """

    _append = staticmethod(append_kv)

    @SharedOptions(PagedCache.__init__, CacheSizes.__annotations__)
    def __init__(
        self,
        *,
        dtype: DTypeLike = jnp.float32,
        device: jax.Device | jax.sharding.Sharding | None = None,
        kv_dtype: DTypeLike | None = None,
        **sizes: Unpack[CacheSizes],
    ) -> None:
        try:
            self.dtype = np.dtype(dtype)
        except (TypeError, ValueError):
            raise DTypeError(f"dtype={shown(dtype)}: expected a float dtype") from None
        if device is not None and not isinstance(device, jax.Device | jax.sharding.Sharding):
            raise SpecError(f"device={shown(device)}: expected a jax.Device, a Sharding, or None")
        self._table_placement = self._placement_of_tables(device)

        def new(shape: tuple[int, ...], name: str) -> Array:
            if len(shape) == 4:
                return jnp.zeros(shape, name, device=device)
            return jnp.ones(shape, name, device=_without_channels(device))

        super().__init__(new, dtype=self.dtype.name, kv_dtype=name_of(kv_dtype), **sizes)

    @overload
    def attend(
        self, layer: int, q: Array, step: Step, *, return_lse: Literal[False] = False, **options: Unpack[Keywords]
    ) -> Array: ...
    @overload
    def attend(
        self, layer: int, q: Array, step: Step, *, return_lse: Literal[True], **options: Unpack[Keywords]
    ) -> tuple[Array, Array]: ...
    @overload
    def attend(
        self, layer: int, q: Array, step: Step, *, return_lse: bool, **options: Unpack[Keywords]
    ) -> Array | tuple[Array, Array]: ...
    @_shared
    def attend(self, layer: int, q: Array, step: Step, **options: Any) -> Array | tuple[Array, Array]:
        """Runs ``check``, then ``paged_attention`` of a layer's queries, ``[tokens, heads, head_dim]``."""
        every = _shared.complete(PagedKVCache.attend, options)
        return self._attend(paged_attention, layer, q, step, every)  # type: ignore[no-any-return]

    def _pools(self, layer: int, step: Step) -> tuple[Array, Array]:
        pools = super()._pools(layer, step)
        for pool in pools:
            if not isinstance(pool, jax.core.Tracer) and pool.is_deleted():
                raise RuntimeError(
                    f"layer={layer}: its pages are lost, because Ctrl-C or an error interrupted update or step after "
                    "JAX had taken their memory; build a new cache"
                )
        return pools

    def _placement_of_tables(
        self, device: jax.Device | jax.sharding.Sharding | None
    ) -> jax.Device | jax.sharding.Sharding | None:
        """Returns the tables' device; for a sharding, one that puts whole tables on every device of its mesh."""
        if isinstance(device, jax.sharding.NamedSharding):
            return jax.sharding.NamedSharding(device.mesh, jax.sharding.PartitionSpec())
        return device

    def _copy(self, copies: Copies) -> None:
        source, target = (jnp.array(np.array(pages, np.int32)) for pages in copies)
        for pools in self._pool_lists():
            for layer, pool in enumerate(pools):
                # Stored at once, because JAX has deleted the old pool, and the copy for the next layer may fail.
                pools[layer] = _copy_pages(pool, source, target)

    def _to_host(self, pages: tuple[int, ...]) -> list[Array | np.ndarray]:
        return [to_host(pool, pages) for pools in self._pool_lists() for pool in pools]

    def _from_host(self, there: list[Array | np.ndarray], pages: tuple[int, ...]) -> None:
        copies = iter(there)
        for pools in self._pool_lists():
            for layer, pool in enumerate(pools):
                pools[layer] = from_host(pool, next(copies), pages)  # stored at once, as above

    def _to_device(self, array: np.ndarray | None) -> Array | None:
        if array is None:
            return None
        # Without a device the table is uncommitted, as the pools are, so JAX may move it to arrays on another device.
        return jnp.array(array) if self._table_placement is None else jax.device_put(array, self._table_placement)


def _without_channels(device: jax.Device | jax.sharding.Sharding | None) -> jax.Device | jax.sharding.Sharding | None:
    """Returns where the scales of a pool are: as the pool, which has one more axis."""
    if not isinstance(device, jax.sharding.NamedSharding):
        return device
    return jax.sharding.NamedSharding(device.mesh, jax.sharding.PartitionSpec(*device.spec[:3]))


# Donated, because an update without donation would need memory for a second pool.
@partial(jax.jit, donate_argnums=0)
def _copy_pages(pool: Array, source: Array, target: Array) -> Array:
    return pool.at[target].set(pool[source])


def to_host(pool: Array, pages: tuple[int, ...]) -> Array | np.ndarray:
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


# A step may be an argument of a jitted function: its tables are traced, and max_len_q is static.
jax.tree_util.register_pytree_node(
    Step,
    lambda step: ((step.block_table, step.seq_lens, step.cu_seqlens_q), step.max_len_q),
    lambda max_len_q, arrays: Step(*arrays, max_len_q),
)


@SharedOptions(paged_pools.pages_that_fit, PoolSizes.__annotations__)
def pages_that_fit(
    memory: int | None = None,
    *,
    dtype: DTypeLike = jnp.float32,
    device: jax.Device | None = None,
    fraction: float = 0.9,
    **sizes: Unpack[PoolSizes],
) -> int:
    """Returns how many pages fit: the ``num_pages`` of a ``PagedKVCache`` of these sizes.

    Call it when the model is loaded and has run once, because its own memory is then no longer free.

    Args:
        memory: bytes; ``fraction`` of the GPU's free memory if None.
        page_size, num_layers, kv_heads, head_dim, value_dim, dtype: as in ``attn_core.pages_that_fit``.
        device: the GPU whose free memory counts, JAX's first one if None. Free is what JAX may use, by default three
            quarters of the GPU, and does not use yet.
        fraction: above 0 and at most 1. The rest is for activations.

    Raises:
        SpecError: for less memory than a page needs, or a wrong size. DTypeError: for another dtype.
        DeviceError: if ``memory`` is None and the device does not tell its free memory, as a CPU does not.
    """
    if memory is None:
        memory = paged_pools.part_of(_free_memory(device), fraction)
    return paged_pools.pages_that_fit(memory, dtype=name_of(dtype), **sizes)


def name_of(dtype: DTypeLike | None) -> Any:
    """Returns the name of a dtype; another value, such as a name, as it is."""
    if dtype is None or isinstance(dtype, str):
        return dtype
    try:
        return np.dtype(dtype).name
    except (TypeError, ValueError):
        return dtype


def _free_memory(device: object) -> int:
    device = jax.devices()[0] if device is None else device
    if not isinstance(device, jax.Device):
        raise SpecError(f"device={shown(device)}: expected a jax.Device, or None")
    stats = device.memory_stats()
    if not stats or "bytes_limit" not in stats:
        raise DeviceError(f"device={device}: expected a GPU, which tells its free memory; else pass memory in bytes")
    return int(stats["bytes_limit"] - stats.get("bytes_in_use", 0))


def pages_of(cache: Array | tuple[Array, Array], layout: str) -> tuple[Array, Array]:
    """Returns a pool of another library as ``(k_pages, v_pages)``.

    A JAX array has no strides, so every layout but a pair in ``"NHD"`` or ``"vllm"`` is a copy of the pool. Inside
    ``jit``, XLA may fuse the slice into the gather of ``jax_xla``; for other backends it copies. If you own the pool,
    convert it once and keep the result.

    Args:
        cache: one array with keys and values, or a pair of arrays.
        layout: "NHD", "HND", "vllm", "interleaved" or "heads_first"; ``attn_core.paged.pools.pages_of`` says which
            axes and errors these have.
    """
    return paged_pools.pages_of(cache, layout, plan.check_array, _ordered)


def _ordered(pool: Array, order: tuple[int, ...]) -> Array:
    return pool if order == (0, 1, 2, 3) else pool.transpose(order)
