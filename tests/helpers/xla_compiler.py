"""XLA's flags for the tests: four CPU devices, and quick compilation because most of a JAX test's time goes there.

Without LLVM's optimisation, and with XLA's older code for fusions as long as it has any, programs for a CPU compile
several times faster; so do small programs in one piece, where XLA would cut them into 32 for its threads. What XLA does
to a program before (simplification, fusion, partitioning) does not change.
"""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version

ON_GPUS = "--xla_gpu_autotune_level=0"
"""Without trials of several kernels for each matrix product. XLA then takes its usual one."""

_QUICK: dict[str, bool | int | str] = {"xla_backend_optimization_level": 0}
_USUAL: dict[str, bool | int | str] = {"xla_backend_optimization_level": 3}


def _jaxlib() -> str:
    try:
        return version("jaxlib")
    except PackageNotFoundError:
        return ""


if _jaxlib().startswith("0.10."):  # later ones end the process at a flag that they do not know
    _QUICK |= {"xla_cpu_use_fusion_emitters": False, "xla_cpu_parallel_codegen_split_count": 1}
    _USUAL |= {"xla_cpu_use_fusion_emitters": True, "xla_cpu_parallel_codegen_split_count": 32}

QUICK_FLAGS = " ".join(f"--{name}={str(value).lower()}" for name, value in _QUICK.items())
"""The value of the environment variable XLA_FLAGS, which JAX reads when it starts."""


FOUR_DEVICES = "--xla_force_host_platform_device_count=4"
"""The number of JAX's CPU devices, which XLA counts once, when JAX starts. Other platforms ignore it."""


def flags(*own: str, quick: bool = True) -> str:
    """Returns XLA_FLAGS for a process of the tests: those above, the environment's flags and ``own``.

    A later flag replaces an earlier one of the same name. So a run that is asked for another CPU
    (``--xla_cpu_max_isa=AVX2``) has it in the processes that tests start, too.

    Args:
        quick: whether to include QUICK_FLAGS.
    """
    defaults = (FOUR_DEVICES, ON_GPUS, *(QUICK_FLAGS.split() if quick else ()))
    every = (*defaults, *os.environ.get("XLA_FLAGS", "").split(), *own)
    return " ".join({flag.split("=")[0]: flag for flag in every}.values())


def as_users_have_it() -> dict[str, bool | int | str] | None:
    """``compiler_options`` of ``jax.jit`` that undo QUICK_FLAGS, for programs whose numbers are judged."""
    quick = set(QUICK_FLAGS.split()) <= set(os.environ.get("XLA_FLAGS", "").split())
    return _USUAL if quick else None


def cpu() -> dict[str, str]:
    """The environment's choice of a CPU for torch's kernels, for a process that tests start."""
    return {name: os.environ[name] for name in ("ATEN_CPU_CAPABILITY",) if name in os.environ}
