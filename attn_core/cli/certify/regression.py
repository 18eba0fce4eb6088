"""Compares two certificates: what passed and passes no more, and which versions changed in between."""

from __future__ import annotations

from typing import NamedTuple

from attn_core.backends.shared.device_kinds import kind_of
from attn_core.cli.certify.certificate import FAILED, NOT_RUN, PASSED, Certificate, Entry
from attn_core.errors import SpecError


class Comparison(NamedTuple):
    """What changed since an earlier certificate, as sentences.

    Attributes:
        regressions: checks that passed, and now fail or are no longer run.
        mended: checks that failed or did not run, and now pass.
        versions: packages, devices and seeds that changed.
    """

    regressions: tuple[str, ...]
    mended: tuple[str, ...]
    versions: tuple[str, ...]


def compare(before: Certificate, now: Certificate) -> Comparison:
    """Compares a run with an earlier one, as far as the run was meant to cover it.

    Raises:
        SpecError: if the earlier certificate is of another device.
    """
    if before.device != now.device:
        raise SpecError(f"--against: it is about {before.device}, this run about {now.device}; compare equal devices")
    found = {entry.key: entry for entry in now.entries}
    old = [entry for entry in before.entries if _in_scope(entry, now)]
    earlier = {entry.key: entry for entry in old}
    regressions = [_lost(entry, found.get(entry.key)) for entry in old if entry.result == PASSED]
    mended = [
        f"{_words(entry)}: passes now"
        for entry in now.entries
        if entry.result == PASSED and earlier.get(entry.key, entry).result != PASSED
    ]
    return Comparison(tuple(filter(None, regressions)), tuple(mended), tuple(_changes(before, now)))


def _in_scope(entry: Entry, now: Certificate) -> bool:
    if now.checks and entry.check not in now.checks:
        return False
    if entry.framework and entry.framework not in now.devices:
        # A run that was restricted to a framework; one that is no longer installed is a loss.
        return now.versions.get(entry.framework) is None
    return not now.backends or not entry.backend or entry.backend in now.backends


def _lost(before: Entry, now: Entry | None) -> str | None:
    if now is None:
        return f"{_words(before)}: passed, and is no longer run"
    if now.result == FAILED:
        return f"{_words(before)}: passed, and fails now: {now.reason}"
    if now.result == NOT_RUN:
        return f"{_words(before)}: passed, and is no longer run: {now.reason}"
    return None


def _words(entry: Entry) -> str:
    return f"{entry.check} of {entry.backend} in {entry.framework}" if entry.backend else entry.check


def _changes(before: Certificate, now: Certificate) -> list[str]:
    names = list(dict.fromkeys([*before.versions, *now.versions]))
    pairs = [(name, before.versions.get(name), now.versions.get(name)) for name in names]
    pairs += [("device", before.device_name, now.device_name), ("seed", str(before.seed), str(now.seed))]
    if kind_of(now.device) == "cpu":
        pairs.append(("CPU capability", before.cpu_capability, now.cpu_capability))
    return [f"{name}: {old or 'none'} -> {new or 'none'}" for name, old, new in pairs if old != new]
