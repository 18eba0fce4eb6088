"""Evaluates expressions on JAX's arrays, also inside ``jax.jit``, ``grad`` and ``vmap``.

Ints are int32. Floats are of the score's dtype; in a mask float32 unless the caller says otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from attn_core.expressions.rendering import Vocabulary, array_functions, evaluate, places_read
from attn_core.expressions.tree import Expression, Kind

if TYPE_CHECKING:
    import jax
    from jax.typing import ArrayLike, DTypeLike


def _vocabulary(dtype: DTypeLike, rows: jax.Array | None = None) -> Vocabulary:
    """Returns JAX's vocabulary. rows: the batch rows of a sharded or mapped call, see ``_read``."""
    import jax
    import jax.numpy as jnp

    dtypes = {"bool": np.dtype(bool), "int": np.dtype(np.int32), "float": np.dtype(dtype)}

    def constant(value: bool | float, kind: Kind) -> np.generic | jax.Array:
        # A numpy scalar becomes a literal of the program, and keeps its dtype. An open size of jax.export has none.
        is_number = isinstance(value, (bool, int, float))
        return dtypes[kind].type(value) if is_number else jnp.asarray(value, dtypes[kind])

    def absolute(value: jax.Array) -> jax.Array:
        # jnp.abs has the derivative 1 at 0, and torch's and ours is 0.
        return value * jnp.sign(value) if jnp.issubdtype(value.dtype, jnp.floating) else jnp.abs(value)

    return Vocabulary(
        functions=array_functions(jnp, abs=absolute, sigmoid=jax.nn.sigmoid),
        constant=constant,
        cast=lambda value, kind: jnp.asarray(value).astype(dtypes[kind]),
        read=lambda array, indices: _read(jnp.asarray(array), tuple(indices), rows),
        rows=rows,
    )


def _read(array: jax.Array, indices: tuple[Any, ...], rows: jax.Array | None) -> jax.Array:
    """Reads an array. A row for each batch row becomes an axis of a batch, which a mesh splits without communication.

    Args:
        rows: the index b if it counts all rows from 0, ``[batch, 1, ...]``; else None.
    """
    import jax

    is_row = len(indices) > 1 and indices[0] is rows and array.shape[0] == rows.shape[0]
    if not is_row or any(jax.numpy.ndim(index) and index.shape[0] != 1 for index in indices[1:]):
        return array.at[indices].get(mode="promise_in_bounds")
    first, rest = indices[0], indices[1:]
    own = tuple([index[0] if jax.numpy.ndim(index) else index for index in rest])
    # A number needs the axes of b.
    read = jax.vmap(lambda row: row.at[own].get(mode="promise_in_bounds"))(array)
    return read if read.ndim == first.ndim else read.reshape(-1, *(1,) * (first.ndim - 1))


def evaluate_jax(
    tree: Expression,
    indices: Sequence[ArrayLike],
    score: jax.Array | None = None,
    aux: Sequence[jax.Array] = (),
    dtype: DTypeLike | None = None,
    *,
    every_row: bool = False,
) -> jax.Array:
    """Returns ``evaluate`` of an expression as an array. It has gradients by the score and by aux arrays of floats.

    Args:
        indices: b, h, q and k: int arrays that broadcast to ``[b, h, q, k]``.
        score: a float array that broadcasts to ``[b, h, q, k]``.
        dtype: in which floats are computed; None is the score's, or float32 without a score.
        every_row: whether b counts the rows of the batch from 0 to the last one, on the first axis.

    Returns:
        An array of bool, int32 or ``dtype``. It has only the axes that the expression uses; it broadcasts to all.
    """
    import jax.numpy as jnp

    floats = dtype or (jnp.float32 if score is None else score.dtype)
    places = [jnp.asarray(index).astype(jnp.int32) for index in indices]
    scores = None if score is None else jnp.asarray(score).astype(floats)
    vocabulary = _vocabulary(floats, places[0] if every_row else None)
    return jnp.asarray(evaluate(tree, vocabulary, places, scores, aux))


def added_at_lookup(
    total: jax.Array,
    node: Expression,
    summand: jax.Array,
    indices: Sequence[jax.Array],
    score: jax.Array,
    aux: Sequence[jax.Array],
) -> jax.Array:
    """Returns ``total`` with a summand of every pair added to the elements that a lookup reads there.

    Args:
        total: of the shape of the lookup's array.
        node: the lookup.
        summand: an array of the score's shape and of the dtype of ``total``.
        indices, score, aux: as in ``evaluate_jax``; the indices have as many axes as the score.
    """
    import jax.numpy as jnp

    places = places_read(
        node, _vocabulary(score.dtype), [jnp.asarray(i).astype(jnp.int32) for i in indices], score, aux
    )
    if places is None:
        return total
    read = [jnp.asarray(place) for place in places]
    shape = jnp.broadcast_shapes(*(place.shape for place in read))  # () if all indices are constant
    own = (1,) * (summand.ndim - len(shape)) + tuple(shape)
    shared = tuple(axis for axis, sizes in enumerate(zip(summand.shape, own, strict=True)) if sizes[0] != sizes[1])
    summand = summand.sum(shared)  # pairs that all read one element
    return total.at[tuple(read)].add(summand.reshape(shape))
