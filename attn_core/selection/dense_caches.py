"""Whether the backends that a call names read pages: a dense cache with lengths then runs as a pool."""

from __future__ import annotations

from attn_core import backends


def read_pages(names: tuple[str, ...] | None, device: str) -> bool:
    """Returns whether one of these backends claims keys and values in pages; True without names."""
    return names is None or any(backends.load(name, backends.kind_of(device)).FORWARD.paged for name in names)
