"""``attn doctor``: says whether attention is right on this machine, what is wrong, and what to install next."""

from __future__ import annotations

import json as json_text
from typing import Annotated

import typer
from rich.console import Console

from attn_core.cli.doctor_report import report
from attn_core.cli.findings import examine


def doctor(
    json: Annotated[bool, typer.Option("--json", help="Print JSON, for scripts and bug reports.")] = False,
    everything: Annotated[
        bool, typer.Option("--all", help="Also print every backend that does not run here, with the reason.")
    ] = False,
) -> None:
    """Say whether attention is right on this machine, what is wrong, and what to install next.

    Runs a small call on every available backend and compares it with the float64 reference.

    Exit code: 0 if at least one backend runs, all were right, and every installed package works; 1 otherwise.
    """
    findings = examine(Console(stderr=True, quiet=json))
    if json:
        typer.echo(json_text.dumps(findings.as_json(), indent=2))
    else:
        for line in report(findings, everything):
            typer.echo(line)
    if not findings.healthy:
        raise typer.Exit(1)
