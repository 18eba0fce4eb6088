"""What this machine has: packages, frameworks and their devices."""

from __future__ import annotations

import platform
from importlib import metadata
from importlib.util import find_spec

PACKAGES = (
    *("numpy", "torch", "triton", "jax", "jaxlib", "flax", "jax-tvm-ffi", "apache-tvm-ffi", "transformers"),
    *("flash-attn", "flash-attn-4", "flash-attn-3", "xformers", "sageattention"),
)


def installed() -> tuple[str, ...]:
    """The frameworks that can be imported here."""
    return tuple(name for name in ("torch", "jax") if find_spec(name) is not None)


def versions() -> dict[str, str | None]:
    """Python's version, this package's, and those of everything it can work with; None where it is not installed."""
    from attn_core import __version__

    found: dict[str, str | None] = {"python": platform.python_version(), "attn-core": __version__}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def devices_of(framework: str) -> tuple[str, ...]:
    """The devices a framework sees, as targets name them: ``"cpu"``, ``"sm90"``, ... Imports the framework."""
    return ("cpu", *dict.fromkeys(_torch_gpus() if framework == "torch" else _jax_gpus()))


def _torch_gpus() -> list[str]:
    import torch

    if not torch.cuda.is_available():
        return []
    capabilities = (torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count()))
    return [f"sm{major}{minor}" for major, minor in capabilities]


def _jax_gpus() -> list[str]:
    import jax

    gpus = [device for device in jax.devices() if device.platform == "gpu"]
    return ["sm" + str(device.compute_capability).replace(".", "") for device in gpus]
