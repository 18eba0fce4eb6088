"""``attn explain``: prints which backend would run a call, and every reason why the others would not."""

from __future__ import annotations

import re
from importlib.util import find_spec
from typing import Annotated

import typer

import attn_core
from attn_core.cli.frameworks import devices_of
from attn_core.cli.spec_options import SpecOptions, takes_spec
from attn_core.errors import SpecError
from attn_core.selection import Target

FRAMEWORKS = ("torch", "jax")


@takes_spec
def explain(
    options: SpecOptions,
    device: Annotated[str, typer.Option(help="cpu, or a GPU's compute capability: sm80, sm90, sm100.")] = "cpu",
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
) -> None:
    """Show which backend would run a call, and why the others would not. Needs no GPU, torch or JAX.

    Exit code: 0 if a backend was selected; 1 if none can run the call; 2 for invalid options.
    """
    spec = options.spec(device)
    target, note = target_of(framework, device, here)
    selection = attn_core.explain(spec, target, tuple(backend) if backend else None)
    typer.echo(str(selection))
    typer.echo(note)
    if selection.backend is None:
        raise typer.Exit(1)


def target_of(framework: str, device: str, here: bool | None) -> tuple[Target, str]:
    """Returns the Target to explain, and a sentence on its assumptions.

    Args:
        here: True for this installation, False to assume that every backend is installed, None to decide by whether
            this machine has the device.

    Raises:
        SpecError: for an unknown framework, or a name that is no device's.
    """
    if framework not in FRAMEWORKS:
        raise SpecError(f"--framework={framework!r}: expected torch or jax")
    if not re.fullmatch(r"cpu|sm\d{2,3}", device):
        raise SpecError(f"--device={device!r}: expected cpu, or a compute capability such as sm80, sm90, sm100")
    if here is None:
        absent = _absent(framework, device)
        here = absent is None
        if absent:
            return Target(framework, device), f"({absent}: every backend is assumed to be installed)"
    if here:
        return Target.here(framework, device), "(as installed here)"
    return Target(framework, device), "(every backend is assumed to be installed)"


def _absent(framework: str, device: str) -> str | None:
    # find_spec does not import the framework, so the command stays fast.
    if find_spec(framework) is None:
        return f"{framework} is not installed here"
    if device != "cpu" and device not in devices_of(framework):
        return f"{framework} has no {device} device here"
    return None
