"""``attn tune``: measures this machine and writes the table that automatic choice then follows."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from attn_core.cli.bench import MEASURING, device_of, line_of, regret_table
from attn_core.cli.bench_sweep import Record, Sweep
from attn_core.cli.bench_timing import DeviceLostError
from attn_core.cli.complaint import complain
from attn_core.cli.progress import Stages
from attn_core.errors import SpecError
from attn_core.selection.cross_validation import Fitting, write_table
from attn_core.selection.random_calls import random_calls
from attn_core.selection.tables import device_name, shipped_table, user_path, versions
from attn_core.selection.whole_file import check_place

ROUNDS = 3
"""Timed rounds of each backend. Fewer than in ``attn bench``, because more calls teach the models more."""


def tune(
    device: Annotated[str | None, typer.Option(help="cpu, or cuda (the GPU here). Default: the GPU, else cpu.")] = None,
    framework: Annotated[str, typer.Option(help="torch, or jax on a CPU. A GPU has one table for both.")] = "torch",
    minutes: Annotated[float, typer.Option(min=0.01, help="How long to measure.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of the random calls.")] = 1,
) -> None:
    """Measure this machine for a minute, and let automatic choice follow the measurements.

    Writes a table into the configuration folder. New processes use it as long as the device and the versions of the
    packages stay the same; delete the file to return to the package's own table.

    Exit code: 0 on success; 1 if there was no time for enough calls, or the device failed; 2 for invalid options.
    """
    try:
        target = device_of(device or ("cpu" if framework == "jax" else None), framework)
        if framework == "jax" and target != "cpu":
            raise SpecError(
                f"--framework=jax --device={target}: a GPU's table is measured in torch; use --framework torch"
            )
        path = user_path(framework, target)
        # ``write_table`` makes the folders, so that an interrupted run leaves none behind.
        check_place(next(folder for folder in path.parents if folder.exists()) / path.name)
        sweep = Sweep(target, (), ROUNDS, False, framework)
        _measure(sweep, seed, 60 * minutes)
    except SpecError as error:
        complain(error)
        raise typer.Exit(2) from None
    except DeviceLostError as error:
        complain(f"the device failed and cannot be used again: {error}; nothing was written")
        raise typer.Exit(1) from None
    shipped = shipped_table(framework, target)
    fitting = Fitting(sweep.raw, None if shipped is None else shipped.models)
    if not all(fitting.models.values()):
        complain(f"{len(fitting.records)} measured calls are too few; try --minutes {5 * minutes:g}")
        raise typer.Exit(1)
    try:
        write_table(fitting.table() | {"versions": versions(), "device_name": device_name(target)}, path)
    except SpecError as error:
        complain(error)
        raise typer.Exit(1) from None
    typer.echo(regret_table(fitting))
    typer.echo(f"wrote {path}; automatic choice follows it in new processes, and `attn doctor` shows it")


def _measure(sweep: Sweep, seed: int, seconds: float) -> None:
    # Progress goes to stderr, so that stdout has only the result.
    with Stages(Console(stderr=True)) as stages, stages.stage(MEASURING, None, seconds) as advance:

        def done(record: Record) -> None:
            stages.log(line_of(record))
            advance()

        sweep.run(random_calls(seed, sweep.target.kind), seconds, done)
