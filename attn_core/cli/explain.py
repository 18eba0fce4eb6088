"""``attn explain``: prints which backend would run a call and why, which others can, and why the others cannot."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Annotated

import typer

import attn_core
from attn_core.cli.devices import HELP, check_framework, device_named, devices_of
from attn_core.cli.spec_options import SpecOptions, defaults_on, takes_spec
from attn_core.context_parallel.one_device import described
from attn_core.selection import Target
from attn_core.selection.choice import text_of


@takes_spec
def explain(
    options: SpecOptions,
    device: Annotated[str, typer.Option(help=HELP)] = "cpu",
    framework: Annotated[str, typer.Option(help="torch or jax.")] = "torch",
    backend: Annotated[
        list[str] | None, typer.Option(help="Request this backend. Repeatable, in order of preference.")
    ] = None,
    here: Annotated[
        bool | None,
        typer.Option(
            "--here/--assume-installed",
            help="Consider only what is installed here, or assume that everything is. Default: --here if this machine "
            "has the device.",
        ),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Show every backend, with every reason.")] = False,
) -> None:
    """Show which backend would run a call, and why the others would not. Needs no GPU, torch or JAX.

    Exit code: 0 if a backend was selected; 1 if none can run the call; 2 for invalid options.
    """
    check_framework(framework)
    device = device_named(device, framework)
    spec, ranges = options.filled(defaults_on(device)).spec(device), options.ranges()
    target, note = target_of(framework, device, here)
    selection = attn_core.explain(spec, target, tuple(backend) if backend else None)
    if ranges is not None:
        selection = described(selection, ranges)
    typer.echo(text_of(selection, everything, how="--all"))
    typer.echo(note)
    if selection.backend is None:
        raise typer.Exit(1)


def target_of(framework: str, device: str, here: bool | None) -> tuple[Target, str]:
    """Returns the Target to explain, and a sentence on its assumptions.

    Args:
        framework, device: as ``check_framework`` and ``device_named`` accept them.
        here: True for this installation, False to assume that every backend is installed, None to decide by whether
            this machine has the device.
    """
    absent = ""
    # find_spec does not import the framework, so the command stays fast.
    if here is None and find_spec(framework) is None:
        absent = f"{framework} is not installed here: "
    elif here is None and device != "cpu" and device not in devices_of(framework):
        absent = f"{framework} has no {device} device here: "
    if here is False or absent:
        return Target(framework, device), f"({absent}every backend is assumed to be installed)"
    return Target.here(framework, device), "(as installed here)"
