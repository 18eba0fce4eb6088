"""The packages, frameworks and devices of this machine."""

from __future__ import annotations

import platform
from importlib.util import find_spec
from typing import Any

from attn_core.backends.shared.device_kinds import STARTS, kind_of
from attn_core.errors import SpecError
from attn_core.selection import tables
from attn_core.selection.target import jax_device_name

FRAMEWORKS = ("torch", "jax")

PACKAGES = (
    *("numpy", "torch", "triton", "jax", "jaxlib", "flax", "jax-tvm-ffi", "apache-tvm-ffi", "transformers"),
    *("jax-cuda13-plugin", "jax-cuda12-plugin", "flash-attn", "flash-attn-4", "flash-attn-3", "tokenspeed-fa3"),
    *("fa3-fwd", "xformers", "sageattention"),
)


def installed() -> tuple[str, ...]:
    """Returns the frameworks that are installed here."""
    return tuple(name for name in FRAMEWORKS if find_spec(name) is not None)


def check_framework(name: str) -> None:
    """Raises SpecError for a word that names no framework."""
    if name not in FRAMEWORKS:
        raise SpecError(f"--framework={name!r}: expected torch or jax")


def versions() -> dict[str, str | None]:
    """Returns the versions of Python, this package and all packages that it can use; None if not installed."""
    from attn_core import __version__

    return {"python": platform.python_version(), "attn-core": __version__} | tables.versions(PACKAGES)


def devices_of(framework: str) -> tuple[str, ...]:
    """Returns the devices of a framework as a Target names them: ``"cpu"``, ``"sm90"``, ... Imports the framework.

    The CPU comes first; the last one is the accelerator that the framework itself prefers.
    """
    # Several GPUs of one kind are one device for a Target.
    return ("cpu", *dict.fromkeys(_torch_accelerators() if framework == "torch" else _jax_accelerators()))


def _torch_accelerators() -> list[str]:
    import torch

    if not torch.cuda.is_available():
        other = torch.accelerator.current_accelerator(check_available=True)  # "mps", "xpu", ...
        return [] if other is None else [other.type]
    everything = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    if torch.version.hip:
        return [properties.gcnArchName.partition(":")[0] for properties in everything]
    return [f"sm{properties.major}{properties.minor}" for properties in everything]


def _jax_accelerators() -> list[str]:
    import jax

    return [jax_device_name(device) for device in jax.devices() if device.platform != "cpu"]


def torch_device(name: str) -> Any:
    """Returns the ``torch.device`` of a device as a Target names it. torch says "cuda" for AMD's GPUs, too."""
    import torch

    return torch.device("cuda" if kind_of(name) in STARTS else name)


def jax_device(name: str) -> Any:
    """Returns JAX's first device that a Target names so. Raises StopIteration if there is none."""
    import jax

    return (
        jax.devices("cpu")[0]
        if name == "cpu"
        else next(each for each in jax.devices() if jax_device_name(each) == name)
    )
