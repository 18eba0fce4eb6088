"""``attn support``: shows what every backend claims, as tables; writes two pages of docs/reference from it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from attn_core.cli import device_table, support_table
from attn_core.cli.complaint import complain
from attn_core.cli.support_tables import LEGEND, tables


def support(
    devices: Annotated[
        bool, typer.Option("--devices", help="The page of GPUs, in Markdown: the kernels of each, and what to install.")
    ] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown instead.")] = False,
    write: Annotated[Path | None, typer.Option(help="Write the page, in Markdown, to this file.")] = None,
    check: Annotated[Path | None, typer.Option(help="Exit with code 1 if this file is not the current page.")] = None,
) -> None:
    """Show what every backend supports, forward and backward."""
    page = (device_table if devices else support_table).render()
    if check is not None:
        # A missing page is out of date as well.
        if not check.is_file() or check.read_text(encoding="utf-8") != page:
            command = "attn support --devices" if devices else "attn support"
            complain(f"{check} is out of date; run: {command} --write {check}")
            raise typer.Exit(1)
        typer.echo(f"{check} is current")
    elif write is not None:
        write.write_text(page, encoding="utf-8")
        typer.echo(f"wrote {write}")
    elif markdown or devices:
        typer.echo(page)
    else:
        console = Console(highlight=False)
        for table in tables():
            console.print(table)
            console.print()
        console.print(LEGEND)
