"""The text of ``attn certify``: a table of checks by backend, what failed and how to repeat it, what did not run."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from attn_core.cli.certify.certificate import FAILED, NOT_RUN, Certificate, Entry
from attn_core.cli.certify.checks import CHECKS
from attn_core.cli.certify.known_rows import NAME

DASH = "-"


def report(certificate: Certificate) -> Iterator[str]:
    """Yields the lines of the report, not wider than 80 columns unless a single word is."""
    failed, checked = certificate.count(FAILED), len(certificate.entries) - certificate.count(NOT_RUN)
    verdict = f"FAILED: {failed} of {checked} checks." if failed else f"OK: all {checked} checks that ran passed."
    used = [f"{name} {certificate.versions.get(name)} on {device}" for name, device in certificate.devices.items()]
    machine = f"{' and '.join(used)} ({certificate.device_name}), {certificate.seconds:.0f} s, {certificate.date}."
    yield from _wrapped(f"{verdict if checked else 'NOTHING RAN.'} {machine}")
    yield from _table(certificate)
    for entry in (entry for entry in certificate.entries if entry.result == FAILED):
        name = f"{entry.check} of {entry.backend} in {entry.framework}" if entry.backend else entry.check
        yield from ("", *_wrapped(f"{name} failed: {entry.reason}"), f"  {entry.repeat}")
    yield from ("", "Not run:")
    groups: dict[str, list[str]] = {}
    for what, why in certificate.not_run:
        groups.setdefault(why, []).append(what)
    for why, names in groups.items():
        yield from _wrapped(f"{why} ({', '.join(names)})", "  ")


def rows_of(certificate: Certificate) -> tuple[list[str], dict[tuple[str, str], dict[str, Entry]]]:
    """Returns the checks that ran, and the entries of each (backend, framework) by their checks."""
    ran = {entry.check for entry in certificate.entries if entry.result != NOT_RUN}
    rows: dict[tuple[str, str], dict[str, Entry]] = {}
    for entry in certificate.entries:
        rows.setdefault((entry.backend, entry.framework), {})[entry.check] = entry
    rows.pop(("", ""), None)
    return [name for name in CHECKS if name in ran], rows


def worst_of(entries: dict[str, Entry]) -> str:
    """Returns the largest error of a row as a part of its bound, or a dash if no error was measured."""
    errors = [entry.worst for entry in entries.values() if entry.worst is not None]
    return f"{max(errors):.2f}" if errors else DASH


def _table(certificate: Certificate) -> Iterator[str]:
    """Yields a row for each subject: in each column the calls that passed, a dash if none ran, or FAILED."""
    names, rows = rows_of(certificate)
    wide = max((len(f"{backend} in {framework}") for backend, framework in rows), default=0)
    lines = [["backend", *names, "worst"]] if rows else []
    for (backend, framework), entries in rows.items():
        lines.append([f"{backend} in {framework}", *(_cell(entries.get(name)) for name in names), worst_of(entries)])
    for first, *cells in lines:
        yield first.ljust(wide) + "".join(cell.rjust(max(7, len(name) + 1)) for cell, name in zip(cells, [*names, ""]))
    for entry in certificate.entries:
        if entry.check == NAME and entry.result != FAILED:
            here = ", ".join(certificate.known_bad) or "none"
            yield from _wrapped(f"Known-bad kernels: {entry.draws} calls refused as they must be. Here: {here}.")


def _cell(entry: Entry | None) -> str:
    if entry is None or entry.result == NOT_RUN:
        return DASH
    return "FAILED" if entry.result == FAILED else str(entry.draws)


def _wrapped(text: str, first: str = "") -> list[str]:
    later = f"{first}  " if first else ""
    return textwrap.wrap(
        text, 80, initial_indent=first, subsequent_indent=later, break_long_words=False, break_on_hyphens=False
    )
