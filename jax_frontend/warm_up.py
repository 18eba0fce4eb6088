"""warm_up: does in advance what a call's first run would do."""

from __future__ import annotations

from typing import Any

import jax

from attn_core.selection import NoBackendError, Selection
from jax_frontend.bridge import targets
from jax_frontend.dispatch import plan
from jax_frontend.explain import explain


def warm_up(q: Any, k: Any, v: Any, *, needs_backward: bool | None = None, **options: Any) -> Selection:
    """Chooses the backend of a call, and on a GPU does what the call's first run would do with torch's kernels.

    ``jax.jit`` still compiles the program on its first call. The function has the arguments of ``explain``, as arrays
    or ``jax.ShapeDtypeStruct``, and returns the same Selection.

    Raises:
        NoBackendError: if no backend, or not the requested one, can run the call.
    """
    for name, array in zip("qkv", (q, k, v)):
        if isinstance(array, jax.Array):
            plan.check_array(name, array)  # not deleted, because its device counts
    selection = explain(q, k, v, needs_backward=needs_backward, **options)
    if selection.backend is None:
        raise NoBackendError(selection)
    targets.warm_up(selection.backend, selection.spec, selection.target.device, plan.device_index(q))
    return selection
