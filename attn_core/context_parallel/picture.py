"""Draws a plan: which rank holds which positions, and which step computes which (query, key) pairs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import numpy as np

from attn_core.call.masks import Band
from attn_core.context_parallel import borders, places
from attn_core.context_parallel.layout import Layout, Run
from attn_core.context_parallel.plan import ContextPlan
from attn_core.context_parallel.tiles import Tile
from attn_core.errors import SpecError

LIMIT = 64
"""The longest row and the most ranks that are drawn. Larger pictures cannot be read."""

# Exactly LIMIT signs, one for each rank or step that can be drawn.
SIGNS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ+-"
COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#ee8866", "#999999")
"""Colours that readers with any colour vision can tell apart (Paul Tol's bright scheme, and one more)."""

CELL, STRIP = 18, 16
"""Pixels of a pair, and of the strips that show which rank holds a position."""


def step_of_pairs(plan: ContextPlan) -> np.ndarray:
    """Returns int64 ``[q_len, kv_len]``: the index of the step that computes each pair; -1 if none does."""
    steps = np.full((plan.q_layout.length, plan.k_layout.length), -1, np.int64)
    for at, step in enumerate(plan.steps):
        for part, tiles in enumerate(step.tiles):
            queries = places.positions(plan.q_blocks[part].runs)
            keys = places.positions(plan.key_block(step, part).runs)
            for tile in tiles:
                _mark(steps, tile, queries, keys, at)
    return steps


def _mark(steps: np.ndarray, tile: Tile, queries: np.ndarray, keys: np.ndarray, step: int) -> None:
    for segment in tile.segments:
        edge = Band(tile.left, tile.right, segment.k_len - segment.q_len)
        inside = np.ones((segment.q_len, segment.k_len), bool)
        inside &= edge.contains(np.arange(segment.q_len)[:, None], np.arange(segment.k_len)[None])
        rows, columns = np.nonzero(inside)
        steps[queries[segment.q_start + rows], keys[segment.k_start + columns]] = step


def ranks_of(layout: Layout) -> np.ndarray:
    """Returns int64 ``[length]``: the rank that holds each position."""
    # A row of 0 positions has shards of 0 places.
    return places.places_by_position(layout) // max(1, layout.shard)


def draw(plan: ContextPlan) -> str:
    """Returns a plan as text: each rank's positions, a sign for the step that computes each pair, and the number of
    pairs of each part.

    Raises:
        SpecError: for a row or a number of ranks above LIMIT.
    """
    _check(plan)
    lines = [_title(plan), *_holdings(plan), "", *_matrix(plan), "", *_table(plan)]
    return "\n".join(line.rstrip() for line in lines)


def _check(plan: ContextPlan) -> None:
    longest = max(plan.q_layout.length, plan.k_layout.length)
    if longest > LIMIT or plan.world > LIMIT:
        raise SpecError(f"length {longest} over {plan.world} ranks: at most {LIMIT} positions and ranks can be drawn")


def _title(plan: ContextPlan) -> str:
    ranks = f"{plan.outer}" if plan.inner == 1 or plan.strategy == "ulysses" else f"{plan.outer} x {plan.inner}"
    if plan.strategy == "ulysses":
        ranks = f"{plan.inner}"
    return f"{plan.q_layout.kind} over {ranks} ranks, {plan.strategy}"


def _holdings(plan: ContextPlan) -> list[str]:
    lines = []
    for rank, runs in enumerate(plan.q_layout.runs):
        line = f"rank {rank} holds {', '.join(map(_text_of, runs)) or 'nothing'}"
        if plan.k_layout != plan.q_layout:
            line += f"; of the keys {', '.join(map(_text_of, plan.k_layout.runs[rank])) or 'nothing'}"
        lines.append(line)
    return lines


def _text_of(run: Run) -> str:
    if run.count == 1:
        return f"{run.start}"
    return f"{run.start}-{run.last}" if run.stride == 1 else f"{run.start}, {run.start + run.stride} .. {run.last}"


def _matrix(plan: ContextPlan) -> list[str]:
    """Returns a line for each query in the order of positions, with its rank, and a column for each key."""
    steps, signs = step_of_pairs(plan), _signs(plan)
    of_query, of_key = ranks_of(plan.q_layout), ranks_of(plan.k_layout)
    lines = ["held by   " + " ".join(SIGNS[rank] for rank in of_key) + "   keys"]
    for query, row in enumerate(steps):
        lines.append(f"{of_query[query]:>5} {query:>3} " + " ".join(signs[step] for step in row))
    # With one part, every step number would be 0, so a square says that a pair is computed.
    moment = "the step that computes a pair" if _has_parts(plan) else "■ a pair that is computed"
    return [*lines, f"queries   {moment}, · none"]


def _has_parts(plan: ContextPlan) -> bool:
    """Returns whether there are several parts; otherwise all pairs are computed in one step."""
    return plan.outer > 1


def _signs(plan: ContextPlan) -> str:
    """Returns the sign of each step; the last sign is for pairs that are not visible."""
    return (SIGNS[: len(plan.steps)] if _has_parts(plan) else "■" * len(plan.steps)) + "·"


def _table(plan: ContextPlan) -> list[str]:
    """Returns lines with the number of pairs of each part in each step."""
    name = "rank" if plan.inner == 1 else "part"
    width = max(len(name) + 3, *(len(str(count)) + 2 for count in plan.pairs))
    lines = ["pairs    " + "".join(f"{f'{name} {part}':>{width}}" for part in range(plan.outer))]
    for at, step in enumerate(plan.steps if _has_parts(plan) else ()):
        source = f"all but {name[0]}" if step.gathered else f"{name[0]} - {step.shift}"
        source = f"{name[0]} itself" if step.own else source
        keys = "the keys" if step.border is None else f"{borders.size(step.border)} places"
        counts = "".join(f"{count:>{width}}" for count in step.pairs)
        lines.append(f"step {at:<4}{counts}   {name} {name[0]} has {keys} of {source}")
    lines.append("sum      " + "".join(f"{count:>{width}}" for count in plan.pairs))
    if plan.inner > 1:
        for part, block in enumerate(plan.q_blocks):
            ranks = ", ".join(map(str, sorted(block.ranks)))
            lines.append(f"part {part}: the ranks {ranks} compute it together, each for its share of the heads")
    return lines


def svg(plan: ContextPlan) -> str:
    """Returns a plan as an SVG picture: a square for each pair, in the colour of its query's rank, with its step.

    The strips on the left and on top show the ranks that hold the queries and the keys.

    Raises:
        SpecError: for a row or a number of ranks above LIMIT.
    """
    _check(plan)
    of_query, of_key = ranks_of(plan.q_layout), ranks_of(plan.k_layout)
    origin, top = STRIP + 4, STRIP + 24
    width, height = origin + CELL * len(of_key) + 4, top + CELL * len(of_query) + 4
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="monospace" font-size="10" text-anchor="middle">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="4" y="13" text-anchor="start" font-size="11">{_title(plan)}</text>',
    ]
    lines += [_strip(of_key, (origin, top - STRIP - 2), across=True), _strip(of_query, (2, top), across=False)]
    signs = _signs(plan) if _has_parts(plan) else " " * (len(plan.steps) + 1)
    for query, row in enumerate(step_of_pairs(plan)):
        lines += _row(row, signs, COLOURS[of_query[query] % len(COLOURS)], origin, top + CELL * query)
    return "\n".join([*lines, "</svg>", ""])


def _strip(ranks: np.ndarray, corner: tuple[int, int], *, across: bool) -> str:
    x, y = corner
    parts = []
    for at, rank in enumerate(ranks):
        left, upper = (x + CELL * at, y) if across else (x, y + CELL * at)
        # One pixel less than a cell leaves a gap between neighbours.
        wide, high = (CELL - 1, STRIP) if across else (STRIP, CELL - 1)
        colour = COLOURS[rank % len(COLOURS)]
        parts.append(f'<rect x="{left}" y="{upper}" width="{wide}" height="{high}" fill="{colour}"/>')
        # SVG places text by its baseline. 4 pixels below the middle centres digits of 10 pixels.
        parts.append(f'<text x="{left + wide / 2:g}" y="{upper + high / 2 + 4:g}" fill="#ffffff">{rank}</text>')
    return "\n".join(parts)


def _row(steps: Sequence[int], signs: str, colour: str, left: int, top: int) -> list[str]:
    """Returns a query's squares; adjacent squares of one step are joined, and later steps are paler."""
    lines = []
    for step, group in groupby(range(len(steps)), key=lambda key: int(steps[key])):
        keys = list(group)
        if step < 0:
            continue
        x, wide = left + CELL * keys[0], CELL * len(keys) - 1
        # Plans of many steps would become invisible without a lower bound.
        opacity = max(0.25, 0.85 - 0.2 * step)
        lines.append(
            f'<rect x="{x}" y="{top}" width="{wide}" height="{CELL - 1}" fill="{colour}" opacity="{opacity:g}"/>'
        )
        if signs[step].strip():
            centres = " ".join(f"{left + CELL * key + CELL / 2:g}" for key in keys)
            lines.append(f'<text x="{centres}" y="{top + CELL / 2 + 3:g}">{signs[step] * len(keys)}</text>')
    return lines
