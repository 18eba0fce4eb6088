"""``attn mask``: draws which keys every query sees."""

from __future__ import annotations

import shutil
from io import BytesIO
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from attn_core.call.masks import visible
from attn_core.call.spec import AttentionSpec
from attn_core.cli.spec_options import SpecOptions, takes_spec
from attn_core.errors import SpecError
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
    if options.mask:
        raise SpecError("--mask: expected no random mask, because it would hide the rest of the picture; leave it out")
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


def _picture(seen: np.ndarray, spec: AttentionSpec, offsets: tuple[Any, Any], path: Path) -> bytes:
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
