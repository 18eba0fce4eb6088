"""Which settings of a kernel keep a call's bits the same, as words for its explanation."""

from __future__ import annotations

from typing import Any

from attn_core import backends
from attn_core.call.spec import AttentionSpec

WORDS = {
    "query_tile": "tiles of {} positions",
    "key_tile": "of {} keys",
    "tile_keys": "tiles of {} keys",
    "share_keys": "added in shares of {}",
    "num_splits": "keys in {} part",
    "deterministic": "gradients summed in order",
}
"""By the names of a backend's settings in ``lower``."""


def describe_same_bits(spec: AttentionSpec, backend: str | None, kind: str) -> str | None:
    """Returns what a call promises by ``invariant``, and the settings for it; None without a promise or a backend."""
    if spec.invariant is None or backend is None:
        return None
    lowered = backends.load(backend, kind).lower(spec)
    settings: dict[str, Any] = {}
    for each in (lowered, *(value for value in lowered.values() if isinstance(value, dict))):
        settings |= {name: each[name] for name in WORDS if each.get(name)}
    if not spec.needs_backward:
        settings.pop("deterministic", None)
    words = [WORDS[name].format(value) for name, value in settings.items()]
    why = ", ".join(words) if words else "work divided by heads and rows alone"
    return f"in every {'batch' if spec.invariant == 'batch' else 'batch, chunk and page'}: {why}"
