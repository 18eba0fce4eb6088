"""warm_up: everything that a call's first run would do, done before it."""

from __future__ import annotations

from typing import Any

from attn_core.selection import NoBackendError, Selection
from jax_frontend.attention import explain
from jax_frontend.bridge import targets
from jax_frontend.dispatch import plan


def warm_up(q: Any, k: Any, v: Any, *, needs_backward: bool | None = None, **options: Any) -> Selection:
    """Chooses the backend of a call, and does on a GPU what its kernels would do when they first run.

    XLA's own compilation comes with ``jax.jit`` as always; this is about torch's kernels. It takes the arguments of
    ``explain``, arrays or ``jax.ShapeDtypeStruct``, and returns the same Selection.

    Raises:
        NoBackendError: when no backend, or not the one asked for, can run the call.
    """
    selection = explain(q, k, v, needs_backward=needs_backward, **options)
    if selection.backend is None:
        raise NoBackendError(selection)
    targets.warm_up(selection.backend, selection.spec, selection.target.device, plan.device_index(q))
    return selection
