"""The packages that ``attn doctor`` can advise, and the backends that each of them brings.

``packages.json`` says how to install them and why. Which devices a package helps on is not repeated there: the claims
of its backends say so. A backend names its packages and their versions in ``REQUIRES``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import attn_core
from attn_core import backends
from attn_core.backends.shared.cached_once import cached_once
from attn_core.backends.shared.device_kinds import half_dtype
from attn_core.backends.shared.known_bad import includes, numbers_of
from attn_core.backends.support import Build
from attn_core.call.pages import PagedKV
from attn_core.call.spec import AttentionSpec
from attn_core.cli.advice.machine import Machine
from attn_core.selection.target import Target

FRAMEWORKS = ("torch", "jax")
CUDA = 13
"""The CUDA version to install if neither framework has one yet."""
ARCHITECTURES = {"sm86": "80", "sm87": "80", "sm89": "80"}
"""The architecture whose FlashAttention 2 kernels a device runs, if that is not its own."""
ALTERNATIVES = {"flash-attn-3", "fa3-fwd"}
"""Packages in ``REQUIRES`` that are never advised: tokenspeed-fa3 has more than fa3-fwd, and needs no compiler."""


@dataclass(frozen=True, kw_only=True)
class Package:
    """How to install a package, and why: an entry of ``packages.json``.

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
    on: tuple[str, ...]
    why: str
    commands: tuple[str, ...] = ("pip install {requirement}",)
    note: str = ""
    extras: Mapping[str, str] = field(default_factory=dict)
    builds: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    release: str = ""
    again: str = ""

    def lacking_builds(self) -> list[tuple[str, Build]]:
        """Returns (backend, build) for the builds that lack something."""
        return [
            (backend, Build(lacks["name"], without=tuple(lacks["without"]), head_dims=tuple(lacks["head_dims"])))
            for backend, lacks in self.builds.items()
        ]


PACKAGES = tuple(
    Package(**entry) for entry in json.loads(Path(__file__).with_name("packages.json").read_text(encoding="utf-8"))
)
"""Of two entries of one name, the first that fits the device counts."""

_PROMPT = AttentionSpec(
    batch=4,
    q_len=4096,
    kv_len=4096,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    value_dim=128,
    dtype="bfloat16",
    causal=True,
)
_TRAINING = replace(_PROMPT, needs_backward=True)
_PAGED: dict[str, Any] = {
    "documents": 64,
    "max_len_q": 1,
    "max_len_k": 8192,
    "paged": PagedKV(num_pages=8192, page_size=64, width=128),
}
CALLS = {
    "prompts": _PROMPT,
    "training": _TRAINING,
    "packed documents": replace(_TRAINING, batch=1, documents=8, max_len_q=1024, max_len_k=1024),
    "windows": replace(_TRAINING, window=(1023, 0)),
    "softcaps": replace(_TRAINING, softcap=50.0),
    "ALiBi": replace(_TRAINING, alibi_shape=(32,)),
    "decoding": replace(_PROMPT, batch=64, q_len=1),
    "pages": replace(_PROMPT, batch=1, q_len=64, kv_len=8192, **_PAGED),
}
"""The calls that a package is judged by: those of a language model's layer (32 heads of 128 channels, in groups of
four) by what they do. All but prompts, decoding and pages have gradients."""


def calls_on(device: str) -> dict[str, AttentionSpec]:
    """Returns ``CALLS`` in the half precision of a device."""
    return {name: replace(spec, dtype=half_dtype(device)) for name, spec in CALLS.items()}


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
        newest = numbers_of(entry.release)
        versions = {one: least if includes(least, newest) else None for one, least in versions.items() if least}
    brought = [one for one, least in versions.items() if least is not None and runs_on(one, device)]
    return tuple(sorted(brought, key=lambda one: order.index(one) if one in order else len(order)))


def requirement(package: Package, machine: Machine) -> str:
    """Returns what to give to pip, quoted for a shell: ``'flash-attn-4[cu13]>=4.0.0b30'``."""
    versions = ""
    for backend in backends_of(package.name, machine.device) or backends.names():
        versions = versions or requirements(backend, machine.kind).get(package.name, "")
    extra = package.extras.get(str(cuda_of(machine)), "") if machine.kind == "cuda" else ""
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
