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
    convert it once and keep the result.

    Args:
        cache: one array with keys and values, or a pair of arrays.
        layout: "NHD", "HND", "vllm", "interleaved" or "heads_first"; ``attn_core.paged.layouts.pages_of`` says which
            axes and errors these have.
    """
    return layouts.pages_of(cache, layout, plan.check_array, _ordered)


def _ordered(pool: Array, order: tuple[int, ...]) -> Array:
    return pool if order == (0, 1, 2, 3) else pool.transpose(order)
