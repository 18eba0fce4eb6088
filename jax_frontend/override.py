"""use_backend for JAX: the core's, and part of what ``jax.jit`` remembers a traced function by."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import jax

from attn_core.selection import override

_traced_under = jax.make_user_context(default_value=None)


@contextmanager
def use_backend(*names: str) -> Iterator[None]:
    """``attn_core``'s ``use_backend``, under which functions that ``jax.jit`` has already compiled are traced anew.

    JAX keeps such a context per thread, and the asyncio tasks of a thread would see each other's. Inside a task the
    names therefore count for eager calls and for what is traced there, and a function that was compiled before keeps
    the backend it was compiled with: name ``backend=`` in its call.

    Raises:
        SpecError: for a name nobody knows, with the close matches.
    """
    with override.use_backend(*names), nullcontext() if inside_a_task() else _traced_under(names or None):
        yield


def inside_a_task() -> bool:
    """Whether an asyncio task runs in this thread, where JAX's contexts would be seen by other tasks, too."""
    try:
        return asyncio.current_task() is not None
    except RuntimeError:  # no event loop runs in this thread
        return False
