"""use_backend for JAX: the core's, and part of what ``jax.jit`` remembers a traced function by."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import jax

from attn_core import override

_traced_under = jax.make_user_context(default_value=None)


@contextmanager
def use_backend(*names: str) -> Iterator[None]:
    """``attn_core.override.use_backend``, under which functions that ``jax.jit`` has already compiled are traced anew.

    JAX keeps such a context per thread. Asyncio tasks of one thread that hold blocks open across an ``await`` should
    name ``backend=`` in the call instead.

    Raises:
        SpecError: for a name nobody knows, with the close matches.
    """
    with override.use_backend(*names), _traced_under(names or None):
        yield
