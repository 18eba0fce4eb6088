"""``attn certify``."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic
from typing import Annotated

import typer

from attn_core import backends
from attn_core.cli.certify import certificate
from attn_core.cli.certify.calls import CHECKS, Subject, calls_of, faults_of, subjects_on
from attn_core.cli.certify.certificate import FAILED, PASSED, Certificate, Entry, count
from attn_core.cli.certify.checks import entry_of
from attn_core.cli.devices import devices_here
from attn_core.cli.frameworks import FRAMEWORKS, installed, versions
from attn_core.errors import SpecError
from attn_core.selection.tables import device_name
from attn_core.selection.whole_file import check_place

NEVER = {
    "dropout": "each framework draws its own seed",
    "drop-ins, compiled and exported programs, several ranks, forward mode": "the tests of the project run them",
}
"""What no certificate is about."""


def certify(
    backend: Annotated[list[str] | None, typer.Option(help="Check this backend alone. Repeatable.")] = None,
    framework: Annotated[str | None, typer.Option(help="torch or jax. Default: all that are installed.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, or cuda (the GPU here). Default: the GPU, else cpu.")] = None,
    check: Annotated[list[str] | None, typer.Option(help="Run this check alone. Repeatable.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write the certificate here, not in the user's folder.")] = None,
) -> None:
    """Prove what the backends on this machine promise by a stored list of calls, and write a certificate.

    Exit code: 0 if every check that ran passed; 1 if none ran or one failed; 2 for invalid options or files.
    """
    names, checks = tuple(backend or ()), tuple(check or ())
    devices = devices_here(device, framework)
    for name in names:
        backends.check_name(name)
    for name in checks:
        if name not in CHECKS:
            raise SpecError(f"--check={name!r}: expected one of {', '.join(CHECKS)}")
    path = json or (None if names or checks or framework else certificate.user_path(next(iter(devices.values()))))
    if path is not None:
        check_place(path, with_folder=True)
    found = _certificate(devices, names, checks)
    if path is not None:
        certificate.write(found, path)
    for line in certificate.report(found):
        typer.echo(line)
    typer.echo(f"wrote {path}" if path is not None else "nothing was written, because this is a part; see --json")
    if count(found, FAILED) or not count(found, PASSED):
        raise typer.Exit(1)


def _certificate(devices: dict[str, str], names: tuple[str, ...], checks: tuple[str, ...]) -> Certificate:
    """Runs all checks, or those of some names."""
    began, everyone = monotonic(), subjects_on(devices.items(), names)
    subjects = [subject for subject in everyone if subject.missing is None]
    left = {framework: "not installed" for framework in FRAMEWORKS if framework not in installed()}
    left |= {str(subject): subject.missing for subject in everyone if subject.missing is not None}
    entries = [entry._asdict() for entry in _entries(subjects, checks)]
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "seconds": round(monotonic() - began, 1),
        "devices": devices,
        "device_name": device_name(next(iter(devices.values()))) or "",
        "cpu_capability": _cpu_capability(),
        "versions": versions(),
        "backends": names,
        "checks": checks,
        "entries": entries,
        "known_bad": [
            f"{row.name}: {backend} on {row.devices[0]}" for row in faults_of(subjects) for backend in row.backends
        ],
        "not_run": [{"what": what, "why": why} for what, why in (left | NEVER).items()],
    }


def _cpu_capability() -> str:
    if "torch" not in installed():
        return ""
    import torch

    return str(torch.backends.cpu.get_cpu_capability())  # type: ignore[no-untyped-call]


def _entries(subjects: list[Subject], checks: tuple[str, ...]) -> Iterator[Entry]:
    for subject in subjects:
        for name in CHECKS:
            # The results of both frameworks are compared once, in JAX.
            if (not checks or name in checks) and (name != "frameworks" or subject.framework == "jax"):
                typer.echo(f"{name} of {subject}", err=True)  # so that stdout has only the result
                yield entry_of(name, subject, calls_of(name))
