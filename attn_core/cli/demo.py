"""``attn demo``: the example in ``examples/smollm2``, by the same entry point as ``make demo``."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from typing import Annotated

import typer

MODULE = "examples.smollm2"


def demo(short: Annotated[bool, typer.Option("--short", help="Fewer prompts and tokens.")] = False) -> None:
    """Let a real model answer packed prompts through torch and through JAX, and compare the two."""
    if not _importable():
        typer.echo(
            f"attn: the demo is not part of the installed package; get the source and run `make demo` there "
            f"(or `python -m {MODULE}` from its root)",
            err=True,
        )
        raise typer.Exit(1)
    command = [sys.executable, "-m", MODULE, *(["--short"] if short else [])]
    raise typer.Exit(subprocess.run(command, check=False).returncode)


def _importable() -> bool:
    try:
        return find_spec(MODULE) is not None
    except ModuleNotFoundError:  # not even a package called "examples"
        return False
