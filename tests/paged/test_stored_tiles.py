"""The PTX that turns stored numbers into float16, on all bytes. Tests marked ``cuda`` run it on a GPU."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")
import ptx_numbers

from attn_core.backends.triton_splitkv import stored_tiles

WORDS = [[byte, byte ^ 255, (byte * 7 + 3) & 255, (byte * 31 + 101) & 255] for byte in range(256)]
"""Four bytes for each byte, in the order of memory."""


def float8(byte: int) -> float:
    return float(np.array(byte, np.uint8).view(ml_dtypes.float8_e4m3fn))


def int8(byte: int) -> int:
    return byte - 256 * (byte > 127)


def lower(byte: int) -> int:
    return (byte & 15 ^ 8) - 8


def upper(byte: int) -> int:
    return (byte >> 4 ^ 8) - 8


def check(code: str, four: list[int], expected: list[list[float]]) -> None:
    actual = ptx_numbers.run(code, sum(byte << 8 * place for place, byte in enumerate(four)), len(expected))
    np.testing.assert_array_equal(actual, expected)


def of_both(pairs: list[list[int]]) -> list[list[float]]:
    """The numbers of the lower four bits of each pair of bytes, then those of the upper four bits."""
    return [[number(byte) for byte in pair] for number in (lower, upper) for pair in pairs]


def subnormal(pairs: list[list[float]], offset: int, factors: tuple[int, ...] = (1,)) -> list[list[float]]:
    """Numbers of keys: an offset is added, and all are a multiple of the smallest float16 number."""
    each = len(pairs) // len(factors)
    return [[(n + offset) * factors[i // each] * 2.0**-24 for n in pair] for i, pair in enumerate(pairs)]


def test_keys_are_four_channels_of_a_key() -> None:
    for four in WORDS:
        int8_pairs = [[int8(byte) for byte in pair] for pair in (four[:2], four[2:])]
        check(stored_tiles._INT8_KEYS.value, four, subnormal(int8_pairs, 128))
        check(stored_tiles._FLOAT8_KEYS.value, four, [[float8(byte) for byte in pair] for pair in (four[:2], four[2:])])
        check(stored_tiles._INT4_KEYS.value, four, subnormal(of_both([four[::2], four[1::2]]), 8, (1, 16)))


def test_values_are_two_channels_of_each_of_two_keys() -> None:
    for four in WORDS:
        pairs = [four[::2], four[1::2]]
        check(stored_tiles._INT8_VALUES.value, four, [[int8(byte) for byte in pair] for pair in pairs])
        check(stored_tiles._INT4_VALUES.value, four, of_both(pairs))
        check(stored_tiles._FLOAT8_VALUES.value, four, [[float8(byte) for byte in pair] for pair in pairs])


def test_a_wrong_selector_is_found() -> None:
    code = stored_tiles._INT8_VALUES.value.replace("0x4341", "0x4342")
    with pytest.raises(AssertionError):
        check(code, [1, 2, 3, 4], [[1, 3], [2, 4]])
