"""NaN and Inf in operands: which values are finite, and the values without the others."""

from __future__ import annotations

from typing import Any


def finite_only(array: Any) -> Any:
    """Returns the array with 0 for NaN and Inf."""
    import jax.numpy as jnp

    return jnp.where(jnp.isfinite(array), array, 0)


def finite_constant(array: Any) -> Any:
    """Returns ``finite_only`` without a derivative. Of 16-bit floats, XLA selects the bits without widening them."""
    import jax.numpy as jnp
    from jax.lax import bitcast_convert_type

    if array.dtype.itemsize != 2:
        return finite_only(array)
    bits = jnp.where(is_finite(array), bitcast_convert_type(array, jnp.uint16), jnp.uint16(0))
    return bitcast_convert_type(bits, array.dtype)


def is_finite(array: Any) -> Any:
    """Returns ``jnp.isfinite``. Reads it from the bits of 16-bit floats, which XLA would widen on a CPU."""
    import jax.numpy as jnp
    from jax.lax import bitcast_convert_type

    if array.dtype.itemsize != 2:
        return jnp.isfinite(array)
    exponent = jnp.uint16(0x7C00 if array.dtype == jnp.float16 else 0x7F80)
    return (bitcast_convert_type(array, jnp.uint16) & exponent) != exponent


def finite_rows(array: Any) -> Any:
    """Returns which rows, along the last axis, have neither NaN nor Inf. False also if a wider row's sum overflows."""
    import jax.numpy as jnp

    return is_finite(array).all(-1) if array.dtype.itemsize == 2 else jnp.isfinite(array.sum(-1))


def all_finite(*arrays: Any) -> Any:
    """Returns whether the sum of all elements is finite: one boolean also under vmap, so that a cond stays a cond.

    It is False if any element is NaN or Inf, and for finite elements only if their sum overflows. A sum takes XLA much
    less time to compile than a test of each element.
    """
    import jax
    import jax.numpy as jnp
    from jax.custom_batching import custom_vmap

    @custom_vmap
    def finite(*arrays: Any) -> Any:
        # Not narrower than float32, because a sum of float16 overflows soon.
        totals = (jnp.sum(array, dtype=jnp.promote_types(array.dtype, jnp.float32)) for array in arrays)
        return jnp.isfinite(sum(totals))

    @finite.def_vmap
    def _(axis_size: int, batched: Any, *arrays: Any) -> tuple[Any, bool]:
        return finite(*arrays), False

    return finite(*map(jax.lax.stop_gradient, arrays))  # whether it is finite has no derivative
