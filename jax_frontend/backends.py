"""use_backend for JAX, whose names are also part of ``jax.jit``'s cache key; and the backends that JAX can use."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import jax

from attn_core.selection import override
from attn_core.selection.target import Availability, availability
from jax_frontend.dispatch.plan import device_name

_traced_under = jax.make_user_context(default_value=None)  # part of jit's cache key; its value is never read


@contextmanager
def use_backend(*names: str | tuple[str, ...]) -> Iterator[None]:
    """Runs ``attn_core``'s ``use_backend``; in the block, ``jax.jit`` traces functions again even if it compiled them.

    JAX keeps such a context per thread, so the asyncio tasks of one thread would see each other's names. Inside a task
    the names therefore apply only to eager calls and to functions that are traced there. A function that was compiled
    before keeps its backend; pass ``backend=`` in its call instead.

    Raises:
        SpecError: for an unknown name, with the close matches.
    """
    with override.use_backend(*names), nullcontext() if _inside_a_task() else _traced_under(override.requested()):
        yield


def _inside_a_task() -> bool:
    """Returns whether an asyncio task runs in this thread; other tasks of the thread would see JAX's contexts, too."""
    try:
        return asyncio.current_task() is not None
    except RuntimeError:  # no event loop runs in this thread
        return False


def available_backends() -> dict[str, Availability]:
    """Returns every backend by name: its version, or the reason why it is not available here."""
    return availability("jax", device_name(None))


def available_here() -> tuple[str, ...]:
    """Returns the names of the backends that can run on this machine's device."""
    return tuple(name for name, entry in available_backends().items() if entry.reason is None)
