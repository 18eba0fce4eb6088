"""The installed backends: every backend with its version, or the reason why it cannot be used."""

from __future__ import annotations

from typing import NamedTuple

from attn_core import backends
from attn_core.selection.target import bridge_reason, out_of_reach


class Availability(NamedTuple):
    """A backend on this machine: either its version, or the reason why it cannot be used."""

    version: str | None
    reason: str | None

    def __str__(self) -> str:
        return f"available ({self.version})" if self.reason is None else self.reason


def report(framework: str, device: str) -> dict[str, Availability]:
    """Returns the availability of every backend in a framework on a device. Imports each kernel as proof."""
    return {name: _availability(name, framework, device) for name in backends.names()}


def _availability(name: str, framework: str, device: str) -> Availability:
    kind = backends.kind_of(device)
    backend = backends.load(name, kind)
    unreached = out_of_reach(framework, device, backend.FRAMEWORK)
    if unreached is not None and framework == "jax":  # before a probe, which imports torch
        return Availability(None, unreached)
    version, reason = backends.availability(name, kind)
    if reason is not None:
        return Availability(None, reason)
    if not backend.FORWARD.runs_on(device):
        return Availability(
            None, f"{backend.FORWARD.kernel} runs on {' or '.join(backend.FORWARD.devices)}, not {device}"
        )
    if unreached is not None:
        return Availability(None, unreached)
    if backend.FRAMEWORK == "torch" and framework == "jax" and bridge_reason():
        return Availability(None, bridge_reason())
    return Availability(version, None)
