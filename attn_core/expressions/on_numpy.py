"""Evaluates expressions in numpy: the oracle. Ints have 32 bits, floats are float64."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from attn_core.expressions.rendering import Vocabulary, array_functions, evaluate, places_read
from attn_core.expressions.tree import Expression

if TYPE_CHECKING:
    from numpy.typing import ArrayLike


_DTYPES = {"bool": np.bool_, "int": np.int32, "float": np.float64}


@lru_cache(maxsize=1)
def vocabulary() -> Vocabulary:
    """Returns the operations on numpy arrays of bool, int32 and float64."""
    return Vocabulary(
        functions=array_functions(np, sigmoid=lambda x: 1.0 / (1.0 + np.exp(-x))),  # an infinite exp(-x) gives 0
        constant=lambda value, kind: _DTYPES[kind](value),
        cast=lambda value, kind: np.asarray(value).astype(_DTYPES[kind]),
        read=lambda array, indices: np.asarray(array)[tuple(indices)],
    )


def evaluate_numpy(
    tree: Expression, indices: Sequence[ArrayLike], score: ArrayLike | None = None, aux: Sequence[object] = ()
) -> np.ndarray:
    """Returns ``evaluate`` of an expression for whole blocks, broadcast: bool, int32 or float64.

    Args:
        indices: b, h, q and k: ints or int arrays that broadcast to ``[b, h, q, k]``, as ``block_indices`` makes them.
        score: scores that broadcast to ``[b, h, q, k]``; computed in float64.
        aux: bool, ints (of which the low 32 bits count) or floats.
    """
    places: list[np.ndarray] = [np.asarray(index, np.int32) for index in indices]
    scores = None if score is None else np.asarray(score, np.float64)
    with np.errstate(all="ignore"):  # infinities and NaN are values like others
        value = evaluate(tree, vocabulary(), places, scores, [np.asarray(array) for array in aux])
    given: list[np.ndarray] = places if scores is None else [*places, scores]
    return np.broadcast_to(value, np.broadcast_shapes(np.shape(value), *(array.shape for array in given)))


def block_indices(
    batch: int, heads: int, q_len: int, kv_len: int, starts: tuple[int, int, int, int] = (0, 0, 0, 0)
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Returns b, h, q and k of a block as int32 arrays of four axes, which broadcast to ``[b, h, q, k]``.

    Args:
        batch, heads, q_len, kv_len: the sizes of the block.
        starts: its first b, h, q and k.
    """
    sizes = (batch, heads, q_len, kv_len)
    b, h, q, k = (
        np.arange(start, start + size, dtype=np.int32).reshape([size if other == axis else 1 for other in range(4)])
        for axis, (start, size) in enumerate(zip(starts, sizes, strict=True))
    )
    return b, h, q, k


def sum_at_lookup(
    node: Expression, summand: np.ndarray, indices: Sequence[ArrayLike], score: np.ndarray, aux: Sequence[object]
) -> np.ndarray:
    """Returns, for each element of a lookup's array, the sum over the pairs that read it: float64, in its shape.

    Args:
        node: the lookup.
        summand: of every pair, in the score's shape.
        indices, score, aux: as in ``evaluate_numpy``.
    """
    arrays = [np.asarray(array) for array in aux]
    total = np.zeros(arrays[int(node.value or 0)].shape)
    with np.errstate(all="ignore"):
        places = places_read(node, vocabulary(), [np.asarray(index, np.int32) for index in indices], score, arrays)
    if places == []:
        return total + summand.sum()
    if places is not None:
        np.add.at(total, tuple(np.broadcast_to(place, summand.shape) for place in places), summand)
    return total
