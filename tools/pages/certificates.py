"""The tables of docs/reference/certificates.md, from the certificates of this project's machines.

``attn certify --json benchmarks/results/certificate-NAME.json`` writes a certificate, ``benchmarks.report`` the page.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from attn_core.cli.certify.certificate import NOT_RUN, Certificate, Entry, read
from attn_core.cli.certify.known_rows import NAME
from attn_core.cli.certify.report import DASH, rows_of, worst_of

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks/results"


def certificates() -> dict[str, Certificate]:
    """Returns the certificates by the name of their file, such as ``"cpu"``."""
    files = sorted(RESULTS.glob("certificate-*.json"))
    return {file.stem.removeprefix("certificate-"): read(file) for file in files}


def render() -> str:
    """Returns a section for each certificate."""
    lines = [line for name, each in certificates().items() for line in _section(name, each)]
    return "\n".join(lines).rstrip()


def _section(name: str, certificate: Certificate) -> Iterator[str]:
    versions = (f"{package} {version}" for package, version in certificate.versions.items() if version is not None)
    instructions = f", {certificate.cpu_capability}" if certificate.device == "cpu" else ""
    yield f"## {certificate.device_name}\n"
    when = f"{certificate.date}, {certificate.device}{instructions}"
    yield f"{when}, seed {certificate.seed}, {certificate.seconds:.0f} s;"
    yield f"`certificate-{name}.json`.\n"
    yield from _table(certificate)
    yield f"\nPackages: {', '.join(versions)}.\n"
    known = [entry for entry in certificate.entries if entry.check == NAME]
    here = ", ".join(certificate.known_bad) or "none"
    yield from (f"Known-bad kernels: {each.draws} calls {each.result}; about kernels here: {here}.\n" for each in known)


def _table(certificate: Certificate) -> Iterator[str]:
    names, rows = rows_of(certificate)
    yield f"| backend | in | {' | '.join(names)} | worst |"
    yield f"|---|---|{'---|' * len(names)}---|"
    for (backend, framework), entries in rows.items():
        cells = " | ".join(_cell(entries.get(name)) for name in names)
        yield f"| `{backend}` | {framework} | {cells} | {worst_of(entries)} |"


def _cell(entry: Entry | None) -> str:
    if entry is None or entry.result == NOT_RUN:
        return DASH
    return f"**{entry.result}**" if entry.result != "passed" else str(entry.draws)
