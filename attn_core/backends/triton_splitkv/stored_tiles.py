"""Turns tiles of stored numbers from quantised pages into float16 tiles: formats of numbers, apart from attention.

float16 has every stored number of all kinds, and integers as subnormal numbers, too. With ASSEMBLY, PTX converts two
numbers at once and pairs the numbers of two keys, as the tensor cores read them; otherwise Triton's own operations do,
which its interpreter runs, too. Both give the same numbers.

This module imports triton, so others import it only when they run.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attn_core.paged.quantised import KINDS

FLOAT8 = tl.constexpr(KINDS["float8_e4m3fn"])
INT8 = tl.constexpr(KINDS["int8"])
INT4 = tl.constexpr(KINDS["int4"])
HEADROOM = tl.constexpr(32768.0)
"""The largest weight in float16. A product of a weight and a scale keeps eleven bits down to 2**-29 of the largest."""


# Keys: an integer n, plus an offset (128 for int8, 8 for int4), is the fraction of a subnormal float16 number. So a key
# is (n + offset) * 2**-24, and no instruction subtracts: a correction is added to each sum of products instead.
# Values: a byte n, plus 128, is the fraction of the float16 number 1024 + n + 128. Four bits n, plus 8, are a part of
# the fraction of 1024 + n + 8, or of 1024 + 16 (n + 8). These registers have the numbers that bring both back to n.
_REGISTERS = """.reg .b32 byte, minus_1152, minus_1032, minus_72, sixteenth; .reg .b16 first, second;
    mov.b32 minus_1152, 0xE480E480; mov.b32 minus_1032, 0xE408E408;
    mov.b32 minus_72, 0xD480D480; mov.b32 sixteenth, 0x2C002C00;"""
# Which of four bytes are a pair, beside bytes of another register. Of keys, two words of two bytes are four channels of
# one key, and neighbours are a pair. Of values, a word is followed by that of the next key, and a pair is of both keys.
_NEIGHBOURS = "0x4140", "0x4342"
_OF_TWO_KEYS = "0x4240", "0x4341"


def _int8_values() -> str:
    """Returns PTX that turns a register of four int8 numbers into two registers of two float16 numbers."""
    lower, upper = _OF_TWO_KEYS
    return f"""xor.b32 byte, $2, 0x80808080;
        prmt.b32 $0, byte, 0x64646464, {lower}; prmt.b32 $1, byte, 0x64646464, {upper};
        add.f16x2 $0, $0, minus_1152; add.f16x2 $1, $1, minus_1152;"""


def _int4_values() -> str:
    """The same for int4: two registers of the lower four bits of bytes, then two of the upper four bits."""
    return """shr.u32 byte, $4, 8;
        lop3.b32 $0, $4, 0x000F000F, 0x64086408, 0x6A; lop3.b32 $1, byte, 0x000F000F, 0x64086408, 0x6A;
        lop3.b32 $2, $4, 0x00F000F0, 0x64806480, 0x6A; lop3.b32 $3, byte, 0x00F000F0, 0x64806480, 0x6A;
        add.f16x2 $0, $0, minus_1032; add.f16x2 $1, $1, minus_1032;
        fma.rn.f16x2 $2, $2, sixteenth, minus_72; fma.rn.f16x2 $3, $3, sixteenth, minus_72;"""


def _int8_keys() -> str:
    lower, upper = _NEIGHBOURS
    return f"""xor.b32 byte, $2, 0x80808080;
        prmt.b32 $0, byte, 0, {lower}; prmt.b32 $1, byte, 0, {upper};"""


def _int4_keys() -> str:
    """Pairs of int4 keys are of bytes 0 and 2, and of 1 and 3, which takes one shift.

    The upper four bits stay where they are in their byte, so their numbers are 16 times as large.
    """
    return """shr.u32 byte, $4, 8;
        lop3.b32 $0, $4, 0x000F000F, 0x00080008, 0x6A; lop3.b32 $1, byte, 0x000F000F, 0x00080008, 0x6A;
        lop3.b32 $2, $4, 0x00F000F0, 0x00800080, 0x6A; lop3.b32 $3, byte, 0x00F000F0, 0x00800080, 0x6A;"""


def _ptx(code: str) -> tl.constexpr:
    return tl.constexpr(f"{{ {_REGISTERS} {code} }}")


_INT8_KEYS, _INT4_KEYS = _ptx(_int8_keys()), _ptx(_int4_keys())
_FLOAT8 = "mov.b32 {first, second}, byte; cvt.rn.f16x2.e4m3x2 $0, first; cvt.rn.f16x2.e4m3x2 $1, second;"
_FLOAT8_KEYS, _FLOAT8_VALUES = _ptx(f"mov.b32 byte, $2; {_FLOAT8}"), _ptx(f"prmt.b32 byte, $2, 0, 0x3120; {_FLOAT8}")
_INT8_VALUES, _INT4_VALUES = _ptx(_int8_values()), _ptx(_int4_values())


@triton.jit
def fit_float16(queries, scale, KIND: tl.constexpr, PARTS: tl.constexpr):
    """Returns the parts of queries, each ``[rows, channels]``, in float16, a correction, and a scale, both ``[rows]``.

    The correction, added to a sum of products with stored keys, takes back what their offset adds to it. The scale is
    not negative, because queries take the sign; it turns the sum into a score. Each row is multiplied by a power of two
    that brings its largest magnitude near float16's largest number, which loses bits only of numbers below 2**-24 of
    the largest one.
    """
    largest = tl.max(tl.abs(queries[0].to(tl.float32)), 1)
    for i in tl.static_range(1, PARTS):
        largest = tl.maximum(largest, tl.max(tl.abs(queries[i].to(tl.float32)), 1))
    exponent = largest.to(tl.int32, bitcast=True) >> 23
    field = tl.minimum(tl.maximum(268 - exponent, 1), 253)  # 2**14 at most, because the fraction is below 2
    factor = (field << 23).to(tl.float32, bitcast=True)[:, None] * tl.where(scale < 0, -1.0, 1.0)
    scale = tl.abs(scale) * ((254 - field) << 23).to(tl.float32, bitcast=True)
    fitted = ()
    sums = tl.zeros_like(scale)
    for i in tl.static_range(PARTS):
        # The upper four bits of int4 keys count 16 times.
        weight = 0.0625 if i >= 2 else 1.0
        part = ((queries[i].to(tl.float32) * factor).to(tl.float16).to(tl.float32) * weight).to(tl.float16)
        sums += tl.sum(part.to(tl.float32), 1) / weight
        fitted += (part,)  # type: ignore[assignment]
    correction = tl.zeros_like(scale)
    if KIND != FLOAT8:
        correction = sums * ((-8.0 if KIND == INT4 else -128.0) * 2.0**-24)
        scale *= 2.0**24
    return fitted, correction, scale


@triton.jit
def channel_of_key(place, part, PARTS: tl.constexpr, HEAD_DIM: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Returns the channels of the columns of a part of a tile of keys as ``key_numbers`` orders them."""
    if PARTS == 2 and ASSEMBLY:  # of two words, each part has two channels that lie next to each other
        channel = 4 * (place // 2) + 2 * part + place % 2
    else:
        channel = channel_of_part(place, part, PARTS, HEAD_DIM)
    return channel


@triton.jit
def key_numbers(stored, KIND: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Returns the parts of a tile of stored keys, read as words of two bytes, in float16. Order: ``channel_of_key``.

    Numbers of float8 keys are themselves. Integers are ``(n + 128) * 2**-24`` for int8, ``(n + 8) * 2**-24`` for the
    lower four bits, and ``(n + 8) * 2**-20`` for the upper ones: see ``fit_float16``.
    """
    if KIND == 0:
        return (stored,)
    elif ASSEMBLY:
        code: tl.constexpr = _INT4_KEYS if KIND == INT4 else _INT8_KEYS if KIND == INT8 else _FLOAT8_KEYS
        return _assembled(stored, code, KIND)
    else:
        numbers = value_numbers(stored, KIND, False)
        if KIND == INT4:
            third, fourth = _raised(numbers[2], 8.0) * 16, _raised(numbers[3], 8.0) * 16
            return (_raised(numbers[0], 8.0), _raised(numbers[1], 8.0), third, fourth)
        elif KIND == INT8:
            return (_raised(numbers[0], 128.0), _raised(numbers[1], 128.0))
        else:
            return numbers


@triton.jit
def _assembled(stored, code: tl.constexpr, KIND: tl.constexpr):
    """Returns the parts that PTX makes of pairs of words."""
    if KIND == INT4:
        kinds: tl.constexpr = (tl.float16, tl.float16, tl.float16, tl.float16)
        return tl.inline_asm_elementwise(code, "=&r,=&r,=&r,=&r,r", [stored], kinds, is_pure=True, pack=2)
    else:
        return tl.inline_asm_elementwise(code, "=&r,=&r,r", [stored], (tl.float16, tl.float16), is_pure=True, pack=2)


@triton.jit
def _raised(number, offset):
    """Returns float16 integers plus an offset as multiples of the smallest float16 number."""
    return ((number.to(tl.float32) + offset) * 2.0**-24).to(tl.float16)


@triton.jit
def value_numbers(stored, KIND: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Returns the parts of a tile of stored values as numbers: one part, or a part for each number of a word."""
    if KIND == 0:
        return (stored,)
    elif ASSEMBLY:
        code: tl.constexpr = _INT4_VALUES if KIND == INT4 else _INT8_VALUES if KIND == INT8 else _FLOAT8_VALUES
        return _assembled(stored, code, KIND)
    else:
        first, second = stored.to(tl.int8), (stored >> 8).to(tl.int8)
        if KIND == INT4:
            return (_lower_int4(first), _lower_int4(second), _upper_int4(first), _upper_int4(second))
        elif KIND == INT8:
            return (first.to(tl.float32).to(tl.float16), second.to(tl.float32).to(tl.float16))
        else:
            first, second = first.to(tl.float8e4nv, bitcast=True), second.to(tl.float8e4nv, bitcast=True)
            return (first.to(tl.float16), second.to(tl.float16))


@triton.jit
def scale_weights(weights, fade, scale, largest):
    """Returns the weights of values with scales, the factor of the sums so far, and the largest scale so far.

    The sums are in units of the largest scale over HEADROOM, so the weights fit float16.
    """
    new = tl.maximum(largest, tl.max(scale, 0))
    return weights * (scale * (HEADROOM / new))[None, :], fade * (largest / new), new


@triton.jit
def channel_of_part(place, part, PARTS: tl.constexpr, VALUE_DIM: tl.constexpr):
    """Returns the channels of the columns of a part of a tile of values."""
    if PARTS == 1:
        channel = place
    else:  # byte part % 2 of each word; parts 2 and 3 are the upper four bits, of the second half of the channels
        channel = 2 * place + part % 2 + (part // 2) * (VALUE_DIM // 2)
    return channel


@triton.jit
def store_parts(at, summed, factor, divisor, empty, is_row, PARTS: tl.constexpr, VALUE_DIM: tl.constexpr):
    """Stores rows of results, all parts of the channels: sums times a factor of the row, over a divisor; 0 if empty."""
    place = tl.arange(0, VALUE_DIM // PARTS)
    for i in tl.static_range(PARTS):
        result = tl.where(empty[:, None], 0.0, summed[i] * factor[:, None] / divisor[:, None])
        channel = channel_of_part(place, i, PARTS, VALUE_DIM)
        tl.store(at + channel[None, :], result.to(at.dtype.element_ty), mask=is_row[:, None])


@triton.jit
def _lower_int4(byte):
    """Returns the numbers of the lower four bits of bytes."""
    return ((byte.to(tl.int8, bitcast=True) << 4) >> 4).to(tl.float32).to(tl.float16)


@triton.jit
def _upper_int4(byte):
    return (byte.to(tl.int8, bitcast=True) >> 4).to(tl.float32).to(tl.float16)
