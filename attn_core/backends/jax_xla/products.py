"""Products of attention in XLA operations, and NaN and Inf in their operands. Axes in the einsums: as in ``whole``."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from attn_core.backends.shared.in_jax import product_precision
from attn_core.call.kinds import is_number
from attn_core.call.spec import AttentionSpec

if TYPE_CHECKING:
    import jax


def finite_only(array: jax.Array) -> jax.Array:
    """Returns the array with 0 for NaN and Inf."""
    import jax.numpy as jnp

    return jnp.where(jnp.isfinite(array), array, 0)


def finite_constant(array: jax.Array) -> jax.Array:
    """Returns ``finite_only`` without a derivative. Of 16-bit floats, XLA selects the bits without widening them."""
    import jax.numpy as jnp
    from jax.lax import bitcast_convert_type

    if array.dtype.itemsize != 2:
        return finite_only(array)
    bits = jnp.where(is_finite(array), bitcast_convert_type(array, jnp.uint16), jnp.uint16(0))
    return bitcast_convert_type(bits, array.dtype)


def is_finite(array: jax.Array) -> jax.Array:
    """Returns ``jnp.isfinite``. Reads it from the bits of 16-bit floats, which XLA would widen on a CPU."""
    import jax.numpy as jnp
    from jax.lax import bitcast_convert_type

    if array.dtype.itemsize != 2:
        return jnp.isfinite(array)
    exponent = jnp.uint16(0x7C00 if array.dtype == jnp.float16 else 0x7F80)
    return (bitcast_convert_type(array, jnp.uint16) & exponent) != exponent


def finite_rows(array: jax.Array) -> jax.Array:
    """Returns which rows, along the last axis, have neither NaN nor Inf. False also if a wider row's sum overflows."""
    import jax.numpy as jnp

    return is_finite(array).all(-1) if array.dtype.itemsize == 2 else jnp.isfinite(array.sum(-1))


def all_finite(*arrays: jax.Array) -> jax.Array:
    """Returns whether the sum of all elements is finite: one boolean also under vmap, so that a cond stays a cond.

    It is False if any element is NaN or Inf, and for finite elements only if their sum overflows. A sum takes XLA much
    less time to compile than a test of each element.
    """
    import jax
    import jax.numpy as jnp
    from jax.custom_batching import custom_vmap

    @custom_vmap
    def finite(*arrays: jax.Array) -> jax.Array:
        # Not narrower than float32, because a sum of float16 overflows soon.
        totals = (jnp.sum(array, dtype=jnp.promote_types(array.dtype, jnp.float32)) for array in arrays)
        return jnp.isfinite(sum(totals))

    @finite.def_vmap
    def _(axis_size: int, batched: object, *arrays: jax.Array) -> tuple[jax.Array, bool]:
        return finite(*arrays), False

    return finite(*map(jax.lax.stop_gradient, arrays))  # whether it is finite has no derivative


def sum_dtype(spec: AttentionSpec) -> str:
    """Returns the dtype of weights and values in their product. float16 would lose small weights, so it is widened."""
    return "bfloat16" if spec.dtype == "bfloat16" else spec.lse_dtype


SMALL = 128
"""Products of at most so many elements for each matrix are widened. XLA for GPUs has no kernel for those below 100, and
multiplied bfloat16 in bfloat16: the log-sum-exp of 3 queries and 3 keys of 7 channels was off by 2e-3 (jax 0.11.2)."""


def product(subscripts: str, left: jax.Array, right: jax.Array, dtype: str) -> jax.Array:
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


def _is_small(subscripts: str, left: tuple[int, ...], right: tuple[int, ...]) -> bool:
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


def sum_over_queries(spec: AttentionSpec, weights: jax.Array, rows: jax.Array) -> jax.Array:
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
