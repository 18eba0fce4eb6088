"""``attn certify``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic
from typing import Annotated
from warnings import catch_warnings, simplefilter

import typer

from attn_core import backends
from attn_core.cli.certify.calls import CHECKS, Call, Form, Subject, accepted, calls_of, drawn, refusal
from attn_core.cli.certify.certificate import (
    FAILED,
    NOT_RUN,
    PASSED,
    Certificate,
    Entry,
    certificate_path,
    count,
    report,
    write,
)
from attn_core.cli.certify.checks import JUDGES, Finding
from attn_core.cli.devices import devices_here
from attn_core.cli.doctor import faults_of
from attn_core.cli.frameworks import FRAMEWORKS, installed, versions
from attn_core.errors import LayoutWarning, SpecError
from attn_core.selection import availability
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
    path = json or (None if names or checks or framework else certificate_path(next(iter(devices.values()))))
    if path is not None:
        check_place(path, with_folder=True)
    certificate = _certificate(devices, names, checks)
    if path is not None:
        write(certificate, path)
    for line in report(certificate):
        typer.echo(line)
    typer.echo(f"wrote {path}" if path is not None else "nothing was written, because this is a part; see --json")
    if count(certificate, FAILED) or not count(certificate, PASSED):
        raise typer.Exit(1)


def _certificate(devices: dict[str, str], names: tuple[str, ...], checks: tuple[str, ...]) -> Certificate:
    """Runs all checks, or those of some names."""
    began, (subjects, left) = monotonic(), subjects_of(devices, names)
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
            f"{row.name}: {backend} on {row.devices[0]}"
            for row in faults_of(dict.fromkeys(subject.target for subject in subjects))
            for backend in row.backends
            if any(subject.backend == backend for subject in subjects)
        ],
        "not_run": [{"what": what, "why": why} for what, why in (left | NEVER).items()],
    }


def _cpu_capability() -> str:
    if "torch" not in installed():
        return ""
    import torch

    return str(torch.backends.cpu.get_cpu_capability())  # type: ignore[no-untyped-call]


def subjects_of(devices: dict[str, str], names: tuple[str, ...] = ()) -> tuple[list[Subject], dict[str, str]]:
    """Returns the backends that run here, and why each other does not; all or ``names`` alone.

    Args:
        devices: the device of each framework, such as ``{"torch": "cpu", "jax": "cpu"}``.
    """
    subjects, left = [], {framework: "not installed" for framework in FRAMEWORKS if framework not in installed()}
    for framework, device in devices.items():
        here = availability.report(framework, device)
        for subject in (Subject(name, framework, device) for name in names or here):
            if not subject.claims.runs_on(device):
                left[str(subject)] = f"no kernel for {device}"
            elif (reason := here[subject.backend].reason) is not None:
                left[str(subject)] = reason
            else:
                subjects.append(subject)
    return subjects, left


def _entries(subjects: list[Subject], checks: tuple[str, ...]) -> Iterator[Entry]:
    for subject in subjects:
        for name in CHECKS:
            # The results of both frameworks are compared once, in JAX.
            if (not checks or name in checks) and (name != "frameworks" or subject.framework == "jax"):
                typer.echo(f"{name} of {subject}", err=True)  # so that stdout has only the result
                yield entry_of(name, subject, calls_of(name))


def entry_of(name: str, subject: Subject, calls: dict[str, Call]) -> Entry:
    """Runs one check of one subject: every one of some calls that the backend takes."""
    began = monotonic()
    refused: dict[str, list[str]] = {}
    findings: dict[str, Finding] = {}
    for call, fields in calls.items():
        form = accepted(subject, fields)
        finding = Finding(missing=form) if isinstance(form, str) else _finding(name, subject, form)
        if finding.missing:
            refused.setdefault(finding.missing, []).append(call)
        else:
            findings[call] = finding
        if name == "bounds" and isinstance(form, Form) and not form.spec.needs_backward and form.page_size is None:
            why = refusal(subject, form._replace(spec=replace(form.spec, needs_backward=True)))
            refused.setdefault(f"without gradients: {why}", []).append(call)
    faults = "; ".join(f"{call}: {finding.fault}" for call, finding in findings.items() if finding.fault)
    worst = max((finding.use for finding in findings.values()), default=0.0)
    where = f"--backend {subject.backend} --framework {subject.framework} --device {subject.device}"
    return Entry(
        name,
        FAILED if faults else PASSED if findings else NOT_RUN,
        *subject,
        draws=len(findings),
        worst=round(worst, 3) if 0 < worst < float("inf") else None,
        seconds=round(monotonic() - began, 2),
        reason=faults,
        repeat=f"attn certify {where} --check {name}" if faults else "",
        refused=refused,
    )


def _finding(check: str, subject: Subject, form: Form) -> Finding:
    try:
        with catch_warnings():
            simplefilter("ignore", LayoutWarning)  # some sizes look like another layout
            finding = JUDGES[check](drawn(subject, form))
    except Exception as error:  # whatever a call raises although it was accepted is a fault
        finding = Finding(f"raised {type(error).__name__}: {' '.join(str(error).split())[:300]}")
    return finding._replace(fault=f"{finding.fault} ({form.spec})") if finding.fault else finding
