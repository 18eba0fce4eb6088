"""``attn explain``: prints which backend would run a call and why, which others can, and why the others cannot."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

import attn_core
from attn_core import backends
from attn_core.cli import devices
from attn_core.cli.devices import device_named
from attn_core.cli.frameworks import check_framework, devices_of
from attn_core.cli.spec_options import SpecOptions, defaults_on, takes_spec
from attn_core.context_parallel.one_device import described
from attn_core.selection import Selection, Target
from attn_core.selection import explanation as explained
from attn_core.selection.explanation import Row
from attn_core.selection.explanation_text import head, others, wrapped

STYLES = {
    explained.SELECTED: "bold green",
    explained.ABLE: "green",
    explained.BY_NAME: "cyan",
    explained.ONE_CHANGE: "yellow",
    explained.REFUSED: "dim",
}
"""The colours of the verdicts."""

TITLE_WIDTH = max(map(len, backends.names()))
"""The width of the first column, so that the tables of all sections align."""


@takes_spec
def explain(
    options: SpecOptions,
    device: Annotated[str, typer.Option(help=devices.HELP)] = "cpu",
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
    _show(Console(highlight=False), selection, everything)
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


def _show(console: Console, selection: Selection, everything: bool) -> None:
    facts = explained.explanation(selection)
    answer, *rest = head(facts, everything)
    # These lines are wrapped already, and a path in them stays whole.
    console.print(Text(answer, STYLES[explained.SELECTED] if selection.backend else "bold red"), soft_wrap=True)
    for line in rest:
        console.print(Text(line), soft_wrap=True)
    rows, hidden = (list(facts.rows), 0) if everything else explained.worth_showing(facts)
    for title, section in explained.sections(facts, rows).items():
        console.print()
        _show_section(console, title, section)
    if hidden:
        console.print()
        console.print(Text(others(facts, hidden, "--all"), STYLES[explained.REFUSED]))


def _show_section(console: Console, title: str, rows: list[Row]) -> None:
    # A line of names is shorter than a row for each.
    by_name = explained.by_name(rows)
    rows = [row for row in rows if row.verdict != explained.BY_NAME]
    if len(title) > TITLE_WIDTH:
        console.print(Text(title + ":", "bold"))
    if rows:
        console.print(_table(title, rows))
    for line in by_name:
        console.print(Text(wrapped(line, "", "  "), "cyan"))


def _table(title: str, rows: list[Row]) -> Table:
    table = Table(box=None, pad_edge=False, show_header=len(title) <= TITLE_WIDTH)
    table.add_column(title, no_wrap=True, min_width=TITLE_WIDTH)
    if rows[0].reasons:
        table.add_column("why", overflow="fold")
    else:
        table.add_column("predicted" if any(row.microseconds is not None for row in rows) else "", justify="right")
    for row in rows:
        time = "" if row.microseconds is None else explained.duration(row.microseconds)
        # A command has a line of its own, so that it can be copied.
        why = row.why.replace("; ", "\n")
        table.add_row(*(Text(cell, STYLES[row.verdict]) for cell in (row.backend, why or time)))
    return table
