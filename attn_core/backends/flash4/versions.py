"""Which flash-attn-4 is installed, and what it lacks: versions are all that tells its pre-releases apart."""

from __future__ import annotations

import re

from attn_core.backends.support import Build

OLDEST = "4.0.0b30"
OLDEST_WITH_PAGES = "4.0.0b36"
"""Whose paged kernels for Hopper were read. Before, some did not compile (Dao-AILab/flash-attention#2446)."""


def installed() -> str:
    """The version of flash-attn-4.

    Raises:
        ImportError: when it is missing, older than OLDEST, or no version that can be compared.
    """
    from importlib.metadata import version

    found = version("flash-attn-4")
    if _age(found) < _age(OLDEST):
        raise ImportError(f"flash-attn-4 {found} is too old: {OLDEST} or newer is needed")
    return found


def build() -> Build | None:
    """A build without keys and values in pages, where the installed one is older than that; else None."""
    found = installed()
    return Build(f"flash-attn-4 {found}", without=("paged",)) if _age(found) < _age(OLDEST_WITH_PAGES) else None


def _age(version: str) -> tuple[int, int, int, str, int]:
    """A version's place in time: its pre-releases (a, b, rc) come before a release."""
    found = re.match(r"(\d+)\.(\d+)\.(\d+)(?:(a|b|rc)(\d+))?", version)
    if found is None:
        raise ImportError(f"flash-attn-4 {version}: expected a version such as {OLDEST}")
    major, minor, patch, stage, number = found.groups()
    return int(major), int(minor), int(patch), stage or "released", int(number or 0)
