"""Standing: what the certificate in the user's folder says about this machine now, for ``attn doctor``."""

from __future__ import annotations

from typing import NamedTuple

from attn_core.cli.certify.certificate import FAILED, NOT_RUN, PASSED, certificate_path, read
from attn_core.cli.frameworks import FRAMEWORKS
from attn_core.errors import SpecError
from attn_core.selection.tables import device_name


class Standing(NamedTuple):
    """The certificate of a device.

    Attributes:
        path: of the file; date: of the run; versions: of the packages then, without those that were missing.
        passed, failed, not_run: how many checks.
        changed: what is different now, such as ``"torch: 2.12.0 -> 2.13.0"``; empty if the certificate still holds.
        error: why the file cannot be read, or None. Then the other fields are empty.
    """

    path: str
    date: str = ""
    versions: dict[str, str] | None = None
    passed: int = 0
    failed: int = 0
    not_run: int = 0
    changed: tuple[str, ...] = ()
    error: str | None = None

    def __str__(self) -> str:
        if self.error is not None:
            return f"cannot be read: {self.error}"
        versions = self.versions or {}
        then = ", ".join(f"{name} {versions[name]}" for name in FRAMEWORKS if name in versions)
        counts = f"{self.date}: {self.passed} checks passed, {self.failed} failed, {self.not_run} not run, with {then}"
        since = f". Since then {'; '.join(self.changed)}: run attn certify again"
        return f"{counts}{since if self.changed else ', and nothing has changed since'}"


def standing_of(device: str, versions: dict[str, str | None]) -> Standing | None:
    """Returns the standing of the certificate of a device, or None if there is none. versions: installed packages."""
    path = None
    try:
        path = certificate_path(device)
        if not path.is_file():
            return None
        found = read(path)
    except (SpecError, OSError, RuntimeError) as error:  # a process without a home folder has no certificate
        return None if path is None else Standing(str(path), error=str(error).removeprefix(f"{path}: "))
    pairs = [(name, found.versions.get(name), versions.get(name)) for name in {**found.versions, **versions}]
    pairs.append(("device", found.device_name, device_name(device)))
    changed = tuple(f"{name}: {old or 'none'} -> {new or 'none'}" for name, old, new in pairs if old != new)
    present = {name: version for name, version in found.versions.items() if version is not None}
    passed, failed, not_run = (found.count(result) for result in (PASSED, FAILED, NOT_RUN))
    return Standing(str(path), found.date, present, passed, failed, not_run, changed)
