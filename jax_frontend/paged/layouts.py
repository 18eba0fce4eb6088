"""The pools of other libraries as ``paged_attention`` and ``append_kv`` take them, for JAX arrays."""

from __future__ import annotations

import jax

from attn_core.paged import layouts
from jax_frontend.dispatch import plan

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
    return layouts.pages_of(cache, layout, plan.check_array, _ordered)


def _ordered(pool: Array, order: tuple[int, ...]) -> Array:
    return pool if order == (0, 1, 2, 3) else pool.transpose(order)
