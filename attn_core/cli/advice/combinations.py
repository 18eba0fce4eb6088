"""Combinations of packages that are known not to work together, as a table.

They concern installations: something does not start or is not used. Kernels that run and compute something wrong are
rows of ``attn_core/backends/known_bad.json``. ``attn doctor`` shows both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from attn_core.backends.shared.known_bad import includes, numbers_of
from attn_core.cli.advice.machine import Machine
from attn_core.cli.advice.packages import BRIDGE, commands_of, package_for, requirements


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


@dataclass(frozen=True, kw_only=True)
class Combination:
    """A known-bad combination.

    Attributes:
        name: stable, for ``attn doctor --json``.
        applies: whether a machine has it.
        text: what is wrong and what follows. The words in braces are those of ``_words``.
        remedy: returns commands for a machine, with words in braces, too; none if the text says what to do.
    """

    name: str
    applies: Callable[[Machine], bool]
    text: str
    remedy: Callable[[Machine], tuple[str, ...]] = lambda machine: ()


def _lines(*commands: str) -> Callable[[Machine], tuple[str, ...]]:
    return lambda machine: commands


def _install(*names: str, first: tuple[str, ...] = ()) -> Callable[[Machine], tuple[str, ...]]:
    """Returns a remedy: commands that come first, then those that install packages."""

    def remedy(machine: Machine) -> tuple[str, ...]:
        entries = [package_for(name, machine.device) for name in names]
        return (*first, *(line for entry in entries if entry is not None for line in commands_of(entry, machine)))

    return remedy


def _older(name: str, backend: str) -> Callable[[Machine], bool]:
    """Returns whether a framework is older than what a backend requires of it."""

    def applies(machine: Machine) -> bool:
        installed = numbers_of(machine.packages.get(name, ""))
        return bool(installed) and not includes(requirements(backend, "cpu")[name], installed)

    return applies


def _orphans(machine: Machine) -> list[str]:
    """Returns the installed wheels whose CUDA runtime is missing: not torch's own, and not in the system."""
    present = {*machine.cuda_runtimes, *(machine.torch_cuda or ())[:1]}
    wheels = machine.wheel_cuda.items() if machine.torch_cuda else ()
    return [name for name, major in wheels if name in machine.packages and major not in present]


def _runtime(machine: Machine) -> tuple[str, ...]:
    commands: list[str] = []
    for major in sorted({machine.wheel_cuda[name] for name in _orphans(machine)}):
        package, module = RUNTIMES[major]
        commands += [
            f"pip install {package}",
            f"dir=$(python -c 'import {module} as r; print(*r.__path__)')",
            "export LD_LIBRARY_PATH=$dir/lib${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}",
        ]
    return tuple(commands)


RUNTIMES = {
    12: ("'nvidia-cuda-runtime-cu12<13'", "nvidia.cuda_runtime"),
    13: ("'nvidia-cuda-runtime>=13,<14'", "nvidia.cu13"),
}
"""The package that has a CUDA runtime, and the Python package whose folder ``lib`` it is in."""

FORWARD_ONLY = ("tokenspeed-fa3", "fa3-fwd")
"""Builds of FlashAttention 3 without gradients."""

COMBINATIONS = (
    Combination(
        name="torch-without-gpu",
        applies=lambda machine: (
            machine.has("torch") and machine.kind in ("cuda", "rocm") and not machine.torch_sees_gpu
        ),
        text="torch {torch} is a build for CPUs, so torch does not use the GPU ({device}).",
        remedy=_install("torch", first=("pip uninstall -y torch",)),
    ),
    Combination(
        name="torch-too-old",
        applies=_older("torch", "math"),
        text="torch {torch} is too old for attn-core.",
        remedy=_install("torch"),
    ),
    Combination(
        name="jax-too-old",
        applies=_older("jax", "jax_xla"),
        text="jax {jax} is too old for attn-core.",
        remedy=_install("jax"),
    ),
    Combination(
        name="gpu-too-old-for-cuda",
        applies=lambda machine: 0 < machine.capability < 75 and (machine.torch_cuda or ()) >= (12, 8),
        text="torch {torch} is built for CUDA {torch_cuda}. From CUDA 12.8 on, builds have no kernels for {device}.",
        remedy=_install("torch", first=("pip uninstall -y torch",)),
    ),
    Combination(
        name="gpu-too-old-for-jax-cuda",
        applies=lambda machine: 0 < machine.capability < 75 and machine.jax_cuda == 13,
        text="JAX's plugin is built for CUDA 13, which has no kernels for {device}.",
        remedy=_install("jax", first=("pip uninstall -y jax-cuda13-plugin jax-cuda13-pjrt",)),
    ),
    Combination(
        name="driver-too-old-for-cuda-13",
        applies=lambda machine: 0 < next(iter(numbers_of(machine.driver)), 0) < 580 and 13 in _majors(machine),
        text="CUDA 13 needs NVIDIA's driver 580 or newer, and this machine has {driver}. Update the driver, or install "
        "builds for CUDA 12.",
    ),
    Combination(
        name="jax-without-cuda",
        applies=lambda machine: machine.has("jax") and machine.kind == "cuda" and machine.jax_cuda is None,
        text="jax has no CUDA plugin, so JAX does not use the GPU ({device}).",
        remedy=_install("jax"),
    ),
    Combination(
        name="cuda-versions-differ",
        applies=lambda machine: len(_majors(machine)) > 1,
        text="torch is built for CUDA {torch_cuda} and JAX's plugin for CUDA {jax_cuda}. Both load libraries of the "
        "same names, such as cuDNN's, and whichever comes second gets those of the first.",
        remedy=_install("jax", first=("pip uninstall -y jax-cuda{jax_cuda}-plugin jax-cuda{jax_cuda}-pjrt",)),
    ),
    Combination(
        name="bridge-missing",
        applies=lambda machine: machine.has("torch") and machine.has("jax") and not machine.has("jax-tvm-ffi"),
        text="torch and jax are installed, but jax-tvm-ffi is not, so JAX cannot reach torch's kernels.",
        remedy=_lines(BRIDGE),
    ),
    Combination(
        name="flash-attn-4-breaks-xformers",
        applies=lambda machine: (
            machine.has("flash-attn-4") and machine.has("xformers") and not machine.has("flash-attn")
        ),
        text="flash-attn-4 without flash-attn leaves a package flash_attn that xformers fails to import. Remove "
        "xformers, or also install flash-attn, and then flash-attn-4 again.",
        remedy=_lines("pip uninstall -y xformers"),
    ),
    Combination(
        name="cuda-runtime-missing",
        applies=lambda machine: bool(_orphans(machine)),
        text="{orphans}: the wheel is linked with another CUDA version than torch ({torch_cuda}), whose runtime "
        "(libcudart) is not here.",
        remedy=_runtime,
    ),
    Combination(
        name="xformers-beside-forward-only-fa3",
        applies=lambda machine: machine.has("xformers") and machine.has(*FORWARD_ONLY),
        text="xformers' own dispatch chooses FlashAttention 3 for gradients, which this build lacks, so "
        "its memory_efficient_attention fails in training. attn-core's backends are not affected. In a program that "
        "calls xformers itself, call xformers.ops.fmha._set_use_fa3(False).",
    ),
)


def _majors(machine: Machine) -> set[int]:
    """Returns the major CUDA versions of torch and of JAX's plugin."""
    return {*(machine.torch_cuda or ())[:1], *([machine.jax_cuda] if machine.jax_cuda else [])}


def problems(machine: Machine) -> tuple[Problem, ...]:
    """Returns the known-bad combinations of a machine, the ones that stop the most first."""
    words = _words(machine)
    return tuple(
        Problem(one.name, one.text.format(**words), tuple(line.format(**words) for line in one.remedy(machine)))
        for one in COMBINATIONS
        if one.applies(machine)
    )


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
