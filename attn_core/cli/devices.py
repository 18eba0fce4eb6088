"""The devices that a command accepts: their names as a Target has them, and the products that people know them by."""

from __future__ import annotations

import re
from difflib import get_close_matches
from importlib.util import find_spec

from attn_core.backends.shared.device_kinds import STARTS, kind_of
from attn_core.cli.frameworks import check_framework, devices_of, installed
from attn_core.errors import SpecError
from attn_core.selection.columns import NO_BREAK, wrapped

DEVICES: dict[str, tuple[str, ...]] = {
    "cpu": (),
    "sm60": ("p100",),
    "sm61": ("p40", "1080ti"),
    "sm70": ("v100",),
    "sm75": ("t4", "2080ti"),
    "sm80": ("a100", "a30", "a800"),
    "sm86": ("a10", "a40", "a6000", "3090"),
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
    """Returns the device that a user's word means, such as ``"sm90"`` for ``"H100"`` or ``"rtx-4090"``.

    Raises:
        SpecError: for a word that names no device, or for the GPU of a machine that has none.
    """
    word = re.sub(r"nvidia|geforce|amd|rtx(?=a?\d)", "", re.sub(r"[ _-]", "", requested.lower()))
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
