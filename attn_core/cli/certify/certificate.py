"""Certificate: what one run proved, as a JSON object with a checksum. docs/how_to/certify.md describes each field."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from attn_core.errors import SpecError
from attn_core.selection.columns import wrapped
from attn_core.selection.tables import device_name, user_folder
from attn_core.selection.whole_file import make_folder, read_json, write_whole

FORMAT = 1
PASSED, FAILED, NOT_RUN = "passed", "failed", "not run"
Certificate = dict[str, Any]


class Entry(NamedTuple):
    """The result of one check of one backend in one framework, with the calls that the backend refuses by reason."""

    check: str
    result: str
    backend: str
    framework: str
    device: str
    draws: int = 0
    worst: float | None = None
    seconds: float = 0.0
    reason: str = ""
    repeat: str = ""
    refused: dict[str, list[str]] = {}  # noqa: RUF012 (never changed)


def user_path(device: str) -> Path:
    """Returns where ``attn certify`` writes the certificate of a device: the XDG configuration folder."""
    return user_folder() / f"certificate-{device}.json"


def write(certificate: Certificate, path: Path) -> None:
    """Writes a certificate in one step. Raises SpecError if the file cannot be written."""
    plain = {"format": FORMAT, **certificate}
    make_folder(path)
    write_whole(json.dumps(plain | {"checksum": _checksum(plain)}, indent=1) + "\n", path)


def _checksum(plain: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


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
