"""Quantised keys and values: how numbers become stored numbers and scales, bit by bit, in numpy.

A number in a quantised page is ``stored * scale``, a real number that nothing rounds before a kernel uses it. The
scale is float32 and belongs to one kv head of one page or of one token. The stored numbers are float8_e4m3fn, int8
(-127 to 127) or int4 (-7 to 7). Byte c of an int4 row has channel c in its low and channel ``c + dim / 2`` in its high
four bits, in two's complement, so both halves of a row lie in the order of their channels.

A stored number is ``number * factor``, saturated and rounded half to even. With a scale for each token, the factor maps
the largest magnitude of a token and head, rounded up to 12 bits, to the largest stored number. A NaN or Inf makes the
scale NaN and the stored numbers 0. With a scale for each page, the scales are the caller's and the factor is their
reciprocal to 13 bits; a NaN stays NaN in float8_e4m3fn and becomes 0 in integers.

Factors are quotients of integers, because every framework divides integers exactly; XLA's division of floats on GPUs
is not exact. XLA also flushes subnormal numbers, so magnitudes below ``SMALLEST`` count as ``SMALLEST``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

LARGEST = {"float8_e4m3fn": 448, "int8": 127, "int4": 7}
"""The largest stored number."""
KINDS = {None: 0, "float8_e4m3fn": 1, "int8": 2, "int4": 3}
"""The constant KIND of the Triton kernels for a dtype of pages."""
SMALLEST = 2.0**-100
"""The smallest magnitude of a token and head, so that the scale of zeros is above 0; also the smallest page scale."""
HIGHEST_SCALE = 2.0**100
"""The largest page scale."""


class Quotient(NamedTuple):
    """The division ``numerator * 2 ** -shift / magnitude`` in integers of 31 bits.

    Attributes:
        numerator: the dividend, ``shift`` binary places to the left.
        places: bits behind the leading one that the magnitude is rounded up to.
    """

    numerator: int
    shift: int
    places: int

    @property
    def dropped(self) -> int:
        """The bits of a float32 number that a rounded magnitude lacks."""
        return (1 << (23 - self.places)) - 1

    @property
    def exponent(self) -> int:
        """The factor is ``(numerator // digits) * 2 ** (exponent - e)``, e the exponent field of the magnitude."""
        return 127 + self.places - self.shift

    @property
    def most(self) -> int:
        """The bits of the largest rounded magnitude."""
        return 0x7F7FFFFF & ~self.dropped


OF_TOKENS = {
    "float8_e4m3fn": Quotient(448 << 22, 22, 11),
    "int8": Quotient(127 << 24, 24, 11),
    "int4": Quotient(7 << 28, 28, 11),
}
OF_PAGES = Quotient(1 << 30, 30, 15)


def round_magnitude(bits: Any, by: Quotient) -> tuple[Any, Any]:
    """Returns (the bits of the rounded magnitude, the integer quotient) of int32 arrays of any framework."""
    rounded = (bits + by.dropped) & ~by.dropped
    digits = ((rounded >> (23 - by.places)) & ((1 << by.places) - 1)) | (1 << by.places)
    return rounded, by.numerator // digits


def _divide(magnitude: np.ndarray, by: Quotient) -> tuple[np.ndarray, np.ndarray]:
    rounded, quotient = round_magnitude(np.minimum(magnitude.view(np.int32), by.most), by)
    exponents = (by.exponent - (rounded >> 23)).astype(np.int32) << 23
    return rounded.astype(np.int32).view(np.float32), (quotient.astype(np.float32).view(np.int32) + exponents).view(
        np.float32
    )


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


def unpack_int4(pool: np.ndarray) -> np.ndarray:
    """Returns the int4 numbers of bytes, int8: the inverse of ``pack_int4``."""
    return np.concatenate([(pool << 4).view(np.int8) >> 4, pool.view(np.int8) >> 4], -1)


def dequantised(pool: Any, scales: Any, dtype: str) -> np.ndarray:
    """Returns the numbers of a pool, float64 ``[num_pages, page_size, kv_heads, dim]``."""
    stored = unpack_int4(np.asarray(pool)) if dtype == "int4" else np.asarray(pool)
    scales = np.asarray(scales, np.float64)
    return stored.astype(np.float64) * (scales[:, None] if scales.ndim == 2 else scales)[..., None]
