"""The command line ``attn``. typer and rich are imported in this package alone, and only once a command runs."""

from __future__ import annotations

import sys


def main() -> None:
    """Runs ``attn``; says in one line what to install when typer or rich is missing."""
    try:
        from attn_core.cli.app import app
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in ("typer", "rich"):
            raise
        sys.exit(f"attn: the command line needs {missing}, which is not installed; pip install 'attn-core[cli]'")
    app(prog_name="attn")
