"""``attn support``: prints the tables of two pages of docs/reference from the backends' claims."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from attn_core.cli import device_table, support_table


def support(
    devices: Annotated[
        bool, typer.Option("--devices", help="The page of GPUs: which kernels run on each, and what to install.")
    ] = False,
    write: Annotated[Path | None, typer.Option(help="Write the page to this file instead of printing it.")] = None,
    check: Annotated[Path | None, typer.Option(help="Exit with code 1 if this file is not the current page.")] = None,
) -> None:
    """Print what every backend supports, forward and backward, as Markdown tables."""
    page = (device_table if devices else support_table).render()
    if check is not None:
        # A missing page is out of date as well.
        if not check.is_file() or check.read_text(encoding="utf-8") != page:
            command = "attn support --devices" if devices else "attn support"
            typer.echo(f"attn: {check} is out of date; run: {command} --write {check}", err=True)
            raise typer.Exit(1)
        typer.echo(f"{check} is current")
    elif write is not None:
        write.write_text(page, encoding="utf-8")
        typer.echo(f"wrote {write}")
    else:
        typer.echo(page)
