"""The commands of ``attn``, each in a file of its own."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperCommand

import attn_core
from attn_core.cli.certify.certificate import certify
from attn_core.cli.compare import compare
from attn_core.cli.doctor import doctor
from attn_core.cli.drawings import context_plan, mask
from attn_core.cli.explain import explain
from attn_core.cli.spec_options import complain, in_options
from attn_core.cli.timing import DeviceLostError
from attn_core.cli.tune import tune
from attn_core.errors import SpecError


class Command(TyperCommand):
    """A command that ends with a line on stderr for an invalid option or a device that failed."""

    def invoke(self, ctx: Any) -> Any:
        """Runs the command."""
        try:
            return super().invoke(ctx)
        except SpecError as error:
            complain(in_options(error, (str(parameter.name) for parameter in self.params)))
            raise typer.Exit(2) from None  # also typer's own code for a wrong option
        except DeviceLostError as error:
            complain(f"the device failed and cannot be used again: {error}")
            raise typer.Exit(1) from None


app = typer.Typer(
    help="Find out which backend runs an attention call, why, how fast, and whether its numbers are right.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)
COMMANDS = (doctor, explain, compare, tune, certify, mask, context_plan)
for command in COMMANDS:
    app.command(cls=Command)(command)


def _version(requested: bool) -> None:
    if requested:
        typer.echo(f"attn-core {attn_core.__version__}")
        raise typer.Exit


@app.callback()
def attn(
    version: Annotated[
        # Eager, so that --version works without a command.
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Defines the options that come before any command."""
