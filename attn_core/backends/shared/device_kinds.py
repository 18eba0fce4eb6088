"""Kinds of devices: the names that a Target has for the devices of one vendor are one kind."""

from __future__ import annotations

ANY = "any"
"""The claim of every device: for kernels written in a framework's own operations, which run wherever the framework
does. Also the key of the order of preference on a kind of device that has no order of its own."""

STARTS = {"cuda": "sm", "rocm": "gfx"}
"""How the names of a kind's devices start: NVIDIA's GPUs by compute capability, AMD's by architecture."""

BRIDGED = ("cpu", "cuda")
"""The kinds of devices on which JAX reaches torch's kernels: XLA hands its buffers to torch there."""


def kind_of(device: str) -> str:
    """Returns "cuda" for a device such as "sm90", "rocm" for one such as "gfx942", else the device itself."""
    for kind, start in STARTS.items():
        if device.startswith(start):
            return kind
    return device


def compute_capability(device: str) -> int:
    """Returns 90 for ``"sm90"``, and 0 for a device that is no NVIDIA GPU."""
    return int(device[2:]) if device.startswith("sm") and device[2:].isdigit() else 0


def half_dtype(device: str) -> str:
    """Returns the usual half precision of a device: NVIDIA's GPUs before sm80 have no bfloat16."""
    return "float16" if 0 < compute_capability(device) < 80 else "bfloat16"


def in_words(devices: tuple[str, ...]) -> str:
    """Returns what a kernel for these devices runs on, in words: "a TPU", "a GPU of AMD", or "a GPU"."""
    kinds = {kind_of(device) for device in devices}
    return {"tpu": "a TPU", "rocm": "a GPU of AMD"}.get(kinds.pop() if len(kinds) == 1 else "", "a GPU")
