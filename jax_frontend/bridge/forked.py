"""Refuses calls in a process that was forked after JAX had started.

Only the thread that forks exists in the child. JAX compiles and runs on other threads, so a call there would hang.
"""

from __future__ import annotations

import sys

from attn_core.call.after_fork import after_fork

_has_lost_threads = False


def _note() -> None:
    global _has_lost_threads
    # JAX starts its threads with its first backend. The public functions that list backends would start them.
    backends = getattr(sys.modules.get("jax._src.xla_bridge"), "_backends", ())
    _has_lost_threads = _has_lost_threads or bool(backends)


after_fork(_note)


def has_lost_threads() -> bool:
    """Returns whether JAX's threads stayed in the parent of this process."""
    return _has_lost_threads


def check_process() -> None:
    """Raises RuntimeError if JAX would hang in this process."""
    if _has_lost_threads:
        raise RuntimeError(
            "this process was forked after JAX had started, and JAX's threads stayed in its parent, so the call would "
            "hang; start the process with multiprocessing's spawn or forkserver, or fork before the first use of JAX"
        )
