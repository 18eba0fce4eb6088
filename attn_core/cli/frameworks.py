"""The packages, frameworks and devices of this machine."""

from __future__ import annotations

import platform
from importlib import metadata
from importlib.util import find_spec

PACKAGES = (
    *("numpy", "torch", "triton", "jax", "jaxlib", "flax", "jax-tvm-ffi", "apache-tvm-ffi", "transformers"),
    *("flash-attn", "flash-attn-4", "flash-attn-3", "xformers", "sageattention"),
)


def installed() -> tuple[str, ...]:
    """Returns the frameworks that are installed here."""
    return tuple(name for name in ("torch", "jax") if find_spec(name) is not None)


def versions() -> dict[str, str | None]:
    """Returns the versions of Python, this package and all packages that it can use; None if not installed."""
    from attn_core import __version__

    result: dict[str, str | None] = {"python": platform.python_version(), "attn-core": __version__}
    for name in PACKAGES:
        try:
            result[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            result[name] = None
    return result


def devices_of(framework: str) -> tuple[str, ...]:
    """Returns the devices of a framework as a Target names them: ``"cpu"``, ``"sm90"``, ... Imports the framework."""
    # Several GPUs of one kind are one device for a Target.
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
    # JAX writes a compute capability with a dot, such as 9.0.
    return ["sm" + str(device.compute_capability).replace(".", "") for device in gpus]
