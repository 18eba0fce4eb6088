"""``attn support``: shows what every backend claims, as tables; writes three pages of docs/reference."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from attn_core.cli import device_table, known_bad_page, support_table
from attn_core.cli.complaint import complain
from attn_core.cli.support_tables import LEGEND, tables
from attn_core.errors import SpecError
from attn_core.selection.whole_file import write_whole


def support(
    devices: Annotated[
        bool, typer.Option("--devices", help="The page of GPUs, in Markdown: the kernels of each, and what to install.")
    ] = False,
    known_bad: Annotated[
        bool, typer.Option("--known-bad", help="The page of known faults of upstream kernels, in Markdown.")
    ] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown instead.")] = False,
    write: Annotated[Path | None, typer.Option(help="Write the page, in Markdown, to this file.")] = None,
    check: Annotated[Path | None, typer.Option(help="Exit with code 1 if this file is not the current page.")] = None,
) -> None:
    """Show what every backend supports, forward and backward."""
    if devices and known_bad:
        complain("--devices and --known-bad are different pages: give one of them")
        raise typer.Exit(2)
    pages = {" --devices": (devices, device_table), " --known-bad": (known_bad, known_bad_page)}
    option, module = next(((name, module) for name, (asked, module) in pages.items() if asked), ("", support_table))
    page = module.render()
    if check is not None:
        # A page that is missing or no text is out of date as well.
        if not check.is_file() or check.read_bytes() != page.encode():
            complain(f"{check} is out of date; run: attn support{option} --write {check}")
            raise typer.Exit(1)
        typer.echo(f"{check} is current")
    elif write is not None:
        try:
            write_whole(page, write)
        except SpecError as error:
            complain(error)
            raise typer.Exit(2) from None
        typer.echo(f"wrote {write}")
    elif markdown or option:
        typer.echo(page)
    else:
        console = Console(highlight=False)
        for table in tables():
            console.print(table)
            console.print()
        console.print(LEGEND)
