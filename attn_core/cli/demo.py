"""``attn demo`` and ``attn serve-demo``: run the demos in ``examples``, as ``make demo`` and ``make serve-demo`` do."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

Short = Annotated[bool, typer.Option("--short", help="Use fewer prompts and tokens.")]


def demo(short: Short = False) -> None:
    """Answer packed prompts with a real model in torch and in JAX, and compare. Needs a clone."""
    _run("examples.smollm2", "demo", short)


def serve_demo(
    short: Short = False,
    kv: Annotated[
        str | None, typer.Option(help="The dtype of keys and values: bfloat16, float32, fp8, int8, int4.")
    ] = None,
    memory: Annotated[int | None, typer.Option(metavar="MIB", help="The size of the pool (default: 9).")] = None,
) -> None:
    """Answer many chats at once from one pool of pages, and compare with one at a time. Needs a clone."""
    options = {"--kv": kv, "--memory": memory}
    chosen = [word for name, value in options.items() if value is not None for word in (name, str(value))]
    _run("examples.serving", "serve-demo", short, *chosen)


def _run(module: str, target: str, short: bool, *options: str) -> None:
    if not _importable(module):
        typer.echo(
            f"attn: the demo is not part of the installed package; get the source and run `make {target}` there "
            f"(or `python -m {module}` from its root)",
            err=True,
        )
        raise typer.Exit(1)
    # A process of its own, because the demo is a script that parses its own arguments.
    # It finds the examples where this process found them, and nothing in the working folder.
    command = [sys.executable, "-P", "-m", module, *(["--short"] if short else []), *options]
    paths = os.pathsep.join(path for path in (_root_of(module), os.environ.get("PYTHONPATH")) if path)
    raise typer.Exit(subprocess.run(command, check=False, env={**os.environ, "PYTHONPATH": paths}).returncode)


def _root_of(module: str) -> str:
    """Returns the folder that a package ``examples.NAME`` is found in."""
    spec = find_spec(module)
    folders = list((spec and spec.submodule_search_locations) or [])
    return str(Path(folders[0]).resolve().parents[1]) if folders else ""


def _importable(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # not even a package called "examples"
        return False
