"""Runs compiled calls: each first call compiles alone in the process, and never while a CUDA graph is captured."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Hashable
from typing import Any

from attn_core.call.after_fork import free_in_children
from attn_core.call.observe import timed

MOST_KEYS = 2**15
"""The most keys in ``_compiled``. Dropping a key recompiles nothing; only a later graph capture needs warm_up again."""

_compiled: set[Hashable] = set()
"""Keys that have run. Shared by all threads: reads take no lock, writes happen under ``_compiling``."""
_compiling = free_in_children(threading.Lock())
"""Held during a first call, because neither torch's compiler nor the kernels' compilers are safe across threads."""


def run(
    kind: str, key: Hashable, call: Callable[[], Any], what: Callable[[], str], remedy: str = "call warm_up first"
) -> Any:
    """Returns the call's result. The first call with a key compiles, so it runs alone in this process.

    Args:
        kind: what compiles, one of ``observe.COMPILES``.
        key: everything that the compiled code depends on, including the device.
        call: must not call ``run`` itself, because the lock is not reentrant.
        what: returns the name of the call for the error. remedy: the advice in the error.

    Raises:
        RuntimeError: if torch is capturing a CUDA graph and no call with this key has run.
    """
    key = kind, key
    if key in _compiled:
        return call()
    import torch

    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(f"{what()} is not compiled yet, and a CUDA graph cannot capture the compilation; {remedy}")
    with _compiling:
        with timed(kind, what()), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Argument aux_data ")  # an argument that flash-attn-4 leaves empty
            result = call()
        if len(_compiled) >= MOST_KEYS:  # decoding has a new length at every step
            _compiled.clear()
        _compiled.add(key)
    return result
