"""``attn certify``."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic
from typing import Annotated, Any
from warnings import catch_warnings, simplefilter

import typer

from attn_core.backends.shared import known_bad
from attn_core.cli.certify import known_rows
from attn_core.cli.certify.calls import Form, accepted, trial_of
from attn_core.cli.certify.certificate import FAILED, NOT_RUN, PASSED, Certificate, Entry, certificate_path, write
from attn_core.cli.certify.checks import CHECKS, Check, Finding, excluded
from attn_core.cli.certify.report import report
from attn_core.cli.certify.subject import Left, Subject, subjects_of
from attn_core.cli.complaint import complain
from attn_core.cli.devices import device_named
from attn_core.cli.frameworks import check_framework, devices_of, installed, versions
from attn_core.errors import LayoutWarning, SpecError
from attn_core.selection.tables import device_name
from attn_core.selection.whole_file import check_place

OTHERS = (
    Left("dropout", "each framework draws its own seed"),
    Left("drop-ins, compiled and exported programs, several ranks, forward mode", "the tests of the project run them"),
)
"""What no certificate is about."""


def certify(
    backend: Annotated[list[str] | None, typer.Option(help="Check this backend alone. Repeatable.")] = None,
    framework: Annotated[str | None, typer.Option(help="torch or jax. Default: all that are installed.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, or cuda (the GPU here). Default: the GPU, else cpu.")] = None,
    check: Annotated[list[str] | None, typer.Option(help="Run this check alone. Repeatable.")] = None,
    minutes: Annotated[float, typer.Option(min=0.01, help="Start no call after this time.")] = 30.0,
    json: Annotated[Path | None, typer.Option(help="Write the certificate here, not in the user's folder.")] = None,
) -> None:
    """Prove what the backends on this machine promise by a stored list of calls, and write a certificate.

    Exit code: 0 if every check that ran passed; 1 if none ran or one failed; 2 for invalid options or files.
    """
    names, checks, began = tuple(backend or ()), tuple(check or ()), monotonic()
    try:
        devices = _devices(device, framework)
        for name in checks:
            if name not in (*CHECKS, known_rows.NAME):
                raise SpecError(f"--check={name!r}: expected one of {', '.join([*CHECKS, known_rows.NAME])}")
        subjects, left = subjects_of(devices, names)
        path = json or (None if names or checks or framework else certificate_path(next(iter(devices.values()))))
        if path is not None:
            check_place(next(folder for folder in path.absolute().parents if folder.exists()) / path.name)
        entries = list(_entries(subjects, checks, began + 60 * minutes, left))
        certificate = Certificate(
            date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            seed=0,
            minutes=minutes,
            seconds=round(monotonic() - began, 1),
            devices=devices,
            device_name=device_name(next(iter(devices.values()))) or "",
            cpu_capability=_cpu_capability(),
            versions=versions(),
            backends=names,
            checks=checks,
            entries=tuple(entries),
            known_bad=tuple(_known_bad_here(subjects)),
            not_run=(*left, *OTHERS),
        )
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            write(certificate, path)
    except SpecError as error:
        complain(error)
        raise typer.Exit(2) from None
    for line in report(certificate):
        typer.echo(line)
    typer.echo(f"wrote {path}" if path is not None else "nothing was written, because this is a part; see --json")
    if certificate.count(FAILED) or not certificate.count(PASSED):
        raise typer.Exit(1)


def _devices(requested: str | None, framework: str | None) -> dict[str, str]:
    """Returns the device of each framework that has it: the requested one, else the GPU, else the CPU."""
    if framework is not None:
        check_framework(framework)
    here = {name: devices_of(name) for name in installed() if framework in (None, name)}
    if not here:
        raise SpecError(f"--framework={framework}: not installed" if framework else "install torch or jax first")
    best = max(here, key=lambda name: len(here[name]) > 1)
    device = here[best][-1] if requested is None else device_named(requested, best)
    devices = {name: device for name, found in here.items() if device in found}
    if not devices:
        raise SpecError(f"--device={requested}: expected a device of this machine")
    return devices


def _cpu_capability() -> str:
    if "torch" not in installed():
        return ""
    import torch

    return str(torch.backends.cpu.get_cpu_capability())  # type: ignore[no-untyped-call]


def _entries(subjects: list[Subject], checks: tuple[str, ...], ends: float, left: list[Left]) -> Iterator[Entry]:
    """Runs the checks of each subject, and adds what a backend does not take to ``left``."""
    for subject in subjects:
        for name in CHECKS:
            if (not checks or name in checks) and excluded(name, subject) != "":
                typer.echo(f"{name} of {subject}", err=True)  # so that stdout has only the result
                yield entry_of(name, subject, ends, left)
    if not checks or known_rows.NAME in checks:
        calls = known_rows.refused_calls()
        faults = [fault for fault in (known_rows.fault_of(*call) for call in calls) if fault]
        yield Entry(
            check=known_rows.NAME,
            result=FAILED if faults else PASSED,
            draws=len(calls),
            planned=len(calls),
            reason="; ".join(faults[:3]),
            repeat=f"attn certify --check {known_rows.NAME}" if faults else "",
        )


def entry_of(name: str, subject: Subject, ends: float, left: list[Left]) -> Entry:
    """Runs one check of one subject: every call that the backend takes, until the time ends."""
    check, began, subject_of = CHECKS[name], monotonic(), dict(zip(("backend", "framework", "device"), subject))
    entry: dict[str, Any] = {"check": name, **subject_of}
    if why := excluded(name, subject):
        left.append(Left(f"{name} of {subject}", why))
        return Entry(**entry, result=NOT_RUN, reason=why)
    forms = {call: accepted(subject, fields | check.asks_of(subject)) for call, fields in check.calls.items()}
    left += _refused(name, subject, forms)
    taken = {call: form for call, form in forms.items() if isinstance(form, Form)}
    findings: dict[str, Finding] = {}
    for call, form in taken.items():
        if monotonic() < ends:
            findings[call] = _finding(check, subject, form)
    worst = max((finding.use for finding in findings.values()), default=0.0)
    faults = [f"{call}: {finding.fault} ({taken[call].spec})" for call, finding in findings.items() if finding.fault]
    entry |= {"draws": len(findings), "planned": len(taken), "seconds": round(monotonic() - began, 2)}
    entry |= {"gradients": sum(taken[call].spec.needs_backward for call in findings)}
    entry |= {"worst": round(worst, 3) if 0 < worst < float("inf") else None}
    if faults:
        where = f"--backend {subject.backend} --framework {subject.framework} --device {subject.device}"
        return Entry(**entry, result=FAILED, reason="; ".join(faults), repeat=f"attn certify {where} --check {name}")
    if not findings:
        return Entry(**entry, result=NOT_RUN, reason="no time was left; see --minutes" if taken else "takes no call")
    return Entry(**entry, result=PASSED)


def _refused(name: str, subject: Subject, forms: dict[str, Form | str]) -> list[Left]:
    """Returns what a backend does not take, one line for each reason; gradients with the bounds alone."""
    reasons: dict[str, list[str]] = {}
    for call, form in forms.items():
        if isinstance(form, str):
            reasons.setdefault(form, []).append(call)
        elif form.lost and name == "bounds":
            reasons.setdefault(f"without gradients: {form.lost}", []).append(call)
    return [Left(f"{', '.join(calls)}: {name} of {subject}", why) for why, calls in reasons.items()]


def _finding(check: Check, subject: Subject, form: Form) -> Finding:
    try:
        with catch_warnings():
            simplefilter("ignore", LayoutWarning)  # some sizes look like another layout
            return check.judge(subject, form, trial_of(form))
    except Exception as error:  # whatever a call raises although it was accepted is a fault
        return Finding(f"raised {type(error).__name__}: {' '.join(str(error).split())[:300]}")


def _known_bad_here(subjects: list[Subject]) -> Iterator[str]:
    """Yields the rows that are about kernels installed here, as ``"cudnn-nan-dq: sdpa_cudnn on sm90"``."""
    for backend, device in dict.fromkeys((subject.backend, subject.device) for subject in subjects):
        build = next(each for each in subjects if each.backend == backend).target.build(backend)
        for row in known_bad.rows_about(backend, device, () if build is None else build.version):
            yield f"{row.name}: {backend} on {device}"
