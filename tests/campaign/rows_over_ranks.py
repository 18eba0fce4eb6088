"""Draws how the ranks of context parallelism share a row, for the entries of both frameworks."""

from __future__ import annotations

from math import gcd, prod
from random import Random
from typing import NamedTuple

from attn_core.call.spec import AttentionSpec
from attn_core.context_parallel.layout import LAYOUTS, layout_for_window
from tests.campaign.entries import without

RANKS = 4
AXES: tuple[tuple[int, ...], ...] = ((2,), (3,), (2, 2))
"""The meshes: one axis of ranks, or (outer, inner). The inner axis exchanges heads."""
STRATEGIES = {1: (None, "all_gather", "ring", "ulysses"), 2: (None, "all_gather", "ring")}


class Sharing(NamedTuple):
    """How ranks share a row: arguments of ``context_parallel_attention``. backend None is automatic choice."""

    axes: tuple[int, ...]
    strategy: str | None
    layout: str
    head_groups: int | None
    backend: str | None


def sharing(spec: AttentionSpec, seed: int | str) -> Sharing:
    """Draws a way to share the row of a call that ``refuses`` accepts."""
    random = Random(f"ranks/{seed}")
    axes = random.choice([each for each in AXES if len(each) == 1 or heads_of_rank(spec, each[1])])
    known = STRATEGIES[len(axes)]
    strategy = random.choice([each for each in known if each != "ulysses" or heads_of_rank(spec, axes[0])])
    together = axes[1] if len(axes) == 2 else axes[0] if strategy == "ulysses" else 1
    # Automatic choice may exchange heads, and then the groups must divide the heads of a rank.
    halves = strategy is not None and heads_of_rank(spec, together) % 2 == 0
    dealt = spec.packed and min(spec.q_len, spec.kv_len) >= RANKS
    window = random.randint(1, 1 + max(spec.q_len, spec.kv_len))
    return Sharing(
        axes,
        strategy,
        random.choice([*(each for each in LAYOUTS if each != "documents" or dealt), layout_for_window(window)]),
        random.choice((None, 2)) if halves else None,
        random.choice((None, "math")),
    )


def heads_of_rank(spec: AttentionSpec, ranks: int) -> int:
    """Returns the kv heads of each rank if ranks share the heads, copies included; 0 if they cannot share them."""
    copies = ranks // gcd(spec.num_kv_heads, ranks)
    return 0 if spec.group_size % copies else spec.num_kv_heads * copies // ranks


def ranks_of(how: Sharing) -> int:
    """Returns the number of ranks that share the row."""
    return prod(how.axes)


refuses = without("mask", "bias", "alibi", "dropout")
