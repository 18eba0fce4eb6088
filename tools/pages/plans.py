"""Writes the pictures of plans of context parallelism in docs/images."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, groupby

import numpy as np

from attn_core import AttentionSpec
from attn_core.context_parallel.call import plan_spec
from attn_core.context_parallel.picture import check_drawn, has_parts, ranks_of, signs_of, step_of_pairs, title
from attn_core.context_parallel.plan import ContextPlan

COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#ee8866", "#999999")
"""Colours that readers with any colour vision can tell apart (Paul Tol's bright scheme, and one more)."""

CELL, STRIP = 18, 16
"""Pixels of a pair, and of the strips that show which rank holds a position."""


def ring(layout: str, ranks: int, lengths: tuple[int, ...], window: int | None = None) -> ContextPlan:
    """Returns the plan of a causal ring over documents of these lengths; one length is a row without documents."""
    documents = (0, *accumulate(lengths)) if len(lengths) > 1 else None
    tokens = sum(lengths)
    spec = AttentionSpec(
        batch=1,
        q_len=tokens,
        kv_len=tokens,
        num_heads=8,
        num_kv_heads=8,
        head_dim=64,
        value_dim=64,
        dtype="bfloat16",
        causal=True,
        window=(None, None) if window is None else (window - 1, 0),
        documents=None if documents is None else len(lengths),
    )
    return plan_spec(spec, documents, "ring", layout, (ranks,))


PICTURES = {
    "plan-contiguous.svg": lambda: svg(ring("contiguous", 4, (16,))),
    "plan-zigzag.svg": lambda: svg(ring("zigzag", 4, (16,))),
    "plan-striped.svg": lambda: svg(ring("striped", 4, (16,))),
    "plan-documents.svg": lambda: svg(ring("zigzag", 2, (12, 4))),
    "plan-dealt.svg": lambda: svg(ring("documents", 2, (2, 11, 3, 6))),
    "plan-window.svg": lambda: svg(ring("window:5", 2, (16,), window=5)),
}
"""The pictures by their names."""


def svg(plan: ContextPlan) -> str:
    """Returns a plan as an SVG picture: a square for each pair, in the colour of its query's rank, with its step.

    The strips on the left and on top show the ranks that hold the queries and the keys.

    Raises:
        SpecError: for a row or a number of ranks above LIMIT.
    """
    check_drawn(plan)
    of_query, of_key = ranks_of(plan.q_layout), ranks_of(plan.k_layout)
    origin, top = STRIP + 4, STRIP + 24
    width, height = origin + CELL * len(of_key) + 4, top + CELL * len(of_query) + 4
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="monospace" font-size="10" text-anchor="middle">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="4" y="13" text-anchor="start" font-size="11">{title(plan)}</text>',
    ]
    lines += [_strip(of_key, (origin, top - STRIP - 2), across=True), _strip(of_query, (2, top), across=False)]
    signs = signs_of(plan) if has_parts(plan) else " " * (len(plan.steps) + 1)
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
