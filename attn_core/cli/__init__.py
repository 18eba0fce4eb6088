"""The command line ``attn``. Only this package imports typer and rich, and only when a command runs."""

from __future__ import annotations

import sys


def main() -> None:
    """Runs ``attn``. If typer or rich is missing, exits with one line that says what to install."""
    try:
        from attn_core.cli.app import app
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        # Another missing module is a defect, whose traceback must stay visible.
        if missing not in ("typer", "rich"):
            raise
        sys.exit(f"attn: the command line needs {missing}, which is not installed; pip install 'attn-core[cli]'")
    app(prog_name="attn")
