"""Constants of expressions in kernels that multiply the result by log2(e)."""

from __future__ import annotations

import math
from typing import Any

LARGEST = 2.3e38
"""A number beyond 2.36e38 times log2(e) overflows in float32: a row of nothing but the lowest float would look like one
that sees no key."""


def in_base_2(value: Any) -> Any:
    """Returns a constant, or for a finite float beyond LARGEST that with its sign."""
    if not isinstance(value, float) or not math.isfinite(value) or abs(value) <= LARGEST:
        return value
    return math.copysign(LARGEST, value)
