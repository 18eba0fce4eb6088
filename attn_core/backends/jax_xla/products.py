"""Products of attention in XLA operations. Axes in the einsums: as in ``whole.py``."""

from __future__ import annotations

from math import prod
from typing import Any

from attn_core.backends.shared.in_jax.xla_precision import product_precision
from attn_core.call.kinds import is_number
from attn_core.call.spec import AttentionSpec


def sum_dtype(spec: AttentionSpec) -> str:
    """Returns the dtype of weights and values in their product. float16 would lose small weights, so it is widened."""
    return "bfloat16" if spec.dtype == "bfloat16" else spec.lse_dtype


SMALL = 128
"""Products of at most so many elements for each matrix are widened. XLA for GPUs has no kernel for those below 100, and
multiplied bfloat16 in bfloat16: the log-sum-exp of 3 queries and 3 keys of 7 channels was off by 2e-3 (jax 0.11.2)."""


def product(subscripts: str, left: Any, right: Any, dtype: str) -> Any:
    """Returns the einsum of two arrays, accumulated and returned in ``dtype``."""
    import jax.numpy as jnp

    if (
        str(left.dtype) in ("bfloat16", "float16")
        and dtype == "float32"
        and _is_small(subscripts, left.shape, right.shape)
    ):
        left, right = left.astype(dtype), right.astype(dtype)
    precision = product_precision(left.dtype)
    return jnp.einsum(subscripts, left, right, precision=precision, preferred_element_type=dtype)


def _is_small(subscripts: str, left: tuple[Any, ...], right: tuple[Any, ...]) -> bool:
    """Returns whether the two matrices of a product have at most SMALL elements. A symbolic size counts as large."""
    names, out = subscripts.split("->")
    first, second = names.split(",")
    sizes = dict(zip(first + second, (*left, *right), strict=True))
    if not all(map(is_number, sizes.values())):
        return False
    batch = set(first) & set(second) & set(out)
    matrices = (prod(sizes[name] for name in each if name not in batch) for each in (first, second))
    return sum(matrices) <= SMALL


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
