"""The packages that ``attn doctor`` can advise, as a table, and the backends that each of them brings.

Which devices a package helps on is not repeated here: the claims of its backends say so. A backend names its packages
and their versions in ``REQUIRES``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import attn_core
from attn_core import backends
from attn_core.backends.shared.cached_once import cached_once
from attn_core.backends.shared.known_bad import includes
from attn_core.backends.support import Build
from attn_core.cli.advice.calls import calls_on
from attn_core.cli.advice.machine import Machine
from attn_core.selection.target import Target

CUDA = 13
"""The CUDA version to install if neither framework has one yet."""

ARCHITECTURES = {"sm86": "80", "sm87": "80", "sm89": "80"}
"""The architecture whose FlashAttention 2 kernels a device runs, if that is not its own."""


@dataclass(frozen=True, kw_only=True)
class Package:
    """How to install a package, and why.

    Attributes:
        name: of the package.
        on: the kinds of device (``"cuda"``) or devices (``"sm70"``) that the commands are for.
        why: one sentence.
        commands: to copy. ``{requirement}`` is the name with extra and versions, ``{architecture}`` a GPU's number.
        note: what else to know; may be empty.
        extras: the extra to install for a major CUDA version.
        builds: what the package's build of a backend lacks, by the backend's name.
        release: the newest release on the package index, if some backends need a later one; empty if none does.
        again: a package that must be installed again afterwards if it is there, because this one overwrites it.
    """

    name: str
    on: tuple[str, ...] = ("cuda",)
    why: str
    commands: tuple[str, ...] = ("pip install {requirement}",)
    note: str = ""
    extras: Mapping[int, str] = field(default_factory=dict)
    builds: Mapping[str, Build] = field(default_factory=dict)
    release: tuple[int, ...] = ()
    again: str = ""


_FLASH2 = "FlashAttention 2: windows, softcaps, ALiBi, packed documents and pages, with gradients."
_TORCH = "The kernels that come with torch need no further package."

PACKAGES = (
    Package(
        name="torch",
        on=("sm50", "sm52", "sm60", "sm61", "sm70", "sm72"),
        why=f"{_TORCH} Builds for CUDA 12.8 and later have no kernels for this GPU.",
        commands=("pip install {requirement} --index-url https://download.pytorch.org/whl/cu126",),
    ),
    Package(name="torch", why=f"{_TORCH} On Linux pip's usual build contains CUDA."),
    Package(
        name="torch",
        on=("rocm",),
        why="torch's own operations, which run on every GPU of AMD. Its flash attention runs there by name.",
        commands=("pip install {requirement} --index-url https://download.pytorch.org/whl/rocmX.Y",),
        note="Replace X.Y by a ROCm version that pytorch.org offers.",
    ),
    Package(name="torch", on=("mps",), why="torch's own operations, which run on Apple's GPUs."),
    Package(
        name="torch",
        on=("xpu",),
        why="torch's own operations, which run on Intel's GPUs.",
        commands=("pip install {requirement} --index-url https://download.pytorch.org/whl/xpu",),
    ),
    Package(
        name="torch",
        on=("cpu",),
        why=f"{_TORCH} On CPUs JAX runs them, too, if jax-tvm-ffi is installed.",
        commands=("pip install {requirement} --index-url https://download.pytorch.org/whl/cpu",),
        note="This is the build without CUDA, which is smaller by several GB.",
    ),
    Package(
        name="jax",
        on=("cuda", "cpu"),
        why="XLA's kernels, and cuDNN's on a GPU. One framework is enough; with both, JAX also runs torch's kernels.",
        extras={12: "cuda12", 13: "cuda13"},
    ),
    Package(
        name="jax",
        on=("tpu",),
        why="XLA's operations, which run on every TPU.",
        commands=("pip install 'jax[tpu]>=0.10'",),
    ),
    Package(
        name="flash-attn-4",
        why="The fastest training that this project measured on Hopper, with windows and softcaps, too.",
        note="The first call of a kind compiles its kernel for about 2 s.",
        extras={13: "cu13"},
    ),
    Package(
        name="tokenspeed-fa3",
        why="FlashAttention 3 for Hopper as a prebuilt wheel: the fastest forward of long calls, and pages.",
        note="The wheel has no gradient and no softcap. A source build of flash-attention's hopper/ has both.",
        builds={"flash3": Build("tokenspeed-fa3", without=("backward", "softcap"), head_dims=(64, 128, 192, 256))},
    ),
    Package(
        name="flash-attn",
        why=_FLASH2,
        commands=(
            "pip install packaging ninja setuptools wheel",
            "export MAX_JOBS=4 FLASH_ATTN_CUDA_ARCHS={architecture}",
            "pip install --no-build-isolation {requirement}",
        ),
        note="Without a prebuilt wheel for your torch, pip compiles it, up to hours, with the nvcc of torch's CUDA. "
        "Each of the MAX_JOBS compilers takes several GB of memory.",
        again="flash-attn-4",
    ),
    Package(
        name="flash-attn",
        on=("rocm",),
        why="FlashAttention 2 by CK or Triton. This project never ran it on a GPU of AMD, so it only runs if you "
        "request it: backend='flash2'.",
        commands=(
            "pip install packaging ninja setuptools wheel",
            "MAX_JOBS=4 pip install --no-build-isolation {requirement}",
        ),
        note="This compiles the CK kernels, up to hours. Set FLASH_ATTENTION_TRITON_AMD_ENABLE=TRUE, for pip and later "
        "for your program, to use Triton's instead: nothing is compiled, but windows are refused. Both lack softcaps.",
    ),
    Package(name="triton", why="The kernels of decoding (triton_splitkv). torch for CUDA on Linux usually brings it."),
    Package(
        name="xformers",
        why="A further choice for decoding and masks. On an H200 its other kernels were never faster than torch's own.",
    ),
    Package(
        name="sageattention",
        why="Quantised inference. It is approximate, so it only runs if you request it: backend='sage'.",
        release=(1, 0, 6),
    ),
)
"""Of two entries of one name, the first that fits the device counts."""

FRAMEWORKS = ("torch", "jax")

BRIDGE = "pip install 'jax-tvm-ffi>=0.1.3'"
"""Installs what JAX needs to reach torch's kernels."""


def package_for(name: str, device: str) -> Package | None:
    """Returns the entry of a package whose commands are for a device, or None."""
    kind = backends.kind_of(device)
    return next((entry for entry in PACKAGES if entry.name == name and {device, kind} & {*entry.on}), None)


def packages_for(device: str) -> list[Package]:
    """Returns the packages, without frameworks, that have a kernel for a device."""
    names = dict.fromkeys(entry.name for entry in PACKAGES if entry.name not in FRAMEWORKS)
    entries = [package_for(name, device) for name in names]
    return [entry for entry in entries if entry is not None and backends_of(entry.name, device)]


def requirements(backend: str, kind: str) -> dict[str, str]:
    """Returns the packages in a backend's ``REQUIRES``: name -> versions such as ``">=2.6.2,<3"``, or ``""``."""
    pattern = r"([a-z][\w-]*)(?:\[\w+\])?((?:[<>=]=?[\w.]+,?)*)(?![\w-])"
    pairs = re.findall(pattern, backends.load(backend, kind).REQUIRES)
    known = {entry.name for entry in PACKAGES} | ALTERNATIVES
    return {name: versions.rstrip(",") for name, versions in pairs if name in known}


ALTERNATIVES = {"flash-attn-3", "fa3-fwd"}
"""Packages in ``REQUIRES`` that are never advised: tokenspeed-fa3 has more than fa3-fwd, and needs no compiler."""


def runs_on(backend: str, device: str) -> bool:
    """Returns whether a backend has kernels for a device: it claims the device, and does not refuse it."""
    module = backends.load(backend, backends.kind_of(device))
    target = Target(module.FRAMEWORK, device)
    reasons = (attn_core.explain(spec, target, backend).reasons(backend) for spec in calls_on(device).values())
    # torch's own kernels claim every NVIDIA GPU and refuse the oldest, whatever the call.
    refused = (any(reason.startswith(f"device {device}:") for reason in of_call) for of_call in reasons)
    return module.FORWARD.runs_on(device) and not all(refused)


@cached_once
def backends_of(name: str, device: str) -> tuple[str, ...]:
    """Returns the backends that a package brings to a device, in the order of automatic choice; others follow."""
    kind, entry = backends.kind_of(device), package_for(name, device)
    order = backends.usual_order("jax", kind)
    versions = {one: requirements(one, kind).get(name) for one in backends.names()}
    if entry is not None and entry.release:
        versions = {one: least if includes(least, entry.release) else None for one, least in versions.items() if least}
    brought = [one for one, least in versions.items() if least is not None and runs_on(one, device)]
    return tuple(sorted(brought, key=lambda one: order.index(one) if one in order else len(order)))


def requirement(package: Package, machine: Machine) -> str:
    """Returns what to give to pip, quoted for a shell: ``'flash-attn-4[cu13]>=4.0.0b30'``."""
    versions = ""
    for backend in backends_of(package.name, machine.device) or backends.names():
        versions = versions or requirements(backend, machine.kind).get(package.name, "")
    extra = package.extras.get(cuda_of(machine), "") if machine.kind == "cuda" else ""
    text = package.name + (f"[{extra}]" if extra else "") + versions
    return text if text == package.name else f"'{text}'"


def cuda_of(machine: Machine) -> int:
    """Returns the major CUDA version that the machine's packages should be built for."""
    if 0 < machine.capability < 75:
        return 12  # CUDA 13 has dropped GPUs before sm75
    if machine.torch_cuda is not None:
        return machine.torch_cuda[0]
    return machine.jax_cuda or CUDA


def commands_of(package: Package, machine: Machine) -> tuple[str, ...]:
    """Returns the commands that install a package on a machine, ready to copy."""
    words = {
        "requirement": requirement(package, machine),
        "architecture": ARCHITECTURES.get(machine.device, machine.device.removeprefix("sm")),
    }
    commands = [command.format(**words) for command in package.commands]
    again = package_for(package.again, machine.device) if machine.has(package.again) else None
    if again is not None:
        commands.append(f"pip install --force-reinstall --no-deps {requirement(again, machine)}")
    return tuple(commands)
