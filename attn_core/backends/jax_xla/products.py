"""Products of attention in XLA operations. Axes in the einsums: as in ``whole.py``."""

from __future__ import annotations

from typing import Any

from attn_core.backends.shared.xla_precision import product_precision
from attn_core.call.spec import AttentionSpec


def sum_dtype(spec: AttentionSpec) -> str:
    """Returns the dtype of weights and values in their product. float16 would lose small weights, so it is widened."""
    return "bfloat16" if spec.dtype == "bfloat16" else spec.lse_dtype


def product(subscripts: str, left: Any, right: Any, dtype: str) -> Any:
    """Returns the einsum of two arrays, accumulated and returned in ``dtype``."""
    import jax.numpy as jnp

    precision = product_precision(left.dtype)
    return jnp.einsum(subscripts, left, right, precision=precision, preferred_element_type=dtype)


SHORT_KEYS = {True: 128, False: 64}
"""Keys up to which XLA transposes the scores faster than the queries: with one query head per kv head, with more."""


def sum_over_queries(spec: AttentionSpec, weights: Any, rows: Any) -> Any:
    """Returns the sums of the queries' rows ``[b, h, g, i, channels]`` for each key: ``[b, j, h, 1, channels]``.

    XLA transposes one factor of the product on a CPU, so the smaller one comes first. Without the axis of 1, it would
    copy the sums twice.
    """
    keys, channels = weights.shape[-1], rows.shape[-1]
    if keys <= SHORT_KEYS[spec.group_size == 1] or 3 * keys <= 2 * channels:
        sums = product("bhgij,bhgid->bhjd", weights, rows, spec.lse_dtype)
        return sums[:, :, None].transpose(0, 3, 1, 2, 4)
    sums = product("bhgid,bhgij->bhdj", rows, weights, spec.lse_dtype)
    return sums[:, :, None].transpose(0, 4, 1, 2, 3)
