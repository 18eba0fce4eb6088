"""Subject: one backend, as one framework calls it on one device. What is not here is listed with a reason."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from attn_core import backends
from attn_core.backends.support import Support
from attn_core.cli.frameworks import FRAMEWORKS, installed
from attn_core.selection import Target

COMPILED = ("jax_cudnn", "jax_xla", "flex", "flash4")
"""Backends that compile each structure for a second or more: they come last."""


class Left(NamedTuple):
    """Something that a certificate says nothing about: ``what``, such as ``"flash4 in torch"``, and ``why``."""

    what: str
    why: str


class Subject(NamedTuple):
    """A backend, the framework that calls it, and the device, such as ``"cpu"`` or ``"sm90"``."""

    backend: str
    framework: str
    device: str

    @property
    def kind(self) -> str:
        """The kind of the device."""
        return backends.kind_of(self.device)

    @property
    def target(self) -> Target:
        """This process's installation."""
        return Target.here(self.framework, self.device)

    @property
    def claims(self) -> Support:
        """The claims about the forward, narrowed to the installed build."""
        return self.target.claims(self.backend)[0]

    @property
    def pages_alone(self) -> bool:
        """Whether the backend refuses every call that is not paged."""
        return backends.reads_pages_alone(backends.load(self.backend, self.kind))

    def __str__(self) -> str:
        return f"{self.backend} in {self.framework}"


def subjects_of(devices: dict[str, str], names: tuple[str, ...] = ()) -> tuple[list[Subject], list[Left]]:
    """Returns the backends that run here, and the others with the reason, all or ``names`` alone.

    Args:
        devices: the device of each framework, such as ``{"torch": "cpu", "jax": "cpu"}``.

    Raises:
        SpecError: for an unknown backend.
    """
    for name in names:
        backends.check_name(name)
    found: list[Subject] = []
    left = [Left(framework, "not installed") for framework in FRAMEWORKS if framework not in installed()]
    for framework, device in devices.items():
        target = Target.here(framework, device)
        for name in names or backends.names():
            why = next(_reasons(name, target), None)
            if why is None:
                found.append(Subject(name, framework, device))
            else:
                left.append(Left(f"{name} in {framework}", why))
    return sorted(found, key=lambda subject: subject.backend in COMPILED), left


def _reasons(name: str, target: Target) -> Iterator[str]:
    if why := target.out_of_reach(name):
        yield why
    claims = backends.load(name, target.kind).FORWARD
    if not claims.runs_on(target.device):
        yield f"no kernel for {target.device}"
    yield from (why for missing, why in target.unavailable if missing == name)
