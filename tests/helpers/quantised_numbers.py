"""How numbers become stored numbers and scales, bit by bit, in numpy: what torch, JAX and our kernel must write."""

from __future__ import annotations

import numpy as np

from attn_core.paged.quantised import HIGHEST_SCALE, LARGEST, OF_PAGES, OF_TOKENS, SMALLEST, Quotient, unpack_int4

__all__ = ["LARGEST", "pack_int4", "page_factors", "stored_numbers", "token_scales", "unpack_int4"]


def token_scales(rows: np.ndarray, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns (scales, factors), float32 ``[tokens, kv_heads]``, of rows ``[tokens, kv_heads, dim]``."""
    magnitude = np.abs(rows.astype(np.float32)).max(-1)
    finite = np.isfinite(magnitude)
    rounded, factors = _divide(
        np.maximum(np.where(finite, magnitude, 1), SMALLEST).astype(np.float32), OF_TOKENS[dtype]
    )
    scales = rounded * np.float32(1 / LARGEST[dtype])
    return np.where(finite, scales, np.float32(np.nan)), np.where(finite, factors, np.float32(0))


def page_factors(scales: np.ndarray) -> np.ndarray:
    """Returns the factors of the caller's scales; 0 for a scale that is not positive and finite."""
    usable = np.isfinite(scales) & (scales > 0)
    return np.where(usable, _divide(np.clip(scales, SMALLEST, HIGHEST_SCALE, where=usable), OF_PAGES)[1], np.float32(0))


def stored_numbers(rows: np.ndarray, factors: np.ndarray, dtype: str) -> np.ndarray:
    """Returns the stored numbers of rows as float32 ``[tokens, kv_heads, dim]``."""
    factors = factors[..., None]
    with np.errstate(all="ignore"):
        product = np.where(factors == 0, np.float32(0), rows.astype(np.float32) * factors)
    product = np.clip(product, -LARGEST[dtype], LARGEST[dtype])
    if dtype != "float8_e4m3fn":
        return np.rint(np.nan_to_num(product)).astype(np.float32)
    # Three bits behind the leading one; below 2 ** -6 all steps are 2 ** -9.
    _, exponents = np.frexp(np.nan_to_num(product))
    step = np.ldexp(np.float32(1), np.maximum(exponents - 1, -6) - 3)
    return (np.rint(product / step) * step).astype(np.float32)


def pack_int4(stored: np.ndarray) -> np.ndarray:
    """Returns int4 numbers ``[..., dim]`` as bytes, uint8 ``[..., dim / 2]``."""
    low, high = np.split(stored.astype(np.int8).view(np.uint8) & 15, 2, -1)
    return low | (high << 4)


def _divide(magnitude: np.ndarray, by: Quotient) -> tuple[np.ndarray, np.ndarray]:
    bits = np.minimum(magnitude.view(np.int32), by.most)
    rounded = (bits + by.dropped) & ~by.dropped
    digits = ((rounded >> (23 - by.places)) & ((1 << by.places) - 1)) | (1 << by.places)
    quotient = (by.numerator // digits).astype(np.float32).view(np.int32)
    factors = quotient + ((by.exponent - (rounded >> 23)).astype(np.int32) << 23)
    return rounded.astype(np.int32).view(np.float32), factors.view(np.float32)
