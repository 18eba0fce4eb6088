"""``attn support``: the tables of docs/reference/support.md, from what the backends declare."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from attn_core.cli.support_table import render


def support(
    write: Annotated[Path | None, typer.Option(help="Write the page there instead of printing it.")] = None,
    check: Annotated[Path | None, typer.Option(help="Exit with 1 when this file is not the current page.")] = None,
) -> None:
    """Show what every backend declares to support, forward and backward."""
    page = render()
    if check is not None:
        if not check.is_file() or check.read_text(encoding="utf-8") != page:
            typer.echo(f"attn: {check} is stale; run: attn support --write {check}", err=True)
            raise typer.Exit(1)
        typer.echo(f"{check} is current")
    elif write is not None:
        write.write_text(page, encoding="utf-8")
        typer.echo(f"written to {write}")
    else:
        typer.echo(page)
