"""Draws a plan as text: which rank holds which positions, and which step computes which (query, key) pairs."""

from __future__ import annotations

import numpy as np

from attn_core.call.masks import Band
from attn_core.context_parallel import borders, index_arrays
from attn_core.context_parallel.layout import Layout, Run
from attn_core.context_parallel.plan import ContextPlan
from attn_core.context_parallel.tiles import Tile
from attn_core.errors import SpecError

LIMIT = 64
"""The longest row and the most ranks that are drawn. Larger pictures cannot be read."""

# Exactly LIMIT signs, one for each rank or step that can be drawn.
SIGNS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ+-"


def step_of_pairs(plan: ContextPlan) -> np.ndarray:
    """Returns int64 ``[q_len, kv_len]``: the index of the step that computes each pair; -1 if none does."""
    steps = np.full((plan.q_layout.length, plan.k_layout.length), -1, np.int64)
    for at, step in enumerate(plan.steps):
        for part, tiles in enumerate(step.tiles):
            queries = index_arrays.positions(plan.q_blocks[part].runs)
            keys = index_arrays.positions(plan.key_block(step, part).runs)
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
    return index_arrays.places_by_position(layout) // max(1, layout.shard)


def draw(plan: ContextPlan) -> str:
    """Returns a plan as text: each rank's positions, a sign for the step that computes each pair, and the number of
    pairs of each part.

    Raises:
        SpecError: for a row or a number of ranks above LIMIT.
    """
    check_drawn(plan)
    lines = [title(plan), *_holdings(plan), "", *_matrix(plan), "", *_table(plan)]
    return "\n".join(line.rstrip() for line in lines)


def check_drawn(plan: ContextPlan) -> None:
    """Raises SpecError for a row or a number of ranks above LIMIT."""
    longest = max(plan.q_layout.length, plan.k_layout.length)
    if longest > LIMIT or plan.world > LIMIT:
        raise SpecError(f"length {longest} over {plan.world} ranks: at most {LIMIT} positions and ranks can be drawn")


def title(plan: ContextPlan) -> str:
    """Returns the layout, the ranks and the strategy."""
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
    steps, signs = step_of_pairs(plan), signs_of(plan)
    of_query, of_key = ranks_of(plan.q_layout), ranks_of(plan.k_layout)
    lines = ["held by   " + " ".join(SIGNS[rank] for rank in of_key) + "   keys"]
    for query, row in enumerate(steps):
        lines.append(f"{of_query[query]:>5} {query:>3} " + " ".join(signs[step] for step in row))
    # With one part, every step number would be 0, so a square says that a pair is computed.
    moment = "the step that computes a pair" if has_parts(plan) else "■ a pair that is computed"
    return [*lines, f"queries   {moment}, · none"]


def has_parts(plan: ContextPlan) -> bool:
    """Returns whether there are several parts; otherwise all pairs are computed in one step."""
    return plan.outer > 1


def signs_of(plan: ContextPlan) -> str:
    """Returns the sign of each step; the last sign is for pairs that are not visible."""
    return (SIGNS[: len(plan.steps)] if has_parts(plan) else "■" * len(plan.steps)) + "·"


def _table(plan: ContextPlan) -> list[str]:
    """Returns lines with the number of pairs of each part in each step."""
    name = "rank" if plan.inner == 1 else "part"
    width = max(len(name) + 3, *(len(str(count)) + 2 for count in plan.pairs))
    lines = ["pairs    " + "".join(f"{f'{name} {part}':>{width}}" for part in range(plan.outer))]
    for at, step in enumerate(plan.steps if has_parts(plan) else ()):
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
