"""The order of automatic choice for a call."""

from __future__ import annotations

from attn_core import backends
from attn_core.spec import AttentionSpec


def order(spec: AttentionSpec, framework: str, device: str) -> tuple[str, ...]:
    """The candidates for automatic choice, best first."""
    return backends.PREFERENCE.get((framework, backends.kind_of(device)), ())
