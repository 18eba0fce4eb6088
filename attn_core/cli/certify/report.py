"""The text of ``attn certify``: a table of checks by backend, what failed and how to repeat it, what did not run."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from attn_core.cli.certify.certificate import FAILED, NOT_RUN, Certificate, Entry
from attn_core.cli.certify.checks import CHECKS
from attn_core.cli.certify.known_rows import NAME
from attn_core.cli.certify.regression import Comparison

WIDTH = 80
SPOKEN = {"torch": "torch", "jax": "JAX"}
DASH = "-"


def report(certificate: Certificate, compared: Comparison | None) -> Iterator[str]:
    """Yields the lines of the report, not wider than WIDTH unless a single word is."""
    failed = certificate.count(FAILED)
    checked = len(certificate.entries) - certificate.count(NOT_RUN)
    verdict = f"FAILED: {failed} of {checked} checks." if failed else f"OK: all {checked} checks that ran passed."
    verdict = verdict if checked else "NOTHING RAN."
    yield from _wrapped(f"{verdict} {_machine(certificate)}")
    yield ""
    yield from _table(certificate)
    yield from _known(certificate)
    for entry in (entry for entry in certificate.entries if entry.result == FAILED):
        yield ""
        yield from _wrapped(f"{_words(entry)} failed: {entry.reason}")
        yield f"  {entry.repeat}"
    yield from _not_run(certificate)
    if compared is not None:
        yield from _comparison(compared)


def _machine(certificate: Certificate) -> str:
    used = [
        f"{SPOKEN[name]} {certificate.versions.get(name)} on {device}" for name, device in certificate.devices.items()
    ]
    name = f"{certificate.device_name}, {certificate.cpu_capability}".strip(", ")
    return f"{' and '.join(used)} ({name}), seed {certificate.seed}, {certificate.seconds:.0f} s, {certificate.date}."


def rows_of(certificate: Certificate) -> tuple[list[str], dict[tuple[str, str], dict[str, Entry]]]:
    """Returns the checks that ran, and the entries of each (backend, framework) by their checks."""
    ran = {entry.check for entry in certificate.entries if entry.result != NOT_RUN}
    rows: dict[tuple[str, str], dict[str, Entry]] = {}
    for entry in certificate.entries:
        if entry.backend:
            rows.setdefault((entry.backend, entry.framework), {})[entry.check] = entry
    return [name for name in CHECKS if name in ran], rows


def worst_of(entries: dict[str, Entry]) -> str:
    """Returns the largest error of a row as a part of its bound, or a dash if no error was measured."""
    errors = [entry.worst for entry in entries.values() if entry.worst is not None]
    return f"{max(errors):.2f}" if errors else DASH


def _table(certificate: Certificate) -> Iterator[str]:
    """Yields a row for each subject: in each column the draws that ran, a dash if none did, or FAILED."""
    names, rows = rows_of(certificate)
    if not rows:
        return
    wide = max(len("backend"), *(len(backend) for backend, _ in rows))
    columns = [max(6, len(name)) for name in names]
    titles = "".join(f" {name:>{width}}" for name, width in zip(names, columns))
    yield f"{'backend':<{wide}} in   {titles}  worst"
    for (backend, framework), entries in rows.items():
        cells = "".join(f" {_cell(entries.get(name)):>{width}}" for name, width in zip(names, columns))
        yield f"{backend:<{wide}} {SPOKEN[framework]:<5}{cells}  {worst_of(entries):>5}"
    yield from _wrapped("The numbers are calls; worst is the largest error as a part of its bound.", "  ")


def _cell(entry: Entry | None) -> str:
    if entry is None or entry.result == NOT_RUN:
        return DASH
    return "FAILED" if entry.result == FAILED else str(entry.draws)


def _known(certificate: Certificate) -> Iterator[str]:
    for entry in certificate.entries:
        if entry.check == NAME and entry.result != FAILED:
            here = ", ".join(certificate.known_bad) or "none"
            yield from _wrapped(f"Known-bad kernels: {entry.draws} calls refused as they must be. Here: {here}.")


def _not_run(certificate: Certificate) -> Iterator[str]:
    """Yields each reason with the backends that it keeps from a check; one line for both frameworks."""
    groups: dict[str, dict[str, list[str]]] = {}
    for entry in (entry for entry in certificate.entries if entry.result == NOT_RUN):
        found = groups.setdefault(f"{entry.check}: {entry.reason}", {})
        found.setdefault(entry.backend, []).append(entry.framework)
    for what, why in certificate.not_run:
        name, _, framework = what.partition(" in ")
        groups.setdefault(why, {}).setdefault(name, []).extend([framework] if framework else [])
    if groups:
        yield from ("", "Not run:")
    for why, subjects in groups.items():
        names = [_in(name, frameworks, certificate) for name, frameworks in subjects.items()]
        yield from _wrapped(f"{why} ({', '.join(names)})", "  ", "    ")


def _in(name: str, frameworks: list[str], certificate: Certificate) -> str:
    everywhere = not frameworks or len(frameworks) == len(certificate.devices)
    return name if everywhere else f"{name} in {' and '.join(SPOKEN[each] for each in frameworks)}"


def _comparison(compared: Comparison) -> Iterator[str]:
    yield ""
    changed = "; ".join(compared.versions) or "nothing"
    yield from _wrapped(f"Changed since the earlier certificate: {changed}.")
    for title, lines in (("Worse", compared.regressions), ("Better", compared.mended)):
        for line in lines:
            yield from _wrapped(f"{title}: {line}", "  ", "    ")
    if not compared.regressions:
        yield "  No check that passed then fails or is missing now."


def _words(entry: Entry) -> str:
    return f"{entry.check} of {entry.backend} in {SPOKEN[entry.framework]}" if entry.backend else entry.check


def _wrapped(text: str, first: str = "", later: str = "") -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent=first, subsequent_indent=later, break_long_words=False, break_on_hyphens=False
    )
