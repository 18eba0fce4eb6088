"""Combinations of packages that are known not to work together.

They concern installations: something does not start or is not used. Kernels that run and compute something wrong are
rows of ``attn_core/backends/known_bad.json``. ``attn doctor`` shows both.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attn_core.backends.shared.known_bad import includes, numbers_of
from attn_core.cli.advice.machine import Machine
from attn_core.cli.advice.packages import commands_of, package_for, requirements

ENTRIES: list[dict[str, Any]] = json.loads(Path(__file__).with_name("problems.json").read_text(encoding="utf-8"))
"""The combinations, those that stop the most first: ``name``; ``text``, what is wrong and what follows from it;
``commands``, the remedy; ``install``, a package to install after them. Words in braces are those of ``_words``."""

RUNTIMES = {
    12: ("'nvidia-cuda-runtime-cu12<13'", "nvidia.cuda_runtime"),
    13: ("'nvidia-cuda-runtime>=13,<14'", "nvidia.cu13"),
}
"""The package that has a CUDA runtime, and the Python package whose folder ``lib`` it is in."""

FORWARD_ONLY = ("tokenspeed-fa3", "fa3-fwd")
"""Builds of FlashAttention 3 without gradients."""


@dataclass(frozen=True)
class Problem:
    """A known-bad combination on a machine.

    Attributes:
        name: of the combination, stable.
        text: what is wrong and what follows from it.
        commands: the remedy, to copy.
    """

    name: str
    text: str
    commands: tuple[str, ...]


def _older(machine: Machine, name: str, backend: str) -> bool:
    """Returns whether a framework is older than what a backend requires of it."""
    installed = numbers_of(machine.packages.get(name, ""))
    return bool(installed) and not includes(requirements(backend, "cpu")[name], installed)


def _orphans(machine: Machine) -> list[str]:
    """Returns the installed wheels whose CUDA runtime is missing: not torch's own, and not in the system."""
    present = {*machine.cuda_runtimes, *(machine.torch_cuda or ())[:1]}
    wheels = machine.wheel_cuda.items() if machine.torch_cuda else ()
    return [name for name, major in wheels if name in machine.packages and major not in present]


def _majors(machine: Machine) -> set[int]:
    """Returns the major CUDA versions of torch and of JAX's plugin."""
    return {*(machine.torch_cuda or ())[:1], *([machine.jax_cuda] if machine.jax_cuda else [])}


def _is_before_sm75(machine: Machine) -> bool:
    return 0 < machine.capability < 75


APPLIES: dict[str, Callable[[Machine], bool]] = {
    "torch-without-gpu": lambda m: m.has("torch") and m.kind in ("cuda", "rocm") and not m.torch_sees_gpu,
    "torch-too-old": lambda m: _older(m, "torch", "math"),
    "jax-too-old": lambda m: _older(m, "jax", "jax_xla"),
    "gpu-too-old-for-cuda": lambda m: _is_before_sm75(m) and (m.torch_cuda or ()) >= (12, 8),
    "gpu-too-old-for-jax-cuda": lambda m: _is_before_sm75(m) and m.jax_cuda == 13,
    "driver-too-old-for-cuda-13": lambda m: 0 < next(iter(numbers_of(m.driver)), 0) < 580 and 13 in _majors(m),
    "jax-without-cuda": lambda m: m.has("jax") and m.kind == "cuda" and m.jax_cuda is None,
    "cuda-versions-differ": lambda m: len(_majors(m)) > 1,
    "bridge-missing": lambda m: m.has("torch") and m.has("jax") and not m.has("jax-tvm-ffi"),
    "flash-attn-4-breaks-xformers": lambda m: m.has("flash-attn-4") and m.has("xformers") and not m.has("flash-attn"),
    "cuda-runtime-missing": lambda m: bool(_orphans(m)),
    "xformers-beside-forward-only-fa3": lambda m: m.has("xformers") and m.has(*FORWARD_ONLY),
}
"""Whether a machine has a combination, by its name."""


def problems(machine: Machine) -> tuple[Problem, ...]:
    """Returns the known-bad combinations of a machine, the ones that stop the most first."""
    words = _words(machine)
    return tuple(
        Problem(entry["name"], entry["text"].format(**words), _remedy(entry, machine, words))
        for entry in ENTRIES
        if APPLIES[entry["name"]](machine)
    )


def _remedy(entry: dict[str, Any], machine: Machine, words: dict[str, str]) -> tuple[str, ...]:
    """Returns the commands of an entry; those that name a runtime once for each one that is missing."""
    commands = entry.get("commands", ())
    runtimes = [("", "")]
    if any("{runtime}" in command for command in commands):
        runtimes = [RUNTIMES[major] for major in sorted({machine.wheel_cuda[name] for name in _orphans(machine)})]
    lines = [
        command.format(**words, runtime=package, runtime_module=module)
        for package, module in runtimes
        for command in commands
    ]
    install = package_for(entry.get("install", ""), machine.device)
    return (*lines, *(commands_of(install, machine) if install is not None else ()))


def _words(machine: Machine) -> dict[str, str]:
    return {
        "device": machine.device,
        "torch": machine.packages.get("torch", ""),
        "jax": machine.packages.get("jax", ""),
        "torch_cuda": ".".join(map(str, machine.torch_cuda or ())),
        "jax_cuda": str(machine.jax_cuda),
        "driver": machine.driver,
        "orphans": ", ".join(f"{name} (CUDA {machine.wheel_cuda[name]})" for name in _orphans(machine)),
    }
