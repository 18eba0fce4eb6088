"""The tables of docs/lab/certificates.md, from the certificates of this project's machines.

``attn certify --json benchmarks/results/certificate-NAME.json`` writes a certificate, ``benchmarks.report`` the page.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from attn_core.cli.certify.certificate import Certificate, read, table

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
    packages = ", ".join(f"{package} {version}" for package, version in certificate["versions"].items() if version)
    device = next(iter(certificate["devices"].values()))
    instructions = f", {certificate['cpu_capability']}" if device == "cpu" else ""
    yield f"## {certificate['device_name']}\n"
    yield f"{certificate['date']}, {device}{instructions}, {certificate['seconds']:.0f} s; `certificate-{name}.json`.\n"
    head, *rows = table(certificate)
    yield f"| {' | '.join(head)} |"
    yield "|---" * len(head) + "|"
    yield from (f"| `{backend}` | {' | '.join(cells)} |" for backend, *cells in rows)
    yield f"\nPackages: {packages}.\n"
    yield f"Known-bad kernels here: {', '.join(certificate['known_bad']) or 'none'}.\n"
