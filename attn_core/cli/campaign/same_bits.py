"""Pairs: a call as a program (compiled, jitted or exported) and the same call eagerly, which give the same bits.

The other relations rewrite a call; these change nothing but who runs it. Both ways run one backend by name, so the
kernel is the same. torch compiles without Inductor, which takes seconds for each structure.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

Arrays = dict[str, np.ndarray]


class Pair(NamedTuple):
    """Two entries that make the same call.

    Attributes:
        program: the entry that a case names. It runs the call as a program.
        eager: the entry that runs it eagerly.
        cases: how many cases of a block run both ways.
    """

    program: str
    eager: str
    cases: int


PAIRS = {
    "compiled = eager in torch": Pair("torch attention, compiled", "torch attention", 10),
    "exported = eager in torch": Pair("torch attention, exported", "torch attention", 2),
    # An eager call of JAX compiles a program of its own for each structure.
    "jit = eager in jax": Pair("jax attention, jit", "jax attention, eager", 2),
    "exported = eager in jax": Pair("jax attention, exported", "jax attention, eager", 2),
}
"""By the name of the relation."""

HOLDS: dict[str, dict[str, tuple[str, ...]]] = {
    "cpu": {"torch": ("flex", "math", "sdpa_flash"), "jax": ("flex", "jax_xla", "math", "sdpa_flash")},
    "cuda": {"torch": (), "jax": ()},
}
"""By kind of device and framework: the backends whose bits must be the same, because measurements found them so. A
difference of theirs is a fault. The results of others stay within the bounds, and the campaign counts their bits."""

EVERY = 2
"""One block of so many runs both ways, if its entry has a pair and its backend is named."""


def pair_of(entry: str, block: int, index: int) -> str | None:
    """Returns the name of the pair of an entry, if it is the turn of a case: the index-th of a block."""
    if block % EVERY == 0:
        return None  # some of these blocks have another relation
    return next((name for name, pair in PAIRS.items() if pair.program == entry and index < pair.cases), None)


def differences(one: Arrays, other: Arrays) -> dict[str, float]:
    """Returns the largest difference of each result that differs in a bit."""
    # As bytes, because NaN differs from itself and -0.0 equals 0.0. float64 represents every value of other dtypes.
    return {
        name: float(np.max(np.abs(array - other[name])))
        for name, array in one.items()
        if array.tobytes() != other[name].tobytes()
    }
