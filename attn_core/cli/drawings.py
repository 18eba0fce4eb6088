"""``attn mask`` draws which keys every query sees; ``attn context-plan`` draws how ranks would share a call."""

from __future__ import annotations

import shutil
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from attn_core.call.masks import visible
from attn_core.call.spec import AttentionSpec
from attn_core.cli.spec_options import SpecOptions, takes_spec
from attn_core.context_parallel import picture
from attn_core.context_parallel.call import plan_spec
from attn_core.context_parallel.choose import Choice, NoStrategyError, choose, choose_layout, compared
from attn_core.context_parallel.cost import GIB
from attn_core.context_parallel.plan import AxisSizes
from attn_core.context_parallel.ranges import bands_of_row
from attn_core.errors import SpecError, shown
from attn_core.selection.whole_file import write_whole

LIMIT = 2**24
"""The most (query, key) pairs that are drawn. A larger mask needs hundreds of megabytes and shows no detail."""

SOME, ALL, NONE = "▪", "■", "·"


@takes_spec
def mask(
    options: SpecOptions,
    png: Annotated[Path | None, typer.Option(help="Also write a picture to this file (needs matplotlib).")] = None,
) -> None:
    """Draw which keys each query sees: one line for each query, one column for each key."""
    spec = options.spec()
    for name in ("mask", "padding", "segment_ids"):
        if getattr(options, name):
            raise SpecError(f"{name}=True: expected no random values in a picture; leave it out")
    if spec.q_len * spec.kv_len > LIMIT:
        raise SpecError(f"q_len={spec.q_len}, kv_len={spec.kv_len}: expected at most {LIMIT} pairs to draw")
    info = options.seq_info()
    offsets = (None, None) if info is None else (info.cu_seqlens_q, info.cu_seqlens_k)
    # Without a mask every row and head sees the same, so one picture shows all; ranges of several rows are an error.
    ranges = options.ranges()
    if ranges is not None and ranges.shape[0] > 1:
        raise SpecError(f"--key-ranges: expected one row to draw, got {ranges.shape[0]}")
    seen = visible(spec, cu_seqlens_q=offsets[0], cu_seqlens_k=offsets[1], key_ranges=ranges)[0, 0]
    typer.echo(str(spec))
    typer.echo(draw(seen, columns=shutil.get_terminal_size().columns))
    if png is not None:
        write_whole(_picture(seen, spec, offsets, png), png)
        typer.echo(f"wrote {png}")


def draw(seen: np.ndarray, columns: int = 80) -> str:
    """Returns a boolean array ``[q_len, kv_len]`` as text. Each sign stands for a block of pairs if columns are few."""
    q_len, kv_len = seen.shape
    if not seen.size:
        return f"nothing to draw: {q_len} queries, {kv_len} keys"
    label = len(str(q_len - 1)) + 2
    room = max((columns - label) // 2, 8)
    block = -(-max(q_len, kv_len) // room)  # one size for both axes, so that a diagonal stays a diagonal
    share = _shares(seen, block)
    signs = np.where(share == 1, ALL, np.where(share == 0, NONE, SOME))
    lines = [f"{row * block:>{label - 2}}  " + " ".join(line) for row, line in enumerate(signs)]
    legend = f"{ALL} visible  {NONE} hidden"
    if block > 1:
        legend += f"  {SOME} partly visible; each sign stands for {block} x {block} pairs"
    return "\n".join([*lines, legend])


def _shares(seen: np.ndarray, block: int) -> np.ndarray:
    """Returns the share of visible pairs in each ``block x block`` tile. Tiles at the far edges may be smaller."""
    starts = [np.arange(0, length, block) for length in seen.shape]
    counts = np.add.reduceat(np.add.reduceat(seen.astype(np.int64), starts[0], axis=0), starts[1], axis=1)
    heights, widths = (np.diff(np.append(s, length)) for s, length in zip(starts, seen.shape))
    return counts / np.outer(heights, widths)


def _picture(
    seen: np.ndarray, spec: AttentionSpec, offsets: tuple[np.ndarray | None, np.ndarray | None], path: Path
) -> bytes:
    """Returns the picture in the format that the file's ending names, PNG if it has none."""
    try:
        # Figure instead of pyplot, which may look for a display.
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise SpecError("--png: matplotlib is not installed; pip install 'attn-core[cli]'") from None
    figure = Figure(figsize=(6, 6), layout="constrained")
    axes = figure.add_subplot()
    axes.imshow(seen, cmap="Blues", vmin=0, vmax=1.4, interpolation="nearest", aspect="equal")
    for cut, line in zip(offsets, (axes.axhline, axes.axvline)):
        for offset in () if cut is None else cut[1:-1]:
            # imshow centres a pair on its index, so the edge between two is half a step before.
            line(offset - 0.5, color="tab:orange", linewidth=0.8)
    axes.set(xlabel="key", ylabel="query")
    axes.set_title(str(spec), fontsize=8, wrap=True)
    content = BytesIO()
    try:
        figure.savefig(content, format=path.suffix[1:] or "png", dpi=150)
    except ValueError as error:
        raise SpecError(f"{path}: cannot be drawn: {error}") from None
    return content.getvalue()


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
        drawn = max(spec.q_len, spec.kv_len, plan.world) <= picture.LIMIT
        typer.echo(
            picture.draw(plan) if drawn else f"(no picture: a row or the number of ranks is above {picture.LIMIT})"
        )
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
