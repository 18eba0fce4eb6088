"""JAX's default promotion of ranks and dtypes, for code that relies on it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def usual_promotion() -> Iterator[None]:
    """Sets JAX's default promotion of ranks and dtypes inside a block, whatever the caller has set."""
    import jax

    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield
