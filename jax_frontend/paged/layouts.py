"""The pools and tables of other libraries as ``paged_attention`` and ``append_kv`` take them, for JAX arrays."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from attn_core.call.arguments import ArrayFacts
from attn_core.paged.allocation.allocator import UNUSED
from attn_core.paged.layouts import view_of_pair, views_of_one
from attn_core.paged.row_tables import check_row_types, check_rows
from jax_frontend.dispatch import plan
from jax_frontend.paged.tables import is_on_host

Array = jax.Array


def pages_of(cache: Array | tuple[Array, Array], layout: str) -> tuple[Array, Array]:
    """Returns a pool of another library as ``(k_pages, v_pages)``.

    A JAX array has no strides, so every layout but a pair in ``"NHD"`` or ``"vllm"`` is a copy of the pool. Inside
    ``jit``, XLA may fuse the slice into the gather of ``jax_xla``; for other backends it copies. If you own the pool,
    convert it once and keep the result. Axes by layout, as a pair of arrays and as one array:

    - ``"NHD"``: ``[pages, size, heads, dim]``; ``[pages, 2, size, heads, dim]`` (FlashInfer).
    - ``"HND"``: ``[pages, heads, size, dim]``; ``[pages, 2, heads, size, dim]`` (FlashInfer).
    - ``"vllm"``: ``[blocks, size, heads, dim]``; ``[blocks, 2, size, heads, dim]`` or ``[2, blocks, ...]``, whichever
      has the axis of 2.
    - ``"interleaved"``: only as one array, ``[pages, size, 2 * heads, dim]``, keys at even heads (JAX's
      ragged_paged_attention).
    - ``"heads_first"``: only as a pair, ``[heads, pages, size, dim]`` (JAX's paged_attention).

    Args:
        cache: one array with keys and values, or a pair of arrays, whose dims may differ.
        layout: one of the names above.

    Returns:
        k_pages ``[num_pages, page_size, kv_heads, head_dim]``, and v_pages.

    Raises:
        SpecError: for an unknown layout, or one that the cache's form does not have.
        ShapeError: for a shape that is not of the layout, or that fits two orders of the axes.
        TypeError: for a cache that is neither an array nor a pair of arrays.
    """
    if isinstance(cache, tuple | list) and len(cache) == 2:
        pools = []
        for name, pool in zip(("cache[0]", "cache[1]"), cache, strict=True):
            plan.check_array(name, pool)
            order = view_of_pair(name, layout, tuple(pool.shape)).order
            pools.append(pool if order == (0, 1, 2, 3) else pool.transpose(order))
        return pools[0], pools[1]
    plan.check_array("cache", cache)
    keys, values = views_of_one(layout, tuple(cache.shape))  # type: ignore[union-attr]
    return cache[keys.part].transpose(keys.order), cache[values.part].transpose(values.order)  # type: ignore[call-overload, union-attr]


def table_of_rows(
    indptr: Array, indices: Array, last_page_len: Array, *, page_size: int, width: int
) -> tuple[Array, Array]:
    """Returns (block_table, seq_lens) of FlashInfer's table in CSR. Its values stay on the device; traceable.

    Args:
        indptr: int32 ``[batch + 1]``: row b has the pages ``indices[indptr[b] : indptr[b + 1]]``.
        indices: int32 ``[pages in use or more]``.
        last_page_len: int32 ``[batch]``: tokens in the last page of each row.
        page_size: tokens in a page.
        width: columns of the result, at least the most pages of a row.

    Returns:
        int32 ``[batch, width]``, -1 behind a row's pages, and int32 ``[batch]``.

    Raises:
        DTypeError, ShapeError: for arrays that are no table in CSR.
        SpecError: for wrong values in arrays on the CPU that are not traced. Other values are not read: a longer row
            is cut at ``width``, and entries outside of ``indices`` become -1.
    """
    named = {"indptr": indptr, "indices": indices, "last_page_len": last_page_len}
    for name, array in named.items():
        plan.check_array(name, array)
    device = plan.device_name(indptr)
    all_facts = {name: ArrayFacts(tuple(each.shape), str(each.dtype), device) for name, each in named.items()}
    check_row_types(all_facts, page_size, width)
    if all(map(is_on_host, named.values())):
        check_rows(np.asarray(indptr), np.asarray(indices), np.asarray(last_page_len), page_size, width)
    column = jnp.arange(width, dtype=jnp.int32)
    place = indptr[:-1, None] + column  # [batch, width]
    used = (place < indptr[1:, None]) & (place >= 0) & (place < len(indices))
    if len(indices) == 0:
        table = jnp.full(place.shape, UNUSED, jnp.int32)
    else:
        table = jnp.where(used, indices[jnp.clip(place, 0, len(indices) - 1)], UNUSED)
    count = indptr[1:] - indptr[:-1]
    tokens = (count - 1) * page_size + jnp.clip(last_page_len, 0, page_size)
    return table, jnp.where(count > width, width * page_size, jnp.where(count > 0, tokens, 0))
