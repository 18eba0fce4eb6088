"""Reports which backends this process can use from torch, and why the others are not available."""

from __future__ import annotations

import torch

from attn_core.selection.target import Availability, availability
from torch_frontend.dispatch.plan import device_name


def available_backends() -> dict[str, Availability]:
    """Returns every backend by name: its version, or the reason why it is not available here."""
    return availability("torch", here())


def available_here() -> tuple[str, ...]:
    """Returns the names of the backends that can run on this machine's device."""
    return tuple(name for name, entry in available_backends().items() if entry.reason is None)


def here() -> str:
    """Returns the device on which calls are likely to run: the current GPU, else the CPU."""
    return device_name(torch.device("cuda")) if torch.cuda.is_available() else "cpu"
