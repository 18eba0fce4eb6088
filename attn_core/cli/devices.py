"""The packages, frameworks and devices of this machine, and the words by which a command accepts a device."""

from __future__ import annotations

import platform
import re
from difflib import get_close_matches
from importlib.util import find_spec
from typing import TYPE_CHECKING

from attn_core.backends.support import STARTS, kind_of
from attn_core.errors import SpecError
from attn_core.selection import tables
from attn_core.selection.choice import NO_BREAK, wrapped
from attn_core.selection.target import jax_device_name

if TYPE_CHECKING:
    import jax
    import torch


FRAMEWORKS = ("torch", "jax")

KNOWN_PACKAGES = (
    *tables.PACKAGES,
    "numpy",
    "flax",
    "apache-tvm-ffi",
    "transformers",
    "jax-cuda13-plugin",
    "jax-cuda12-plugin",
    "tokenspeed-fa3",
    "fa3-fwd",
    "dew-flash-attn-cu13",
    "dew-flash-attn-cu12",
    "sageattention",
)
"""This package and those that it can use: a report names their versions."""


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

    # From the source, because a copy that was not installed has no other version.
    return {"python": platform.python_version()} | tables.versions(KNOWN_PACKAGES) | {"attn-core": __version__}


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


def torch_device(name: str) -> torch.device:
    """Returns the ``torch.device`` of a device as a Target names it. torch says "cuda" for AMD's GPUs, too."""
    import torch

    return torch.device("cuda" if kind_of(name) in STARTS else name)


def jax_device(name: str) -> jax.Device:
    """Returns JAX's first device that a Target names so. Raises StopIteration if there is none."""
    import jax

    return (
        jax.devices("cpu")[0]
        if name == "cpu"
        else next(each for each in jax.devices() if jax_device_name(each) == name)
    )


DEVICES: dict[str, tuple[str, ...]] = {
    "cpu": (),
    "sm60": ("p100",),
    "sm61": ("p40", "1080ti"),
    "sm70": ("v100",),
    "sm75": ("t4", "2080ti"),
    "sm80": ("a100", "a30", "a800"),
    "sm86": ("a10", "a10g", "a40", "a6000", "3090", "3080"),
    "sm87": ("orin",),
    "sm89": ("l4", "l40", "l40s", "4090"),
    "sm90": ("h100", "h200", "h800", "h20", "gh200"),
    "sm100": ("b200", "gb200"),
    "sm103": ("b300", "gb300"),
    "sm110": ("thor",),
    "sm120": ("5090", "rtxpro6000"),
    "sm121": ("gb10", "spark"),
    "gfx90a": ("mi200", "mi210", "mi250", "mi250x"),
    "gfx942": ("mi300", "mi300a", "mi300x", "mi325x"),
    "gfx950": ("mi350x", "mi355x"),
    "gfx1100": ("7900xtx",),
    "gfx1201": ("9070xt",),
    "tpu": ("v4", "v5e", "v5p", "v6e"),
    "mps": ("apple", "m1", "m2", "m3", "m4"),
    "xpu": ("intelgpu", "arc"),
}
"""The devices that exist, as a Target names them, each with the products of that kind: NVIDIA's GPUs by compute
capability, AMD's by architecture, TPUs, and the GPUs of Apple and Intel by the frameworks' words."""

ALIASES = {alias: device for device, aliases in DEVICES.items() for alias in (device, *aliases)}

HERE = "cuda"
"""The word for the GPU of this machine."""

HELP = "cpu, cuda (the GPU here), a GPU such as h100, a100, 4090, sm90, mi300, or tpu, mps, xpu."


def device_named(requested: str, framework: str) -> str:
    """Returns the device that a user's word means, such as ``"sm90"`` for ``"H100"``, ``"NVIDIA H100"`` or ``"9.0"``.

    Raises:
        SpecError: for a word that names no device, or for the GPU of a machine that has none.
    """
    parts = re.split(r"[ _-]+", re.sub(r"nvidia|geforce|tesla|amd|rtx(?=[ _-]?a?\d)", " ", requested.lower()).strip())
    words = ["".join(parts[:count]) for count in range(len(parts), 0, -1)]  # "h10080gb", "h100": memory comes last
    word = next((each for each in words if each in ALIASES), words[0])
    if re.fullmatch(r"\d+\.\d", word):  # NVIDIA's compute capability
        word = f"sm{word.replace('.', '')}"
    if word in ALIASES:
        return ALIASES[word]
    if word == HERE:
        return _gpu_here(framework)
    # A GPU may be newer than the table.
    if re.fullmatch(r"(sm|gfx)[0-9a-f]+", word) and find_spec(framework) and word in devices_of(framework):
        return word
    close = get_close_matches(word, ALIASES, n=1)
    hint = f"did you mean {close[0]}? Expected" if close else "expected"
    raise SpecError(f"--device={requested!r}: no such device; {hint} one of\n{_listed()}")


def devices_here(requested: str | None, framework: str | None = None) -> dict[str, str]:
    """Returns the device of each framework that has it: the requested one, else the GPU of this machine, else the CPU.

    Raises:
        SpecError: for a word that names no device of this machine, or a framework that is not installed.
    """
    if framework is not None:
        check_framework(framework)
    here = {name: devices_of(name) for name in installed() if framework in (None, name)}
    if not here:
        missing = f"--framework={framework}: not installed" if framework else "neither torch nor jax is installed"
        raise SpecError(f"{missing}; install it, or use `attn explain`, which needs neither")
    best = max(here, key=lambda name: len(here[name]) > 1)
    device = here[best][-1] if requested is None else device_named(requested, best)
    devices = {name: device for name, found in here.items() if device in found}
    if not devices:
        raise SpecError(
            f"--device={requested}: expected a device of this machine; `attn explain --device {requested}` works "
            "without it"
        )
    return devices


def _gpu_here(framework: str) -> str:
    gpus = [device for device in devices_of(framework) if kind_of(device) in STARTS] if find_spec(framework) else []
    if not gpus:
        raise SpecError(f"--device={HERE}: {framework} has no GPU here; name one, such as --device h100")
    return gpus[0]


def _listed() -> str:
    words = {HERE: ("the GPU here",)} | DEVICES
    named = (f"{device} ({', '.join(aliases)})" if aliases else device for device, aliases in words.items())
    return wrapped(", ".join(text.replace(" ", NO_BREAK) for text in named), "  ", "  ")
