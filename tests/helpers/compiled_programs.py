"""Lets go of compiled programs between the modules of a long run: JAX keeps every program that a process compiled."""

from __future__ import annotations

import gc
import sys

import psutil

LIMIT = 3 * 2**30
"""Bytes that a process of the tests may hold before the programs go: what is compiled again costs time."""


def let_go(limit: int = LIMIT) -> bool:
    """Frees JAX's programs if the process holds more than ``limit`` bytes; whether it did.

    A function that was jitted before compiles again when it is called again.
    """
    if "jax" not in sys.modules or psutil.Process().memory_info().rss <= limit:
        return False
    sys.modules["jax"].clear_caches()
    gc.collect()
    return True
