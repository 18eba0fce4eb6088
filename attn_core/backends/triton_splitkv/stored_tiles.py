"""Turns tiles of stored numbers from quantised pages into tiles that Triton's products take.

This module imports triton, so others import it only when they run.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def lower_int4(byte):
    """Returns the int4 numbers in the low four bits of bytes."""
    return (byte.to(tl.int8, bitcast=True) << 4) >> 4


@triton.jit
def upper_int4(byte):
    """Returns the int4 numbers in the high four bits of bytes."""
    return byte.to(tl.int8, bitcast=True) >> 4


@triton.jit
def as_numbers(stored, DTYPE: tl.constexpr):
    """Returns stored numbers in the kernel's dtype, which has all of them."""
    if stored.dtype == tl.int8:
        stored = stored.to(tl.float32)  # Triton's interpreter casts no integers to bfloat16
    return stored.to(DTYPE)


@triton.jit
def scaled(stored, scale, SCALED: tl.constexpr, DTYPE: tl.constexpr):
    """Returns the values of a tile ``[keys, channels]`` in the kernel's dtype, scaled by key if SCALED."""
    if SCALED:
        return (stored.to(tl.float32) * scale[:, None]).to(DTYPE)
    return as_numbers(stored, DTYPE)
