"""Evaluates expressions on JAX's arrays, also inside ``jax.jit``, ``grad`` and ``vmap``.

Ints are int32. Floats are of the score's dtype; in a mask float32 unless the caller says otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from attn_core.expressions.rendering import ARITHMETIC, Vocabulary, evaluate
from attn_core.expressions.tree import Expression, Kind


def _vocabulary(dtype: Any) -> Vocabulary:
    import jax.numpy as jnp

    dtypes = {"bool": np.dtype(bool), "int": np.dtype(np.int32), "float": np.dtype(dtype)}

    def constant(value: Any, kind: Kind) -> Any:
        # A numpy scalar becomes a literal of the program, and keeps its dtype. An open size of jax.export has none.
        is_number = isinstance(value, (bool, int, float))
        return dtypes[kind].type(value) if is_number else jnp.asarray(value, dtypes[kind])

    def absolute(value: Any) -> Any:
        # jnp.abs has the derivative 1 at 0, and torch's and ours is 0.
        return value * jnp.sign(value) if jnp.issubdtype(value.dtype, jnp.floating) else jnp.abs(value)

    names = ("where", "minimum", "maximum", "exp", "tanh")
    return Vocabulary(
        functions={**ARITHMETIC, "abs": absolute, **{name: getattr(jnp, name) for name in names}},
        constant=constant,
        cast=lambda value, kind: jnp.asarray(value).astype(dtypes[kind]),
        read=lambda array, indices: jnp.asarray(array).at[tuple(indices)].get(mode="promise_in_bounds"),
    )


def evaluate_jax(
    tree: Expression, indices: Sequence[Any], score: Any = None, aux: Sequence[Any] = (), dtype: Any = None
) -> Any:
    """Returns the value of an expression as an array. It has gradients by the score and by aux arrays of floats.

    Args:
        tree: a mask or score expression.
        indices: b, h, q and k: int arrays that broadcast to ``[b, h, q, k]``.
        score: a float array that broadcasts to ``[b, h, q, k]``.
        aux: arrays of the lookups, by their numbers.
        dtype: in which floats are computed; None is the score's, or float32 without a score.

    Returns:
        An array of bool, int32 or ``dtype``. It has only the axes that the expression uses; it broadcasts to all.

    Raises:
        ExpressionError: if the expression needs a score and there is none, or aux arrays do not fit.
    """
    import jax.numpy as jnp

    floats = dtype or (jnp.float32 if score is None else score.dtype)
    places = [jnp.asarray(index).astype(jnp.int32) for index in indices]
    scores = None if score is None else jnp.asarray(score).astype(floats)
    return jnp.asarray(evaluate(tree, _vocabulary(floats), places, scores, aux))
