"""The known faults of the kernels that are installed on a machine, for ``attn doctor``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from attn_core import backends
from attn_core.backends.shared.known_bad import Row, rows_of
from attn_core.selection.target import Target


class Fault(NamedTuple):
    """A known fault of an installed kernel: selection refuses the calls that would meet it.

    Attributes:
        name: of the row in ``known_bad.json``.
        backends: those whose kernel has it here.
        device: such as ``"sm90"``.
        package: that has the fault.
        versions: the faulty ones; empty for all.
        symptom: what goes wrong.
        link: to the report.
    """

    name: str
    backends: tuple[str, ...]
    device: str
    package: str
    versions: str
    symptom: str
    link: str


def faults_of(targets: Iterable[Target]) -> tuple[Fault, ...]:
    """Returns the known faults of the kernels that are installed on some targets."""
    found: dict[tuple[Row, str], dict[str, None]] = {}
    for target in targets:
        for name in _installed(target):
            build = target.build(name)
            for row in rows_of(name, target.device, () if build is None else build.version):
                found.setdefault((row, target.device), {})[name] = None
    return tuple(
        Fault(row.name, tuple(names), device, row.package, row.versions, row.symptom, row.link)
        for (row, device), names in found.items()
    )


def _installed(target: Target) -> Iterator[str]:
    """Yields the backends that are installed on a target and claim its device."""
    missing = {name for name, _ in target.unavailable}
    for name in backends.names():
        if name not in missing and target.out_of_reach(name) is None and target.claims(name)[0].runs_on(target.device):
            yield name
