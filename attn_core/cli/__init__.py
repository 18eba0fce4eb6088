"""The command line ``attn``. Only this package imports typer and rich, and only when a command runs."""

from __future__ import annotations

import errno
import sys

from attn_core.cli.ctrl_c import insistent_ctrl_c
from attn_core.errors import MissingExtraError, needs_extra


def main() -> None:
    """Runs ``attn``. If typer or rich is missing, exits with one line that says what to install."""
    try:
        with needs_extra("the command line", "cli", "typer", "rich"):
            from attn_core.cli.app import app
    except MissingExtraError as error:
        sys.exit(f"attn: {error}")
    try:
        with insistent_ctrl_c():
            app(prog_name="attn")
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            raise
        sys.exit(f"attn: the output cannot be written: {error.strerror}")
