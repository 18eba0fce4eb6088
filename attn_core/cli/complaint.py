"""Errors of the command line: one line of its own on stderr for each line of a message, none wider than a terminal."""

from __future__ import annotations

import typer

from attn_core.selection.explanation_text import wrapped


def complain(message: object) -> None:
    """Prints an error to stderr, in lines of at most 80 columns."""
    for line in f"attn: {message}".splitlines():
        typer.echo(wrapped(line), err=True)
