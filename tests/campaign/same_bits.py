"""Pairs: a call as a program (compiled, jitted or exported) and the same call eagerly, which give the same bits.

The other relations rewrite a call; these change nothing but who runs it. Both ways run one backend by name, so the
kernel is the same. torch compiles without Inductor, which takes seconds for each structure.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from attn_core.call.spec import AttentionSpec

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


class Equal(NamedTuple):
    """Backends whose bits must be the same: in calls without gradients, and in calls with them."""

    untrained: tuple[str, ...] = ()
    trained: tuple[str, ...] = ()


_OF_TORCH = ("math", "sdpa_flash")
HOLDS = {
    "cpu": {
        "torch": Equal((*_OF_TORCH, "flex"), _OF_TORCH),
        # Not jax_xla: XLA chooses its code by processor and by program, and under jit a program has both directions.
        "jax": Equal((*_OF_TORCH, "flex"), _OF_TORCH),
    },
    "cuda": {"torch": Equal(), "jax": Equal()},
}
"""By kind of device and framework: the backends that measurements found equal. A difference of theirs is a fault. Both
results of other calls stay within the bounds, and the campaign counts equal bits."""

EVERY = 2
"""One block of so many runs both ways, if its entry has a pair and its backend is named."""


def pair_of(entry: str, block: int, index: int) -> str | None:
    """Returns the name of the pair of an entry, if it is the turn of a case: the index-th of a block."""
    if block % EVERY == 0:
        return None  # some of these blocks have another relation
    return next((name for name, pair in PAIRS.items() if pair.program == entry and index < pair.cases), None)


def must_agree(backend: str, spec: AttentionSpec, framework: str, kind: str) -> bool:
    """Returns whether both ways of a call must give the same bits on a kind of device."""
    return backend in HOLDS[kind][framework][spec.needs_backward]


def differences(one: Arrays, other: Arrays) -> dict[str, float]:
    """Returns the largest difference of each result that differs in a bit."""
    # As bytes, because NaN differs from itself and -0.0 equals 0.0. float64 represents every value of other dtypes.
    return {
        name: float(np.max(np.abs(array - other[name])))
        for name, array in one.items()
        if array.tobytes() != other[name].tobytes()
    }
