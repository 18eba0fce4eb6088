"""Certificate: what one run proved, as one JSON file with a checksum. Nothing in a file is run."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from attn_core.cli.certify.subject import Left
from attn_core.errors import SpecError
from attn_core.selection.tables import user_folder
from attn_core.selection.whole_file import read_json, write_whole

FORMAT = 1
PASSED, FAILED, NOT_RUN = "passed", "failed", "not run"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """The result of one check of one backend in one framework; docs/how_to/certify.md describes each field."""

    check: str
    backend: str = ""
    framework: str = ""
    device: str = ""
    result: str
    draws: int = 0
    planned: int = 0
    gradients: int = 0
    worst: float | None = None
    seconds: float = 0.0
    reason: str = ""
    repeat: str = ""


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """The results of one run; docs/how_to/certify.md describes each field."""

    date: str
    seed: int
    minutes: float
    seconds: float
    devices: dict[str, str]
    device_name: str
    cpu_capability: str
    versions: dict[str, str | None]
    backends: tuple[str, ...]
    checks: tuple[str, ...]
    entries: tuple[Entry, ...]
    known_bad: tuple[str, ...]
    not_run: tuple[Left, ...]

    def count(self, result: str) -> int:
        """Returns how many entries have a result."""
        return sum(entry.result == result for entry in self.entries)

    @property
    def device(self) -> str:
        """The device, the same in all frameworks."""
        return next(iter(self.devices.values()))


def certificate_path(device: str) -> Path:
    """Returns where ``attn certify`` writes the certificate of a device: the XDG configuration folder."""
    return user_folder() / f"certificate-{device}.json"


def write(certificate: Certificate, path: Path) -> None:
    """Writes a certificate in one step. Raises SpecError if the file cannot be written."""
    plain = {"format": FORMAT, **asdict(certificate)}
    plain["not_run"] = [left._asdict() for left in certificate.not_run]
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
    try:
        raw |= {name: tuple(raw[name]) for name in ("backends", "checks", "known_bad")}
        raw["entries"] = tuple(Entry(**entry) for entry in raw["entries"])
        return Certificate(**raw | {"not_run": tuple(Left(**left) for left in raw["not_run"])})
    except (KeyError, TypeError) as error:
        raise SpecError(f"{path}: {error}: expected the fields that `attn certify` writes") from None
