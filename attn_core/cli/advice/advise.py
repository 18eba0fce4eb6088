"""What to install next on a machine, and why: the packages that automatic choice would use, the most useful first."""

from __future__ import annotations

from dataclasses import dataclass

import attn_core
from attn_core import backends
from attn_core.cli.advice import packages
from attn_core.cli.advice.machine import Machine
from attn_core.cli.advice.packages import FRAMEWORKS, Package, backends_of, commands_of, package_for
from attn_core.cli.advice.problems import problems
from attn_core.selection.target import Target


@dataclass(frozen=True)
class Advice:
    """A package for a machine.

    Attributes:
        package: its name.
        level: ``"next"`` if automatic choice would use it or nothing else runs on the device, else ``"optional"``;
            ``"avoid"`` if it would not work beside what is installed or advised before it.
        backends: those that it brings to the device.
        calls: names of the calls that automatic choice would run on it.
        why: a sentence; for "avoid" what would break.
        commands: to copy; empty for "avoid".
        note: what else to know; may be empty.
    """

    package: str
    level: str
    backends: tuple[str, ...]
    calls: tuple[str, ...]
    why: str
    commands: tuple[str, ...]
    note: str


def advise(machine: Machine) -> tuple[Advice, ...]:
    """Returns the packages that the machine lacks and that have a kernel for its device, the most useful first.

    A package counts by the calls of ``calls_on`` that automatic choice would run on it, beside the packages before it.
    """
    advices, machine = _frameworks(machine)
    if not machine.has("torch"):  # the kernels below are torch's
        return tuple(advices)
    candidates = [package for package in packages.packages_for(machine.device) if _is_new(package, machine)]
    while candidates:
        gains = {package.name: _gains(package, machine) for package in candidates}
        best = max(candidates, key=lambda package: len(gains[package.name]))  # of equals the first in the table
        candidates.remove(best)
        advice = _advice(best, machine, gains[best.name])
        advices.append(advice)
        if advice.level == "next":
            machine = machine.plus(best.name)
    order = ("next", "optional", "avoid")
    return tuple(sorted(advices, key=lambda advice: order.index(advice.level)))


def _frameworks(machine: Machine) -> tuple[list[Advice], Machine]:
    """Returns advice for frameworks, and the machine with those that are to be installed or replaced first.

    With one framework there is no reason to install the other, except torch, whose kernels also serve JAX.
    """
    blind = machine.has("torch") and machine.kind == "cuda" and not machine.torch_sees_gpu
    advices, later = [], machine.plus("torch") if blind else machine
    for name in FRAMEWORKS:
        entry = package_for(name, machine.device)
        if entry is None or machine.has(name) or (name == "jax" and machine.has("torch")):
            continue
        level = "optional" if machine.has("jax") else "next"
        commands, brought = commands_of(entry, later), backends_of(name, machine.device)
        if later.has(*FRAMEWORKS):
            commands = (*commands, "pip install 'jax-tvm-ffi>=0.1.3'")
        if level == "next":
            later = later.plus(name)
        advices.append(Advice(name, level, brought, (), entry.why, commands, entry.note))
    return advices, later


def _advice(package: Package, machine: Machine, gains: tuple[str, ...]) -> Advice:
    brought = backends_of(package.name, machine.device)
    before = {problem.name for problem in problems(machine)}
    broken = [problem for problem in problems(machine.plus(package.name)) if problem.name not in before]
    if broken:
        return Advice(package.name, "avoid", brought, gains, broken[0].text, (), "")
    # The only backend of a device is worth installing, even if it runs only by name.
    alone = not any(packages.runs_on(name, machine.device) for name in available(machine))
    level = "next" if gains or alone else "optional"
    return Advice(package.name, level, brought, gains, package.why, commands_of(package, machine), package.note)


def _is_new(package: Package, machine: Machine) -> bool:
    """Returns whether the package brings a backend that no installed package brings."""
    brought = backends_of(package.name, machine.device)
    return not machine.has(package.name) and any(one not in available(machine) for one in brought)


def available(machine: Machine) -> tuple[str, ...]:
    """Returns the backends of the machine's packages, assuming that each of them works."""
    return tuple(name for name in backends.names() if machine.has(*packages.requirements(name, machine.kind)))


def _gains(package: Package, machine: Machine) -> tuple[str, ...]:
    """Returns the names of the calls that automatic choice would run on the package if it were installed."""
    new = [name for name in backends_of(package.name, machine.device) if name not in available(machine)]
    more = machine.plus(package.name)
    here = available(more)
    missing = tuple((name, "not installed") for name in backends.names() if name not in here)
    entries = [package_for(name, more.device) for name in more.packages]
    builds = tuple(build for entry in entries if entry is not None for build in entry.lacking_builds())
    target = Target("torch", more.device, missing, builds)
    calls = packages.calls_on(machine.device)
    return tuple(name for name, spec in calls.items() if attn_core.explain(spec, target).backend in new)
