"""Reports which backends this process can use from JAX, and why the others are not available."""

from __future__ import annotations

from attn_core.selection.target import Availability, availability
from jax_frontend.dispatch.plan import device_name


def available_backends() -> dict[str, Availability]:
    """Returns every backend by name: its version, or the reason why it is not available here."""
    return availability("jax", device_name(None))


def available_here() -> tuple[str, ...]:
    """Returns the names of the backends that can run on this machine's device."""
    return tuple(name for name, entry in available_backends().items() if entry.reason is None)
