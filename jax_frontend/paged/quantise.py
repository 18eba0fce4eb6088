"""Quantises the keys and values of new tokens, as ``attn_core.paged.quantised`` defines it, in JAX's operations."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from attn_core.paged.quantised.numbers import (
    HIGHEST_SCALE,
    LARGEST,
    OF_PAGES,
    OF_TOKENS,
    SMALLEST,
    Quotient,
    round_magnitude,
)
from attn_core.paged.quantised.scales import STORED

Array = jax.Array
INFINITY = 0x7F800000
"""The bits of float32's infinity."""


def write(pages: Array, scales: Array | None, places: tuple[Array, Array], rows: Array) -> tuple[Array, Any]:
    """Returns (pages, scales) with rows ``[tokens, kv_heads, dim]`` at their pages and offsets, quantised if there are
    scales. A page past the end of the pool is skipped."""
    if scales is None:
        return pages.at[places].set(rows, mode="drop"), None
    dtype = STORED[str(pages.dtype)]
    if scales.ndim == 3:
        new, factors = token_scales(rows, dtype)
        scales = scales.at[places].set(new, mode="drop")
    else:
        factors = page_factors(scales.at[places[0]].get(mode="fill", fill_value=1))
    return pages.at[places].set(stored_numbers(rows, factors, dtype), mode="drop"), scales


def token_scales(rows: Array, dtype: str) -> tuple[Array, Array]:
    """Returns (scales, factors), float32 ``[tokens, kv_heads]``, of rows ``[tokens, kv_heads, dim]``."""
    # Of the bits, because XLA's maximum of floats drops a NaN in some fusions.
    bits = (lax.bitcast_convert_type(rows.astype(jnp.float32), jnp.int32) & 0x7FFFFFFF).max(-1)
    finite = bits < INFINITY
    magnitude = lax.bitcast_convert_type(jnp.where(finite, bits, 0), jnp.float32)
    rounded, factors = _divide(jnp.maximum(magnitude, SMALLEST), OF_TOKENS[dtype])
    scales = rounded * np.float32(1 / LARGEST[dtype])
    return jnp.where(finite, scales, jnp.nan), jnp.where(finite, factors, 0)


def page_factors(scales: Array) -> Array:
    """Returns the factors of the caller's scales; 0 for a scale that is not positive and finite."""
    bits = lax.bitcast_convert_type(scales, jnp.int32)
    usable = (bits > 0) & (bits < INFINITY)  # XLA would compare a subnormal number as 0
    safe = jnp.clip(jnp.where(usable, scales, 1), SMALLEST, HIGHEST_SCALE)
    return jnp.where(usable, _divide(safe, OF_PAGES)[1], 0)


def stored_numbers(rows: Array, factors: Array, dtype: str) -> Array:
    """Returns what the pool stores, in the pool's dtype."""
    factors = factors[..., None]
    most = np.float32(LARGEST[dtype])
    product = jnp.clip(jnp.where(factors == 0, 0, rows.astype(jnp.float32) * factors), -most, most)
    if dtype == "float8_e4m3fn":
        return product.astype(jnp.float8_e4m3fn)
    stored = jnp.round(jnp.nan_to_num(product, nan=0)).astype(jnp.int8)  # half to even
    if dtype == "int8":
        return stored
    low, high = jnp.split(lax.bitcast_convert_type(stored, jnp.uint8) & 15, 2, -1)
    return low | (high << 4)


def _divide(magnitude: Array, by: Quotient) -> tuple[Array, Array]:
    """Returns (the rounded magnitudes, the factors)."""
    bits = jnp.minimum(lax.bitcast_convert_type(magnitude, jnp.int32), by.most)
    rounded, quotient = round_magnitude(bits, by)
    exponents = (by.exponent - (rounded >> 23)) << 23
    factors = lax.bitcast_convert_type(quotient.astype(jnp.float32), jnp.int32) + exponents
    return lax.bitcast_convert_type(rounded, jnp.float32), lax.bitcast_convert_type(factors, jnp.float32)
