"""Casts the arrays of a hook to one dtype, as Flax does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attn_core.errors import SpecError, shown
from jax_frontend.dispatch.plan import check_array


def promote(arrays: tuple[jax.Array, ...], dtype: Any, promote_dtype: Callable[..., Any] | None) -> tuple[Any, ...]:
    """Returns query, key and value in ``dtype``, or in the dtype to which they promote.

    Args:
        promote_dtype: NNX's function, used instead.

    Raises:
        TypeError, SpecError: naming the array, or ``dtype``.
    """
    for name, array in zip(("query", "key", "value"), arrays):
        if not isinstance(array, np.ndarray):
            check_array(name, array)
    if dtype is not None:
        try:
            jnp.dtype(dtype)
        except (TypeError, ValueError):
            raise SpecError(f"dtype={shown(dtype)}: expected a dtype, or None") from None
    if promote_dtype is not None:
        return tuple(promote_dtype(arrays, dtype=dtype))
    target = jnp.result_type(*arrays) if dtype is None else dtype
    return tuple(array.astype(target) for array in arrays)
