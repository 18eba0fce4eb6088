"""Advice on an installation: known-bad combinations of packages, and what to install next and why.

Everything here but ``find_machine`` is a pure function of a ``Machine``, so every GPU can be tested on a laptop.

``advice.json`` says how packages are installed and why, which of them do not work together, and by which calls a
package is judged. Which devices a package helps on is not repeated there: the claims of its backends say so. A backend
names its packages and their versions in ``requires``. Kernels that run and compute something wrong are rows of
``attn_core/backends/shared/known_bad.json``.
"""

from __future__ import annotations

import ctypes
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from attn_core import backends
from attn_core.backends.shared.caches import cached_once
from attn_core.backends.shared.known_bad import includes, numbers_of
from attn_core.backends.support import Build, half_dtype
from attn_core.call.spec import AttentionSpec, PagedKV
from attn_core.cli.devices import FRAMEWORKS, KNOWN_PACKAGES
from attn_core.selection import Target, explain, refusals

Entry = dict[str, Any]
DATA: Entry = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))

PACKAGES: list[Entry] = DATA["packages"]
"""The packages that can be advised: ``name``; ``on``, the kinds of device (``"cuda"``) or devices (``"sm70"``) that the
entry is for (of two entries the first counts); ``why``, a sentence; ``commands``, in which ``{requirement}`` is the
name with extra and versions, ``{cuda}`` the major CUDA version, and ``{architecture}`` a GPU's number, or that of
``architectures`` whose kernels it runs;
``note``, what else to know; ``extras`` by CUDA version; ``builds``, what the package's build of a backend lacks;
``release``, the newest one on the package index, if some backends need a later one; ``again``, a package that must be
installed again afterwards if it is there, because this one overwrites it."""

PROBLEMS: list[Entry] = DATA["problems"]
"""Combinations of packages, those that stop the most first: ``name``; ``text``, what is wrong and what follows from it;
the remedy: ``commands``, ``for_each_runtime`` that is missing, and ``install``, a package to install after them."""

WHEEL_CUDA: dict[str, int] = DATA["wheels"]
"""The major CUDA version that a package's prebuilt wheel is linked with (tokenspeed-fa3 3.0.0, xformers 0.0.35)."""

TOPOLOGY = Path("/sys/class/kfd/kfd/topology/nodes")
"""Where Linux lists AMD GPUs."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a machine has: the facts that advice depends on."""

    device: str  # the accelerator as a Target names it, such as ``"sm90"``, ``"gfx942"`` or ``"tpu"``; else ``"cpu"``
    # the version of each installed package that matters here, by name
    packages: Mapping[str, str] = field(default_factory=dict)
    gpus: tuple[str, ...] = ()  # the names of the GPUs
    driver: str = ""  # the version of NVIDIA's driver, such as ``"580.95.05"``; empty if unknown
    # the CUDA version that torch is built for; None for other builds of torch, or without torch
    torch_cuda: tuple[int, ...] | None = None
    torch_hip: bool = False  # whether torch is a ROCm build
    jax_cuda: int | None = None  # the major CUDA version of JAX's plugin; None without one
    cuda_runtimes: tuple[int, ...] = ()  # the major CUDA versions whose runtime library can be loaded
    # the major CUDA version that a package's wheel is linked with, by name
    wheel_cuda: Mapping[str, int] = field(default_factory=lambda: WHEEL_CUDA)

    @property
    def kind(self) -> str:
        """``"cuda"``, ``"rocm"``, else the device itself."""
        return backends.kind_of(self.device)

    @property
    def is_before_sm75(self) -> bool:
        """Whether this is a GPU of NVIDIA that CUDA 13, and torch for CUDA 12.8 and later, have no kernels for."""
        return self.kind == "cuda" and int(self.device[2:]) < 75

    @property
    def torch_is_blind(self) -> bool:
        """Whether torch is a build without support of the GPU."""
        return self.has("torch") and self.kind in ("cuda", "rocm") and self.torch_cuda is None and not self.torch_hip

    @property
    def cuda_majors(self) -> list[int]:
        """The major CUDA version of torch, and that of JAX's plugin."""
        majors = (self.torch_cuda[0] if self.torch_cuda else None, self.jax_cuda)
        return [major for major in majors if major is not None]

    @property
    def cuda(self) -> int:
        """The major CUDA version that further packages should be built for."""
        return 12 if self.is_before_sm75 else next(iter(self.cuda_majors), 13)

    @property
    def orphans(self) -> dict[str, int]:
        """The major CUDA version of each installed wheel whose runtime neither torch nor the system has."""
        if self.torch_cuda is None:
            return {}
        present = {*self.cuda_runtimes, self.torch_cuda[0]}
        wheels = self.wheel_cuda.items()
        return {name: major for name, major in wheels if name in self.packages and major not in present}

    def has(self, *names: str) -> bool:
        """Returns whether any of the packages is installed."""
        return any(name in self.packages for name in names)

    def plus(self, name: str) -> Machine:
        """Returns the machine with one more package. A framework comes with what it usually brings along."""
        more = replace(self, packages={**self.packages, name: ""})
        if name == "torch" and self.kind == "cuda":
            return replace(more.plus("triton"), torch_cuda=(self.cuda, 0))
        if name == "torch":
            return replace(more, torch_hip=self.kind == "rocm")
        return replace(more, jax_cuda=self.cuda) if name == "jax" and self.kind == "cuda" else more


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
    torch = sys.modules.get("torch")  # the search for devices has imported it, unless it is missing or broken
    plugins = [number for number in (13, 12) if f"jax-cuda{number}-plugin" in there]
    return Machine(
        device=device,
        packages=there,
        gpus=tuple(name for name, _, _ in nvidia),
        driver=next((driver for _, _, driver in nvidia), ""),
        torch_cuda=numbers_of(torch.version.cuda) if torch is not None and torch.version.cuda else None,
        torch_hip=torch is not None and bool(torch.version.hip),
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


def _with_tuples(plain: Entry) -> Entry:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in plain.items()}


def _call(changes: Entry) -> AttentionSpec:
    paged = PagedKV(**changes["paged"]) if "paged" in changes else None
    return AttentionSpec(**DATA["layer"] | _with_tuples(changes) | {"paged": paged})


CALLS = {name: _call(changes) for name, changes in DATA["calls"].items()}
"""The calls that a package is judged by: those of a language model's layer (32 heads of 128 channels, in groups of
four) by what they do. All but prompts, decoding and pages have gradients."""


def calls_on(device: str) -> dict[str, AttentionSpec]:
    """Returns ``CALLS`` in the half precision of a device."""
    return {name: replace(spec, dtype=half_dtype(device)) for name, spec in CALLS.items()}


def package_for(name: str, device: str) -> Entry | None:
    """Returns the entry of a package for a device, or None."""
    kinds = {device, backends.kind_of(device)}
    return next((entry for entry in PACKAGES if entry["name"] == name and kinds & {*entry["on"]}), None)


def requirements(backend: str, kind: str) -> dict[str, str]:
    """Returns the packages in a backend's ``requires``: name -> versions such as ``">=2.6.2,<3"``, or ``""``."""
    pattern = r"([a-z][\w-]*)(?:\[\w+\])?((?:[<>=]=?[\w.]+,?)*)(?![\w-])"
    pairs = re.findall(pattern, backends.load(backend, kind).requires)
    return {name: versions.rstrip(",") for name, versions in pairs if name in KNOWN_PACKAGES}


def runs_on(backend: str, device: str) -> bool:
    """Returns whether a backend has kernels for a device: it claims the device, and does not refuse it."""
    record = backends.load(backend, backends.kind_of(device))
    target = Target(record.framework, device)
    reasons = (refusals(backend, spec, target) for spec in calls_on(device).values())
    # torch's own kernels claim every NVIDIA GPU and refuse the oldest, whatever the call.
    refused = (any(reason.startswith(f"device {device}:") for reason in of_call) for of_call in reasons)
    return record.forward_claims.runs_on(device) and not all(refused)


@cached_once
def backends_of(name: str, device: str) -> tuple[str, ...]:
    """Returns the backends that a package brings to a device, in the order of automatic choice; others follow."""
    kind, entry = backends.kind_of(device), package_for(name, device)
    order = backends.usual_order("jax", kind)
    versions = {one: requirements(one, kind).get(name) for one in backends.names()}
    if entry is not None and "release" in entry:
        newest = numbers_of(entry["release"])
        versions = {one: least if includes(least, newest) else None for one, least in versions.items() if least}
    brought = [one for one, least in versions.items() if least is not None and runs_on(one, device)]
    return tuple(sorted(brought, key=lambda one: order.index(one) if one in order else len(order)))


def requirement(package: Entry, machine: Machine) -> str:
    """Returns what to give to pip, quoted for a shell: ``'flash-attn-4[cu13]>=4.0.0b30'``."""
    name: str = package["name"]
    brought = backends_of(name, machine.device) or backends.names()
    versions = (requirements(backend, machine.kind).get(name) for backend in brought)
    extra = package.get("extras", {}).get(str(machine.cuda)) if machine.kind == "cuda" else None
    text = name + (f"[{extra}]" if extra else "") + next(filter(None, versions), "")
    return text if text == name else f"'{text}'"


def commands_of(package: Entry, machine: Machine) -> tuple[str, ...]:
    """Returns the commands that install a package on a machine, ready to copy."""
    architecture = package.get("architectures", {}).get(machine.device, machine.device.removeprefix("sm"))
    words = {"requirement": requirement(package, machine), "architecture": architecture, "cuda": machine.cuda}
    commands = [command.format(**words) for command in package["commands"]]
    overwritten = package.get("again", "")
    again = package_for(overwritten, machine.device) if machine.has(overwritten) else None
    if again is not None:
        commands.append(f"pip install --force-reinstall --no-deps {requirement(again, machine)}")
    return tuple(commands)


@dataclass(frozen=True)
class Problem:
    """A known-bad combination on a machine: its stable name, what is wrong and what follows, and commands to copy."""

    name: str
    text: str
    commands: tuple[str, ...]


def _is_old(machine: Machine, framework: str) -> bool:
    """Returns whether a framework is older than what the backend of its own operations requires."""
    installed = numbers_of(machine.packages.get(framework, ""))
    needed = requirements(backends.plain_backend(framework), "cpu")[framework]
    return bool(installed) and not includes(needed, installed)


APPLIES: dict[str, Callable[[Machine], bool]] = {
    "torch-without-gpu": lambda m: m.torch_is_blind,
    "torch-too-old": lambda m: _is_old(m, "torch"),
    "jax-too-old": lambda m: _is_old(m, "jax"),
    "gpu-too-old-for-cuda": lambda m: m.is_before_sm75 and (m.torch_cuda or ()) >= (12, 8),
    "gpu-too-old-for-jax-cuda": lambda m: m.is_before_sm75 and m.jax_cuda == 13,
    "driver-too-old-for-cuda-13": lambda m: 0 < next(iter(numbers_of(m.driver)), 0) < 580 and 13 in m.cuda_majors,
    "jax-without-cuda": lambda m: m.has("jax") and m.kind == "cuda" and m.jax_cuda is None,
    "cuda-versions-differ": lambda m: len({*m.cuda_majors}) > 1,
    "bridge-missing": lambda m: m.has("torch") and m.has("jax") and not m.has("jax-tvm-ffi"),
    "flash-attn-4-breaks-xformers": lambda m: m.has("flash-attn-4") and m.has("xformers") and not m.has("flash-attn"),
    "cuda-runtime-missing": lambda m: bool(m.orphans),
    "xformers-beside-forward-only-fa3": lambda m: m.has("xformers") and m.has("tokenspeed-fa3", "fa3-fwd"),
}
"""Whether a machine has a combination, by its name."""


def problems(machine: Machine) -> tuple[Problem, ...]:
    """Returns the known-bad combinations of a machine, the ones that stop the most first."""
    words = {
        "machine": machine,
        "torch_cuda": ".".join(map(str, machine.torch_cuda or ())),
        "orphans": ", ".join(f"{name} (CUDA {major})" for name, major in machine.orphans.items()),
    }
    return tuple(
        Problem(entry["name"], entry["text"].format(**words), _remedy(entry, machine))
        for entry in PROBLEMS
        if APPLIES[entry["name"]](machine)
    )


def _remedy(entry: Entry, machine: Machine) -> tuple[str, ...]:
    commands = [command.format(machine=machine) for command in entry.get("commands", ())]
    for major in sorted({*machine.orphans.values()}):
        commands += [command.format(**DATA["runtimes"][str(major)]) for command in entry.get("for_each_runtime", ())]
    install = package_for(entry.get("install", ""), machine.device)
    return (*commands, *(commands_of(install, machine) if install is not None else ()))


@dataclass(frozen=True)
class Advice:
    """A package for a machine."""

    package: str
    # ``"next"`` if automatic choice would use it or nothing else runs on the device, else ``"optional"``;
    # ``"avoid"`` if it would not work beside what is installed or advised before it
    level: str
    backends: tuple[str, ...]  # those that it brings to the device
    calls: tuple[str, ...]  # names of the calls that automatic choice would run on it
    why: str  # a sentence; for "avoid" what would break
    commands: tuple[str, ...] = ()  # to copy; empty for "avoid"
    note: str = ""  # what else to know; may be empty


def advise(machine: Machine) -> tuple[Advice, ...]:
    """Returns the packages that the machine lacks and that have a kernel for its device, the most useful first.

    A package counts by the calls of ``calls_on`` that automatic choice would run on it, beside the packages before it.
    """
    advices, machine = _frameworks(machine)
    entries = (package_for(name, machine.device) for name in dict.fromkeys(entry["name"] for entry in PACKAGES))
    candidates = {entry["name"]: entry for entry in entries if entry is not None and _is_new(entry["name"], machine)}
    while candidates:
        gains = {name: _gains(name, machine) for name in candidates}
        best = max(gains, key=lambda name: len(gains[name]))  # of equals the first in the table
        advice = _advice(candidates.pop(best), machine, gains[best])
        advices.append(advice)
        if advice.level == "next":
            machine = machine.plus(best)
    order = ("next", "optional", "avoid")
    return tuple(sorted(advices, key=lambda advice: order.index(advice.level)))


def _frameworks(machine: Machine) -> tuple[list[Advice], Machine]:
    """Returns advice for frameworks, and the machine with those that are to be installed or replaced first.

    With one framework there is no reason to install the other, except torch, whose kernels also serve JAX.
    """
    advices, later = [], machine.plus("torch") if machine.torch_is_blind else machine
    for name in FRAMEWORKS:
        entry = package_for(name, machine.device)
        if entry is None or machine.has(name) or (name == "jax" and machine.has("torch")):
            continue
        level = "optional" if machine.has("jax") else "next"
        commands = commands_of(entry, later)
        if later.has(*FRAMEWORKS):
            commands = (*commands, "pip install 'jax-tvm-ffi>=0.1.3'")
        if level == "next":
            later = later.plus(name)
        advices.append(
            Advice(name, level, backends_of(name, machine.device), (), entry["why"], commands, entry["note"])
        )
    return advices, later


def _is_new(name: str, machine: Machine) -> bool:
    """Returns whether a package is no framework and brings an installed framework a backend that it lacks."""
    every = backends_of(name, machine.device)
    brought = {one for one in every if machine.has(backends.load(one, machine.kind).framework)}
    return name not in FRAMEWORKS and not machine.has(name) and not brought <= available(machine)


def available(machine: Machine) -> set[str]:
    """Returns the backends of the machine's packages, assuming that each of them works."""
    return {name for name in backends.names() if machine.has(*requirements(name, machine.kind))}


def _gains(name: str, machine: Machine) -> tuple[str, ...]:
    """Returns the names of the calls that automatic choice would run on a package if it were installed.

    Choice in torch, if torch is there: its kernels also serve JAX.
    """
    more = machine.plus(name)
    new, here = {*backends_of(name, machine.device)} - available(machine), available(more)
    missing = tuple((backend, "not installed") for backend in backends.names() if backend not in here)
    entries = (package_for(each, machine.device) or {} for each in more.packages)
    builds = [
        (backend, Build(**_with_tuples(lacks))) for each in entries for backend, lacks in each.get("builds", {}).items()
    ]
    target = Target("torch" if machine.has("torch") else "jax", machine.device, missing, tuple(builds))
    calls = calls_on(machine.device).items()
    return tuple(call for call, spec in calls if explain(spec, target).backend in new)


def _advice(entry: Entry, machine: Machine, gains: tuple[str, ...]) -> Advice:
    """Returns the advice on one package: install it next, it is optional, or avoid it because it breaks something."""
    name, brought = entry["name"], backends_of(entry["name"], machine.device)
    before = {problem.name for problem in problems(machine)}
    broken = [problem for problem in problems(machine.plus(name)) if problem.name not in before]
    if broken:
        return Advice(name, "avoid", brought, gains, broken[0].text)
    # The only backend of a device is worth installing, even if it runs only by name.
    alone = not any(runs_on(backend, machine.device) for backend in available(machine))
    level = "next" if gains or alone else "optional"
    return Advice(name, level, brought, gains, entry["why"], commands_of(entry, machine), entry["note"])
