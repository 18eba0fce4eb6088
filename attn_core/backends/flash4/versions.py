"""The installed flash-attn-4 and what it lacks, by its version: its pre-releases differ in nothing else we can read."""

from __future__ import annotations

import re

from attn_core.backends.support import Build

OLDEST = "4.0.0b30"
READ = "4.0.0b36"
"""The version whose choices among kernels we read: ``replay.family`` relies on them."""
OLDEST_WITH_PAGES = "4.0.0b36"
"""The version whose paged Hopper kernels, block tables and functions we read. Some older paged ones do not compile
(Dao-AILab/flash-attention#2446)."""
NEWER = ("paged", "key_ranges", "mask_mod", "score_mod")
"""The claims that need that version."""


def installed() -> str:
    """Returns the version of flash-attn-4.

    Raises:
        ImportError: if it is missing or older than OLDEST, or if its version cannot be parsed.
    """
    from importlib.metadata import version

    release = version("flash-attn-4")
    if _age(release) < _age(OLDEST):
        raise ImportError(f"flash-attn-4 {release} is too old: {OLDEST} or newer is needed")
    return release


def build() -> Build | None:
    """Returns a build without what the installed version lacks, or None if it lacks nothing.

    Score functions run on the version that we read alone, because ``score_indices`` corrects the indices that its
    backward passes, and another version may take them from elsewhere.
    """
    version = installed()
    if version == READ:
        return None
    return Build(f"flash-attn-4 {version}", NEWER if _age(version) < _age(OLDEST_WITH_PAGES) else ("score_mod",))


def _age(version: str) -> tuple[int, int, int, str, int]:
    """Returns a sort key of versions: pre-releases (a, b, rc) come before their release."""
    parts = re.match(r"(\d+)\.(\d+)\.(\d+)(?:(a|b|rc)(\d+))?", version)
    if parts is None:
        raise ImportError(f"flash-attn-4 {version}: expected a version such as {OLDEST}")
    major, minor, patch, stage, number = parts.groups()
    # "released" sorts after "a", "b" and "rc".
    return int(major), int(minor), int(patch), stage or "released", int(number or 0)
