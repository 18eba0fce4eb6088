"""Certificate: what one run proved, as one JSON file that a later run compares with.

The file has a format number and a checksum. Reading validates every field, and gives one error for the first that is
wrong. Nothing in a file is run: a command in it is text to print.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from attn_core.cli.certify.subject import Left
from attn_core.errors import SpecError
from attn_core.selection.tables import user_folder
from attn_core.selection.whole_file import read_json, write_whole

FORMAT = 1
PASSED, FAILED, NOT_RUN = "passed", "failed", "not run"
RESULTS = (PASSED, FAILED, NOT_RUN)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """The result of one check of one backend in one framework.

    Attributes:
        check: its name.
        backend, framework, device: the subject; all empty for a check of selection alone.
        result: "passed", "failed" or "not run".
        draws: the calls that ran; planned: the calls that would have run with enough time.
        gradients: how many of the draws had gradients.
        worst: the largest error as a part of its bound; null if the check compares bits.
        seconds: how long it took.
        reason: why it did not run, or what was wrong; empty if it passed.
        repeat: the command that runs the failed draw again; empty if none failed.
    """

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

    @property
    def key(self) -> tuple[str, str, str]:
        """What identifies the entry in another certificate."""
        return self.check, self.backend, self.framework


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """The results of one run.

    Attributes:
        date: in UTC; seed: of the draws; minutes: the time allowed; seconds: the time taken.
        devices: the device of each framework, such as ``{"torch": "sm90", "jax": "sm90"}``.
        device_name: the name of the processor or GPU.
        cpu_capability: the instructions that torch uses on the CPU, such as "AVX512"; empty without torch.
        versions: of the packages; null if not installed.
        backends: the backends that the run was restricted to; empty for all.
        checks: the checks that the run was restricted to; empty for all.
        entries: the results.
        known_bad: the rows of known-bad kernels that are about kernels installed here.
        not_run: what the certificate says nothing about, with reasons.
    """

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
    try:
        certificate = _certificate(raw)
    except SpecError as error:
        raise SpecError(f"{path}: {error}") from None
    if raw["checksum"] != _checksum({name: value for name, value in raw.items() if name != "checksum"}):
        raise SpecError(f"{path}: checksum: the content was changed after it was written; write a new certificate")
    return certificate


NUMBER = (int, float)
TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("date", "device_name", "cpu_capability", "checksum"), (str,)),
    **dict.fromkeys(("seed", "format"), (int,)),
    **dict.fromkeys(("minutes", "seconds"), NUMBER),
    **dict.fromkeys(("devices", "versions"), (dict,)),
    **dict.fromkeys(("backends", "checks", "entries", "known_bad", "not_run"), (list,)),
}
"""The JSON types of a certificate's fields."""
ENTRY_TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("check", "backend", "framework", "device", "result", "reason", "repeat"), (str,)),
    **dict.fromkeys(("draws", "planned", "gradients"), (int,)),
    **{"worst": (*NUMBER, type(None)), "seconds": NUMBER},
}
ITEMS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("devices", "backends", "checks", "known_bad"), (str,)),
    "versions": (str, type(None)),
}
"""The types of the items of a certificate's lists and objects."""


def _certificate(raw: dict[str, Any]) -> Certificate:
    _check_fields("", raw, TYPES)
    for name, kinds in ITEMS.items():
        items = raw[name].values() if isinstance(raw[name], dict) else raw[name]
        for item in items:
            _check_type(f"{name}: an item", item, kinds)
    if not raw["devices"]:
        raise SpecError("devices: expected the device of at least one framework")
    entries = tuple(_entry(f"entries[{number}]", each) for number, each in enumerate(raw["entries"]))
    for number, each in enumerate(raw["not_run"]):
        _check_fields(f"not_run[{number}]", each, {"what": (str,), "why": (str,)})
    plain = {field.name: raw[field.name] for field in fields(Certificate)}
    lists = {name: tuple(raw[name]) for name in ("backends", "checks", "known_bad")}
    left = tuple(Left(**each) for each in raw["not_run"])
    return Certificate(**plain | lists | {"entries": entries, "not_run": left})


def _entry(where: str, raw: Any) -> Entry:
    _check_fields(where, raw, ENTRY_TYPES)
    if raw["result"] not in RESULTS:
        raise SpecError(f"{where}: result={raw['result']!r}: expected one of {', '.join(RESULTS)}")
    return Entry(**raw)


def _check_fields(where: str, raw: Any, types: dict[str, tuple[type, ...]]) -> None:
    dot = f"{where}: " if where else ""
    if not isinstance(raw, dict):
        raise SpecError(f"{where}: expected an object, got {type(raw).__name__}")
    if (missing := types.keys() - raw.keys()) or (unknown := raw.keys() - types.keys()):
        name = min(missing or unknown)
        raise SpecError(f"{dot}{name}: {'missing' if missing else 'unknown field'}; expected {', '.join(types)}")
    for name, kinds in types.items():
        _check_type(f"{dot}{name}", raw[name], kinds)


def _check_type(name: str, value: Any, kinds: tuple[type, ...]) -> None:
    if not isinstance(value, kinds) or isinstance(value, bool):
        expected = " or ".join("null" if kind is type(None) else kind.__name__ for kind in kinds)
        raise SpecError(f"{name}: expected {expected}, got {type(value).__name__}")
    if isinstance(value, float) and value != value:
        raise SpecError(f"{name}: expected a number, got NaN")
