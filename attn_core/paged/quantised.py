"""Quantised keys and values: how numbers become stored numbers and scales, bit by bit; and checks of pools and scales.

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

from collections.abc import Mapping
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from attn_core.call.arguments import ArrayFacts
from attn_core.call.spec import BITS, DTYPES
from attn_core.call.tensors import Array
from attn_core.errors import DTypeError, ShapeError, SpecError

STORED = {"float8_e4m3fn": "float8_e4m3fn", "int8": "int8", "uint8": "int4"}
"""The dtypes of quantised pages by the dtypes of their arrays."""
ROW_DTYPES = tuple(dtype for dtype in DTYPES if dtype != "float64")
"""The dtypes of queries and of new keys and values beside quantised pages."""
LARGEST = {"float8_e4m3fn": 448, "int8": 127, "int4": 7}
"""The largest stored number."""
KINDS = {None: 0, "float8_e4m3fn": 1, "int8": 2, "int4": 3}
"""The constant KIND of the Triton kernels for a dtype of pages."""
SMALLEST = 2.0**-100
"""The smallest magnitude of a token and head, so that the scale of zeros is above 0; also the smallest page scale."""
HIGHEST_SCALE = 2.0**100
"""The largest page scale."""
INFINITY = 0x7F800000
"""The bits of float32's infinity."""


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


def token_scales(xp: ModuleType, rows: Any, dtype: str) -> tuple[Any, Any]:
    """Returns (scales, factors), float32 ``[tokens, kv_heads]``.

    Args:
        xp: ``torch`` or ``jax.numpy``.
        rows: float32 ``[tokens, kv_heads, dim]``, of that framework.
    """
    # Of the bits, because XLA's maximum of floats drops a NaN in some fusions.
    magnitude = xp.amax(rows.view(xp.int32) & 0x7FFFFFFF, -1)
    finite = magnitude < INFINITY
    rounded, factors = _divide(xp, xp.where(finite, magnitude, 0).clip(min=_bits(SMALLEST)), OF_TOKENS[dtype])
    scales = rounded.view(xp.float32) * float(np.float32(1 / LARGEST[dtype]))
    return xp.where(finite, scales, np.nan), xp.where(finite, factors, 0.0)


def page_factors(xp: ModuleType, scales: Any) -> Any:
    """Returns the factors of the caller's scales, float32; 0 for a scale that is not positive and finite."""
    bits = scales.view(xp.int32)
    usable = (bits > 0) & (bits < INFINITY)  # XLA would compare a subnormal number as 0
    safe = xp.where(usable, bits, _bits(1.0)).clip(_bits(SMALLEST), _bits(HIGHEST_SCALE))
    return xp.where(usable, _divide(xp, safe, OF_PAGES)[1], 0.0)


def stored_numbers(xp: ModuleType, rows: Any, factors: Any, dtype: str) -> Any:
    """Returns what the pool stores for float32 rows, in float8_e4m3fn or int8, or in uint8 for int4."""
    factors, most = factors[..., None], LARGEST[dtype]
    product = xp.where(factors == 0, 0.0, rows * factors).clip(-most, most)
    if dtype == "float8_e4m3fn":
        return _cast(product, xp.float8_e4m3fn)
    stored = _cast(xp.nan_to_num(product, nan=0.0).round(), xp.int8)  # half to even
    if dtype == "int8":
        return stored
    stored, half = stored.view(xp.uint8) & 15, stored.shape[-1] // 2
    return stored[..., :half] | (stored[..., half:] << 4)


def _divide(xp: ModuleType, magnitude: Any, by: Quotient) -> tuple[Any, Any]:
    """Returns (the bits of the rounded magnitudes, the factors) of the bits of magnitudes."""
    rounded = (magnitude.clip(max=by.most) + by.dropped) & ~by.dropped
    digits = ((rounded >> (23 - by.places)) & ((1 << by.places) - 1)) | (1 << by.places)
    quotient = _cast(by.numerator // digits, xp.float32).view(xp.int32)
    return rounded, (quotient + ((by.exponent - (rounded >> 23)) << 23)).view(xp.float32)


def _cast(array: Any, dtype: Any) -> Any:
    """Returns an array in a dtype, where it is. ``torch.asarray`` would move it to torch's default device."""
    return array.astype(dtype) if hasattr(array, "astype") else array.to(dtype)


def _bits(number: float) -> int:
    return int(np.float32(number).view(np.int32))


def unpack_int4(xp: ModuleType, pool: Any) -> Any:
    """Returns the int4 numbers of a pool's bytes, int8 ``[..., dim]``. xp: ``numpy``, ``torch`` or ``jax.numpy``."""
    signed = pool.view(xp.int8)
    return xp.concatenate(((signed << 4) >> 4, signed >> 4), -1)


def real_numbers(xp: ModuleType, stored: Any, scales: Array, dtype: str | None) -> Any:
    """Returns the float32 numbers ``[..., kv_heads, dim]`` of stored ones and their scales ``[..., kv_heads]``.

    Args:
        xp: ``torch`` or ``jax.numpy``.
        stored: of that framework; float8 may be bytes.
        dtype: of the pages.
    """
    if dtype == "int4":
        stored = unpack_int4(xp, stored)
    elif dtype == "float8_e4m3fn":
        stored = stored.view(xp.float8_e4m3fn)
    return _cast(stored, xp.float32) * scales[..., None]


def dequantised(pool: Array, scales: Array, dtype: str) -> np.ndarray:
    """Returns the numbers of a pool, float64 ``[num_pages, page_size, kv_heads, dim]``."""
    stored = unpack_int4(np, np.asarray(pool)) if dtype == "int4" else np.asarray(pool)
    scales = np.asarray(scales, np.float64)
    return stored.astype(np.float64) * (scales[:, None] if scales.ndim == 2 else scales)[..., None]


def page_dtype(pool: ArrayFacts) -> str | None:
    """Returns how a pool is quantised; None for a pool of floats."""
    return STORED.get(pool.dtype)


def channels(pool: ArrayFacts) -> int:
    """Returns the channels of a token and head; an int4 pool has two in a byte."""
    return pool.shape[3] * 8 // BITS[page_dtype(pool) or "int8"]


def check_pool_dtype(name: str, pool: ArrayFacts) -> None:
    """Raises DTypeError for a pool of a dtype that no pool has."""
    if pool.dtype not in DTYPES and pool.dtype not in STORED:
        expected = f"{', '.join(DTYPES)}, float8_e4m3fn, int8 or uint8 (two int4 numbers a byte)"
        raise DTypeError(f"{name}: expected one of {expected}, got {pool.dtype}")


def check_beside_pool(name: str, facts: ArrayFacts, pool_name: str, pool: ArrayFacts) -> None:
    """Raises DTypeError unless queries, or new keys or values, go together with a pool."""
    if page_dtype(pool) is None:
        if facts.dtype != pool.dtype:
            raise DTypeError(f"{name}: expected the dtype of {pool_name}, {pool.dtype}, got {facts.dtype}; cast it")
    elif facts.dtype not in ROW_DTYPES:
        where = f"beside quantised pages ({page_dtype(pool)})"
        raise DTypeError(f"{name}: expected one of {', '.join(ROW_DTYPES)} {where}, got {facts.dtype}; cast it")


def scales_kind(pool: ArrayFacts, scales: dict[str, ArrayFacts | None]) -> str | None:
    """Returns whether a pool has scales by "page" or by "token"; None for a pool of floats.

    Args:
        scales: k_scales and v_scales, by their names.

    Raises:
        SpecError, ShapeError, DTypeError: naming the scales.
    """
    dtype = page_dtype(pool)
    num_pages, page_size, kv_heads = pool.shape[:3]
    shapes = {(num_pages, kv_heads): "page", (num_pages, page_size, kv_heads): "token"}
    kinds = []
    for name, facts in scales.items():
        if dtype is None:
            if facts is not None:
                raise SpecError(f"{name}: expected None, because pages in {pool.dtype} have no scales")
            continue
        expected = f"{[num_pages, kv_heads]} for scales by page, or {[num_pages, page_size, kv_heads]} by token"
        if facts is None:
            raise SpecError(f"{name}: expected the scales of pages in {dtype}, float32 of shape {expected}, got None")
        if facts.dtype != "float32":
            raise DTypeError(f"{name}: expected dtype float32, got {facts.dtype}; cast it")
        if facts.shape not in shapes:
            raise ShapeError(f"{name}: expected shape {expected}, got {list(facts.shape)}")
        kinds.append(shapes[facts.shape])
    if len(set(kinds)) > 1:
        raise ShapeError(f"v_scales: expected scales by {kinds[0]} as k_scales, got scales by {kinds[1]}")
    return kinds[0] if kinds else None


def check_used_scales(scales: Mapping[str, Any], slots: np.ndarray, page_size: int) -> None:
    """Checks the scales that a call reads or stores by, on the host, after its tables have been checked.

    Args:
        scales: k_scales and v_scales as numpy arrays, by their names. slots: that have these scales.

    Raises:
        SpecError: naming the first scale that is zero, negative, infinite or NaN.
    """
    for name, array in scales.items():
        by_page = array.ndim == 2
        rows = np.unique(slots // page_size) if by_page else slots
        used = (array if by_page else array.reshape(-1, array.shape[2]))[rows]  # [rows, kv_heads]
        wrong = ~((used > 0) & np.isfinite(used))
        if wrong.any():
            row, head = (int(index) for index in np.argwhere(wrong)[0])
            at = int(rows[row])
            place = f"{at}, {head}" if by_page else f"{at // page_size}, {at % page_size}, {head}"
            raise SpecError(
                f"{name}[{place}]={float(used[row, head])!r}: expected a positive, finite scale; append_kv writes NaN "
                "for a token with NaN or Inf"
            )
