"""Dropout as arithmetic: the mask of softmax weights is a pure function of (seed, batch, head, row, column).

numpy, torch and JAX compute the same integers, so a backward needs no stored mask and the reference can check it.
The mixing step is the 32-bit finaliser "lowbias32" of Chris Wellons' hash-prospector (bias 0.17).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_WORD = 0xFFFFFFFF


def keep(rng: Any, indices: tuple[Any, ...], dropout: float, word: Callable[[int], Any] = int) -> Any:
    """Returns a boolean array, False where a weight is dropped. It is True with probability ``1 - dropout``.

    Args:
        rng: two integer words (seed, offset); only their low 32 bits count.
        indices: integer arrays (batch, head, row, column) that broadcast against each other.
        dropout: the probability of dropping.
        word: converts a constant to the arrays' type; ``jnp.uint32`` if 32-bit arithmetic wraps by itself.
    """
    hashed = _mix(rng[0] & word(_WORD), word) + (rng[1] & word(_WORD))
    for index in indices:  # 0x9E3779B9 is 2^32 / golden ratio, which spreads consecutive indices over all bits
        hashed = _mix((hashed + index * word(0x9E3779B9)) & word(_WORD), word)
    # Integers compare alike in every framework. The limit is clamped, because a probability close to 1 rounds
    # to 2^32, which has no place in 32 bits.
    return hashed >= word(min(round(dropout * 2**32), _WORD))


def _mix(value: Any, word: Callable[[int], Any]) -> Any:
    """Applies lowbias32. The masks make 64-bit integers (numpy, torch) behave as 32-bit ones that wrap."""
    value = value & word(_WORD)
    value = value ^ (value >> word(16))
    value = (value * word(0x7FEB352D)) & word(_WORD)
    value = value ^ (value >> word(15))
    value = (value * word(0x846CA68B)) & word(_WORD)
    return value ^ (value >> word(16))
