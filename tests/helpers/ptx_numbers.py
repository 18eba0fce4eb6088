"""The few PTX instructions that turn stored numbers into float16, in numpy: no machine without a GPU runs PTX."""

from __future__ import annotations

import re
from typing import Any

import ml_dtypes
import numpy as np


def _halves(register: int) -> np.ndarray:
    """Returns both float16 numbers of a register, as float64."""
    return np.array([register & 0xFFFF, register >> 16], np.uint16).view(np.float16).astype(np.float64)


def _register(halves: Any) -> int:
    lower, upper = (int(half) for half in np.asarray(halves).astype(np.float16).view(np.uint16))
    return lower | upper << 16


def _bytes(register: int) -> list[int]:
    return [register >> shift & 255 for shift in (0, 8, 16, 24)]


def _prmt(first: int, second: int, selector: int) -> int:
    source = _bytes(first) + _bytes(second)
    return sum(source[selector >> 4 * place & 7] << 8 * place for place in range(4))


def _lop3(first: int, second: int, third: int, table: int) -> int:
    """For each bit, the bit of the table at the three bits' number."""
    bits = [(first >> n & 1) * 4 + (second >> n & 1) * 2 + (third >> n & 1) for n in range(32)]
    return sum((table >> number & 1) << n for n, number in enumerate(bits))


INSTRUCTIONS = {
    "mov.b32": lambda value: value,
    "shr.u32": lambda register, places: register >> places,
    "xor.b32": lambda first, second: first ^ second,
    "prmt.b32": _prmt,
    "lop3.b32": _lop3,
    "add.f16x2": lambda first, second: _register(_halves(first) + _halves(second)),
    "fma.rn.f16x2": lambda first, second, third: _register(_halves(first) * _halves(second) + _halves(third)),
    "cvt.rn.f16x2.e4m3x2": lambda pair: _register(
        np.array(_bytes(pair)[:2], np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float16)
    ),
}


def run(code: str, register: int, results: int) -> list[list[float]]:
    """Returns both numbers of each result of a piece of PTX with one operand, the register after the results."""
    values = {f"${results}": register}
    for line in code.strip(" {}").split(";"):
        name, _, rest = " ".join(line.split()).partition(" ")
        if not name or name == ".reg":
            continue
        if halves := re.fullmatch(r"\{(\w+), (\w+)\}, (\w+)", rest):  # a register becomes two of 16 bits
            whole = values[halves[3]]
            values |= {halves[1]: whole & 0xFFFF, halves[2]: whole >> 16}
            continue
        target, *operands = rest.split(", ")
        numbers = [values[each] if each in values else int(each, 0) for each in operands]
        values[target] = INSTRUCTIONS[name](*numbers)
    return [list(_halves(values[f"${n}"])) for n in range(results)]
