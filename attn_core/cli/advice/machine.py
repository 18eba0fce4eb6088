"""Machine: the facts that advice depends on, as data, and how to find them on this machine."""

from __future__ import annotations

import ctypes
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path

from attn_core import backends
from attn_core.backends.shared.known_bad import numbers_of

WHEEL_CUDA = {"tokenspeed-fa3": 13, "xformers": 12}
"""The major CUDA version that a package's prebuilt wheel is linked with (tokenspeed-fa3 3.0.0, xformers 0.0.35)."""

TOPOLOGY = Path("/sys/class/kfd/kfd/topology/nodes")
"""Where Linux lists AMD GPUs."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a machine has.

    Attributes:
        device: the accelerator as a Target names it, such as ``"sm90"``, ``"gfx942"`` or ``"tpu"``; else ``"cpu"``.
        packages: the version of each installed package that matters here, by name.
        gpus: the names of the GPUs.
        driver: the version of NVIDIA's driver, such as ``"580.95.05"``; empty if unknown.
        torch_cuda: the CUDA version that torch is built for; None for other builds of torch, or without torch.
        torch_hip: whether torch is a ROCm build.
        jax_cuda: the major CUDA version of JAX's plugin; None without one.
        cuda_runtimes: the major CUDA versions whose runtime library can be loaded.
        wheel_cuda: the major CUDA version that a package's wheel is linked with, by name.
    """

    device: str
    packages: Mapping[str, str] = field(default_factory=dict)
    gpus: tuple[str, ...] = ()
    driver: str = ""
    torch_cuda: tuple[int, ...] | None = None
    torch_hip: bool = False
    jax_cuda: int | None = None
    cuda_runtimes: tuple[int, ...] = ()
    wheel_cuda: Mapping[str, int] = field(default_factory=lambda: WHEEL_CUDA)

    @property
    def kind(self) -> str:
        """``"cuda"``, ``"rocm"``, else the device itself."""
        return backends.kind_of(self.device)

    @property
    def capability(self) -> int:
        """90 for ``"sm90"``; 0 for a device that is no NVIDIA GPU."""
        return int(self.device[2:]) if self.kind == "cuda" else 0

    @property
    def torch_sees_gpu(self) -> bool:
        """Whether torch is a build for GPUs."""
        return self.torch_cuda is not None or self.torch_hip

    def has(self, *names: str) -> bool:
        """Returns whether any of the packages is installed."""
        return any(name in self.packages for name in names)

    def plus(self, name: str) -> Machine:
        """Returns the machine with one more package. A framework comes with what it usually brings along."""
        more = replace(self, packages={**self.packages, name: ""})
        if name == "torch" and self.kind == "cuda":
            newest = (13, 0) if self.capability >= 75 else (12, 6)
            return replace(more.plus("triton"), torch_cuda=(self.jax_cuda, 0) if self.jax_cuda else newest)
        if name == "torch":
            return replace(more, torch_hip=self.kind == "rocm")
        if name == "jax" and self.kind == "cuda":
            return replace(
                more, jax_cuda=more.torch_cuda[0] if more.torch_cuda else 13 if self.capability >= 75 else 12
            )
        return more


def find_machine(packages: Mapping[str, str | None], devices: Iterable[str]) -> Machine:
    """Returns this machine.

    Args:
        packages: versions by name; None if not installed.
        devices: what the frameworks see: ``"cpu"``, ``"sm90"``, ``"tpu"``, ... An accelerator that no framework sees
            is looked up in the system.
    """
    there = {name: version for name, version in packages.items() if version is not None}
    seen = [device for device in devices if device != "cpu"]
    nvidia = nvidia_gpus(_output("nvidia-smi", "--query-gpu=name,compute_cap,driver_version", "--format=csv,noheader"))
    amd = [gfx_name(path.read_text(encoding="utf-8")) for path in sorted(TOPOLOGY.glob("*/properties"))]
    device = next(iter([*seen, *(device for _, device, _ in nvidia), *filter(None, amd), "cpu"]))
    torch_cuda, torch_hip = _torch_build()
    plugins = [number for number in (13, 12) if f"jax-cuda{number}-plugin" in there]
    return Machine(
        device=device,
        packages=there,
        gpus=tuple(name for name, _, _ in nvidia),
        driver=nvidia[0][2] if nvidia else "",
        torch_cuda=torch_cuda,
        torch_hip=torch_hip,
        jax_cuda=next(iter(plugins), None),
        cuda_runtimes=tuple(filter(_loads_runtime, (12, 13))) if backends.kind_of(device) == "cuda" else (),
        wheel_cuda=WHEEL_CUDA | _xformers_cuda(),
    )


def nvidia_gpus(listing: str) -> list[tuple[str, str, str]]:
    """Returns (name, device, driver) of each line such as ``"NVIDIA H200, 9.0, 580.95.05"``."""
    rows = [[cell.strip() for cell in line.split(",")] for line in listing.splitlines()]
    # A line of another form is an error message.
    return [(row[0], "sm" + row[1].replace(".", ""), row[2]) for row in rows if len(row) == 3 and numbers_of(row[1])]


def gfx_name(properties: str) -> str | None:
    """Returns ``"gfx90a"`` for properties with the line ``gfx_target_version 90010``; None for a processor's."""
    matched = re.search(r"^gfx_target_version (\d+)$", properties, re.MULTILINE)
    number = int(matched[1]) if matched else 0
    return f"gfx{number // 10000}{number // 100 % 100:x}{number % 100:x}" if number else None


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):  # no such program, or no driver
        return ""


def _torch_build() -> tuple[tuple[int, ...] | None, bool]:
    torch = sys.modules.get("torch")  # the search for devices has imported it, unless it is missing or broken
    if torch is None:
        return None, False
    return (numbers_of(torch.version.cuda) if torch.version.cuda else None), bool(torch.version.hip)


def _loads_runtime(major: int) -> bool:
    try:
        ctypes.CDLL(f"libcudart.so.{major}")
    except OSError:
        return False
    return True


def _xformers_cuda() -> dict[str, int]:
    """Returns {"xformers": 12} for a wheel that was built for CUDA 12.8, as the wheel itself says."""
    module = find_spec("xformers")
    path = Path(module.origin or "").with_name("cpp_lib.json") if module else None
    if path is None or not path.is_file():
        return {}
    cuda = json.loads(path.read_text(encoding="utf-8")).get("version", {}).get("cuda")  # 1208 for 12.8
    return {"xformers": cuda // 100} if cuda else {}
