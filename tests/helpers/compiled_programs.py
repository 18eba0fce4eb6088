"""Frees compiled programs during a long run: JAX and torch.compile keep every program that a process has compiled."""

from __future__ import annotations

import ctypes
import gc
import sys
from pathlib import Path

import psutil

LIMIT = 3 * 2**31 if Path("/dev/nvidiactl").exists() else 3 * 2**29
"""Bytes that a process of the tests may hold before its programs are freed; compiling them again costs time.

Beside a GPU, whose runtime alone takes some GiB, it is 6 GiB.
"""
GROWTH = 2**29
"""Bytes by which a process must have grown since its programs were last freed: freeing them again gains less."""

_last = 0
"""Bytes that the process held after its programs were last freed."""


def free(limit: int = LIMIT) -> bool:
    """Frees the programs of JAX and of torch.compile if the process holds more than ``limit`` bytes.

    A function that was compiled before compiles again at its next call.

    Returns:
        Whether the programs were freed.
    """
    global _last
    if _resident() <= max(limit, _last + GROWTH if limit else 0):
        return False
    if "jax" in sys.modules:
        sys.modules["jax"].clear_caches()
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()
    gc.collect()
    _return_to_system()
    _last = _resident()
    return True


def _resident() -> int:
    return psutil.Process().memory_info().rss


def _return_to_system() -> None:
    """Returns free memory to the system: without this, glibc keeps almost all that the freed programs occupied."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
