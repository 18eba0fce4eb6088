"""use_backend: requests backends for a block of code. Blocks nest; safe with threads and asyncio tasks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from attn_core import backends
from attn_core.errors import SpecError, shown

_requested: ContextVar[tuple[str, ...] | None] = ContextVar("attn_core_requested_backends", default=None)

requested = _requested.get
"""Returns the names requested by the innermost ``use_backend``, or None. A new ``threading.Thread`` starts with None.

The bound method of the context variable itself, because every call of attention reads it.
"""


@contextmanager
def use_backend(*names: str | tuple[str, ...]) -> Iterator[None]:
    """Runs every attention call of the block on the first of ``names`` that can run it; raises if none can.

    One tuple of names, as ``backend=`` takes it, is the same. A call's own ``backend=`` overrides the block. Without
    names, the block uses automatic choice. Under ``jax.jit`` the names apply while the function is traced; only
    ``jax_frontend.use_backend`` makes JAX trace compiled functions again. Under ``torch.compile`` the names apply while
    the compiled function runs.

    Raises:
        SpecError: for an unknown name, with close matches.
    """
    chosen = _as_names(names)
    for name in chosen:
        backends.check_name(name)
    before = _requested.get()
    try:  # around the change as well, because Ctrl-C may raise right after it
        # None, so that an inner block without names cancels the names of an outer one.
        _requested.set(chosen or None)
        yield
    finally:
        _requested.set(before)


def _as_names(given: tuple[Any, ...]) -> tuple[str, ...]:
    """Returns names that are separate strings, or one tuple of strings as ``backend=`` takes it."""
    names = given[0] if len(given) == 1 and isinstance(given[0], tuple) and given[0] else given
    for name in names:
        if not isinstance(name, str):
            raise SpecError(f"use_backend({shown(name)}): expected names of backends as strings, or one tuple of them")
    return names
