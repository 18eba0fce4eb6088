"""``attn certify`` and its certificate: what one run proved, as a JSON object with a checksum.

docs/how_to/certify.md describes each field.
"""

from __future__ import annotations

import hashlib
import json as json_text
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic
from typing import Annotated, Any

import typer

from attn_core import backends
from attn_core.cli.certify.calls import CHECKS, Subject, calls_of, faults_of, subjects_on
from attn_core.cli.certify.checks import FAILED, NOT_RUN, PASSED, Entry, entry_of
from attn_core.cli.devices import FRAMEWORKS, devices_here, installed, versions
from attn_core.errors import SpecError
from attn_core.selection.choice import wrapped
from attn_core.selection.tables import device_name, user_folder
from attn_core.selection.whole_file import check_place, read_json, write_whole

FORMAT = 1
Certificate = dict[str, Any]


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
    path = json or (None if names or checks or framework else user_path(next(iter(devices.values()))))
    if path is not None:
        check_place(path, with_folder=True)
    found = _certificate(devices, names, checks)
    if path is not None:
        write(found, path)
    for line in report(found):
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


# The file


def user_path(device: str) -> Path:
    """Returns where ``attn certify`` writes the certificate of a device: the XDG configuration folder."""
    return user_folder() / f"certificate-{device}.json"


def write(certificate: Certificate, path: Path) -> None:
    """Writes a certificate in one step. Raises SpecError if the file cannot be written."""
    plain = {"format": FORMAT, **certificate}
    write_whole(json_text.dumps(plain | {"checksum": _checksum(plain)}, indent=1) + "\n", path, with_folder=True)


def _checksum(plain: dict[str, Any]) -> str:
    return hashlib.sha256(json_text.dumps(plain, sort_keys=True).encode()).hexdigest()


def read(path: Path) -> Certificate:
    """Returns the certificate in a file.

    Raises:
        SpecError: if the file cannot be read, is no certificate, has another format, or was changed since.
    """
    raw = read_json(path)
    if not isinstance(raw, dict) or "format" not in raw:
        raise SpecError(f"{path}: expected a file written by `attn certify`")
    if type(raw["format"]) is not int or raw["format"] != FORMAT:
        raise SpecError(f"{path}: format={raw['format']!r}: expected {FORMAT}; write a new certificate")
    if raw.pop("checksum", None) != _checksum(raw):
        raise SpecError(f"{path}: checksum: the content was changed after it was written; write a new certificate")
    del raw["format"]
    return raw


def count(certificate: Certificate, result: str) -> int:
    """Returns how many checks have a result."""
    return sum(entry["result"] == result for entry in certificate["entries"])


def standing_of(device: str, versions: dict[str, str | None]) -> str | None:
    """Returns what the certificate of a device says, and what has changed since, or None if there is none."""
    try:
        path = user_path(device)
        if not path.is_file():
            return None
        found = read(path)
    except (SpecError, OSError, RuntimeError) as error:  # a process without a home folder has no certificate
        return f"cannot be read: {error}"
    then = found["versions"] | {"device": found["device_name"]}
    now = versions | {"device": device_name(device)}
    changed = [f"{name}: {then.get(name)} -> {now.get(name)}" for name in then | now if then.get(name) != now.get(name)]
    since = f"since then {'; '.join(changed)}: run attn certify again" if changed else "nothing has changed since"
    return f"{found['date']}: {count(found, PASSED)} checks passed, {count(found, FAILED)} failed; {since}"


# What the command prints


def table(certificate: Certificate) -> list[list[str]]:
    """Returns a head, and a row for each backend in a framework: how many calls passed each check, and the largest
    error as a part of its bound. A dash is a check that did not run."""
    ran = [entry for entry in certificate["entries"] if entry["backend"] and entry["result"] != NOT_RUN]
    checks = list(dict.fromkeys(entry["check"] for entry in ran))
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for entry in ran:
        rows.setdefault((entry["backend"], entry["framework"]), {})[entry["check"]] = entry
    lines = [["backend", "in", *checks, "worst"]] if rows else []
    for names, entries in rows.items():
        cells = {name: "FAILED" if each["result"] == FAILED else str(each["draws"]) for name, each in entries.items()}
        errors = [entry["worst"] for entry in entries.values() if entry["worst"] is not None]
        lines.append([*names, *(cells.get(name, "-") for name in checks), f"{max(errors):.2f}" if errors else "-"])
    return lines


def report(certificate: Certificate) -> Iterator[str]:
    """Yields the text of ``attn certify``: the table, what failed and how to repeat it, and what did not run."""
    entries = certificate["entries"]
    failed, passed = count(certificate, FAILED), count(certificate, PASSED)
    verdict = (
        f"FAILED: {failed} of {failed + passed} checks." if failed else f"OK: all {passed} checks that ran passed."
    )
    versions, devices = certificate["versions"], certificate["devices"].items()
    used = " and ".join(f"{name} {versions[name]} on {device}" for name, device in devices)
    spent = f"{certificate['seconds']:.0f} s, {certificate['date']}"
    yield wrapped(f"{verdict if failed + passed else 'NOTHING RAN.'} {used} ({certificate['device_name']}), {spent}.")
    rows = table(certificate)
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        yield " ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip()
    missing: dict[str, list[str]] = {}
    for entry in entries:
        name = f"{entry['check']} of {entry['backend']} in {entry['framework']}"
        if entry["result"] == FAILED:
            yield from ("", wrapped(f"{name} failed: {entry['reason']}"), f"  {entry['repeat']}", "")
        for why, calls in entry["refused"].items():
            missing.setdefault(why, []).append(f"{', '.join(calls)}: {name}")
    yield wrapped(f"Known-bad kernels here: {', '.join(certificate['known_bad']) or 'none'}.")
    for left in certificate["not_run"]:
        missing.setdefault(left["why"], []).append(left["what"])
    yield "Not run:"
    for why, names in missing.items():
        yield wrapped(f"{why} ({', '.join(names)})", "  ", "    ")
