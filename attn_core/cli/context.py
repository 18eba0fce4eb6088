"""``attn context-plan``: draws how ranks would share a call, and shows which strategy would be chosen and why."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from attn_core.cli.spec_options import SpecOptions, takes_spec
from attn_core.context_parallel.call import plan_spec
from attn_core.context_parallel.choose import Choice, NoStrategyError, choose, choose_layout, compared
from attn_core.context_parallel.cost import GIB
from attn_core.context_parallel.picture import LIMIT, draw
from attn_core.context_parallel.plan import AxisSizes
from attn_core.context_parallel.ranges import bands_of_row
from attn_core.errors import SpecError, shown


@takes_spec
def context_plan(
    options: SpecOptions,
    ranks: Annotated[
        str, typer.Option(help="Number of ranks, or OUTER,INNER for two axes; inner ranks share heads.")
    ] = "4",
    layout: Annotated[str, typer.Option(help="contiguous, zigzag, striped, documents, window:W, or auto.")] = "zigzag",
    strategy: Annotated[str | None, typer.Option(help="all_gather, ring or ulysses. Default: the fastest.")] = None,
    memory: Annotated[float | None, typer.Option(help="Memory limit of the call on each rank, in GiB.")] = None,
) -> None:
    """Show how ranks share a call in context parallelism. Needs no GPU, torch or JAX.

    Exit code: 0 if a strategy was selected; 1 if none can share the call; 2 for invalid options.
    """
    if options.kv_lengths is not None:
        raise SpecError("--kv-lengths: expected none, because each document has as many queries as keys; leave it out")
    spec, info, axes = options.spec(), options.seq_info(), _axes(ranks)
    documents = None if info is None else tuple(int(offset) for offset in info.cu_seqlens_q)
    budget = None if memory is None else memory * GIB
    ranges = options.ranges()
    bands = None if ranges is None else bands_of_row(ranges, replace(spec, key_ranges_shape=None))
    how, choices = (axes, budget, strategy, bands), tuple[Choice, ...]()
    try:
        if layout == "auto":
            choices = choose_layout(spec, documents, *how)
            layout = choices[0].layout
        choice = choose(spec, documents, layout, *how)
    except NoStrategyError as error:
        choice = error.choice
    if choice.strategy is not None:
        plan = plan_spec(spec, documents, choice.strategy, layout, axes, bands)
        # A picture has a sign for each token, so it is left out for long rows.
        drawn = max(spec.q_len, spec.kv_len, plan.world) <= LIMIT
        typer.echo(draw(plan) if drawn else f"(no picture: a row or the number of ranks is above {LIMIT})")
        typer.echo()
    typer.echo(str(choice))
    if choices:
        typer.echo(f"  {compared(choices)}")
    if choice.strategy is None:
        raise typer.Exit(1)


def _axes(text: str) -> AxisSizes:
    try:
        axes = tuple(int(word) for word in text.split(","))
    except ValueError:
        axes = ()
    if len(axes) == 1 and axes[0] >= 1:
        return (axes[0],)
    if len(axes) == 2 and min(axes) >= 1:
        return (axes[0], axes[1])
    raise SpecError(f"--ranks={shown(text)}: expected a number of 1 or more, or OUTER,INNER such as 2,4")
