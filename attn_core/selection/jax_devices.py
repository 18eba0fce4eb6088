"""The names that a Target has for JAX's devices."""

from __future__ import annotations

from typing import Any

GPUS = ("gpu", "cuda", "rocm")
"""JAX's names for the platform of a GPU; a device of either vendor has "gpu"."""


def name_of(device: Any) -> str:
    """Returns the name of a ``jax.Device``: "cpu", "sm90", "gfx942", or its platform in lower case, such as "tpu".

    XLA's compute capability of a GPU is "9.0" for NVIDIA's, and for AMD's the architecture, "gfx942" (see
    ``MakeComputeCapabilityString`` in github.com/openxla/xla, xla/pjrt/gpu/se_gpu_pjrt_client.cc).
    """
    platform = str(device.platform).lower()
    if platform not in GPUS:
        return platform
    capability = str(device.compute_capability)
    if capability.startswith("gfx"):
        return capability.partition(":")[0]  # the rest, "sramecc+:xnack-", names features
    return "sm" + capability.replace(".", "")
