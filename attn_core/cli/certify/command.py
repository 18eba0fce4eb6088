"""``attn certify``."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from time import monotonic
from typing import Annotated

import typer
from rich.console import Console

from attn_core.backends.shared.device_kinds import kind_of
from attn_core.cli.certify import known_rows
from attn_core.cli.certify.certificate import FAILED, NOT_RUN, Certificate, Entry, certificate_path, read, write
from attn_core.cli.certify.checks import CHECKS
from attn_core.cli.certify.regression import compare
from attn_core.cli.certify.report import report
from attn_core.cli.certify.run import jobs_of, known_bad_entry, run_jobs
from attn_core.cli.certify.subject import Left, Subject, subjects_of
from attn_core.cli.complaint import complain
from attn_core.cli.devices import device_named
from attn_core.cli.frameworks import check_framework, devices_of, installed, versions
from attn_core.cli.progress import Stages
from attn_core.errors import SpecError
from attn_core.selection.tables import device_name
from attn_core.selection.whole_file import check_place

OTHERS = (
    Left("dropout", "each framework draws its own seed; `attn campaign` checks it"),
    Left("drop-ins, torch.compile, torch.export, jax.export, jax.vmap", "`attn campaign` runs them"),
    Left("several ranks", "`attn campaign` runs context parallelism on a CPU"),
    Left("forward mode and the largest logits", "only tests compare them with the reference"),
)
"""What no certificate is about."""
MINUTES = {"cpu": 3.0, "cuda": 8.0}
"""How long to run by default. On a GPU two backends compile for seconds before each draw, and run last."""


def certify(
    backend: Annotated[list[str] | None, typer.Option(help="Check this backend alone. Repeatable.")] = None,
    framework: Annotated[str | None, typer.Option(help="torch or jax. Default: all that are installed.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, or cuda (the GPU here). Default: the GPU, else cpu.")] = None,
    check: Annotated[list[str] | None, typer.Option(help="Run this check alone. Repeatable.")] = None,
    minutes: Annotated[
        float | None, typer.Option(min=0.01, help="How long to run. Default: 3 on a CPU, 8 on a GPU.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the calls.")] = 0,
    draw: Annotated[int | None, typer.Option(min=0, help="Run this draw alone, as a failed check prints it.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write the certificate here, not in the user's folder.")] = None,
    against: Annotated[Path | None, typer.Option(help="Compare with this earlier certificate.")] = None,
) -> None:
    """Prove in bounded time what the backends on this machine promise, and write a certificate.

    Exit code: 0 if every check that ran passed; 1 if none ran, if one failed, or if one passed in --against and no
    longer does; 2 for invalid options or files.
    """
    names, checks = tuple(backend or ()), tuple(check or ())
    part = bool(names or checks or framework or draw is not None)
    try:
        devices, outside = _devices(device, framework)
        _check_words(checks)
        subjects, left = subjects_of(devices, names)
        before = None if against is None else read(against)
        path = json if json is not None or part else certificate_path(next(iter(devices.values())))
        if path is not None:
            _check_folder(path)
        began = monotonic()
        minutes = MINUTES[kind_of(next(iter(devices.values())))] if minutes is None else minutes
        entries = _run(subjects, checks, seed, 60 * minutes, draw)
        certificate = Certificate(
            date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            seed=seed,
            minutes=minutes,
            seconds=round(monotonic() - began, 1),
            devices=devices,
            device_name=device_name(next(iter(devices.values()))) or "",
            cpu_capability=_cpu_capability(),
            versions=versions(),
            backends=names,
            checks=checks,
            entries=tuple(entries),
            known_bad=tuple(known_rows.met_here(subjects)),
            not_run=(*outside, *left, *OTHERS),
        )
        compared = None if before is None else compare(before, certificate)
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            write(certificate, path)
    except SpecError as error:
        complain(error)
        raise typer.Exit(2) from None
    for line in report(certificate, compared):
        typer.echo(line)
    typer.echo(f"wrote {path}" if path is not None else "nothing was written, because this is a part; see --json")
    nothing = certificate.count(NOT_RUN) == len(certificate.entries)
    if nothing or certificate.count(FAILED) or (compared is not None and compared.regressions):
        raise typer.Exit(1)


def _check_words(checks: tuple[str, ...]) -> None:
    known = (*CHECKS, known_rows.NAME)
    for name in checks:
        if name not in known:
            raise SpecError(f"--check={name!r}: expected one of {', '.join(known)}")


def _check_folder(path: Path) -> None:
    # The folder is made after the run, so that an interrupted run leaves none behind.
    check_place(next(folder for folder in path.absolute().parents if folder.exists()) / path.name)


KINDS = ("cpu", "cuda")
"""The kinds of device on which the entry points of a campaign run."""


def _devices(requested: str | None, framework: str | None) -> tuple[dict[str, str], list[Left]]:
    """Returns the device of each framework, and what is left out: the requested one, else the GPU, else the CPU."""
    if framework is not None:
        check_framework(framework)
    names = [name for name in installed() if framework in (None, name)]
    if not names:
        raise SpecError(f"--framework={framework}: not installed" if framework else "install torch or jax first")
    everything = {name: devices_of(name) for name in names}
    here = {name: [each for each in found if kind_of(each) in KINDS] for name, found in everything.items()}
    other = dict.fromkeys(each for found in everything.values() for each in found if kind_of(each) not in KINDS)
    left = [Left(device, "a certificate is about CPUs and NVIDIA GPUs") for device in other]
    if requested is None:
        device = next((found[-1] for found in here.values() if found[-1] != "cpu"), "cpu")
    else:
        device = device_named(requested, next((name for name in names if len(here[name]) > 1), names[0]))
    devices = {name: device for name in names if device in here[name]}
    if not devices:
        raise SpecError(f"--device={requested}: expected cpu or an NVIDIA GPU of this machine")
    return devices, left + [Left(name, f"sees no {device} here") for name in names if name not in devices]


def _cpu_capability() -> str:
    if "torch" not in installed():
        return ""
    import torch

    return str(torch.backends.cpu.get_cpu_capability())  # type: ignore[no-untyped-call]


def _run(subjects: list[Subject], checks: tuple[str, ...], seed: int, seconds: float, draw: int | None) -> list[Entry]:
    jobs = jobs_of(subjects, checks) if checks != (known_rows.NAME,) else []
    entries: list[Entry] = []
    # Progress goes to stderr, so that stdout has only the result.
    with Stages(Console(stderr=True)) as stages, stages.stage("checking", len(jobs), seconds) as advance:
        for entry in run_jobs(jobs, seed, seconds, draw):
            entries.append(entry)
            if entry.result == FAILED:
                stages.log(f"[red]failed[/red]: {entry.check} of {entry.backend} in {entry.framework}")
            advance()
    if not checks or known_rows.NAME in checks:
        entries.append(known_bad_entry())
    return entries
