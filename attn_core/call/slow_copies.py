"""Counts the copies that a kernel needs of a bias, and warns if a loop pays for one in every call."""

from __future__ import annotations

from itertools import count

from attn_core.call.counters import bias_copied
from attn_core.call.log import place
from attn_core.call.slow_paths import warn_once

EVERY, FIRST = 1024, 32
"""Of so many calls in the process one is looked at, and which: a loop has more than a few."""

tables_passed = count(1).__next__
"""Counts the calls with a mask or a bias; a C function, because every such call runs it."""


def copy_of_bias(why: str, remedy: str) -> None:
    """Counts a copy of a bias, and warns at one of EVERY copies.

    Args:
        why: completes "bias: every call copies it, because ...". remedy: completes "pass it ...".
    """
    if bias_copied() % EVERY == FIRST:
        warn_once("bias", place(), f"bias: every call copies it, because {why}", f"pass it {remedy}")
