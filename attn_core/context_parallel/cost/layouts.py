"""Chooses the layout of a row that is not cut yet: the one in which the fastest strategy is fastest."""

from __future__ import annotations

from math import prod

from attn_core.call.masks import band
from attn_core.call.spec import AttentionSpec
from attn_core.context_parallel.call import Bands, plan_spec
from attn_core.context_parallel.cost.choose import Choice, NoStrategyError, explain_choice
from attn_core.context_parallel.cost.machine import Constants
from attn_core.context_parallel.layout import layout_for_window
from attn_core.context_parallel.plan import AxisSizes

LAYOUTS = ("zigzag", "contiguous")
"""The layouts that are compared for every row, before those for documents and for a causal window; the earlier one wins
a tie. Stripes are left out: they have the pairs of a zigzag and no borders."""


def choose_layout(
    spec: AttentionSpec,
    documents: tuple[int, ...] | None,
    axes: AxisSizes,
    constants: Constants,
    memory: float | None = None,
    strategy: str | None = None,
    bands: Bands = None,
) -> tuple[Choice, ...]:
    """Returns the choice of every layout that can run the call, the fastest first.

    Args:
        spec, documents, axes, constants, memory, strategy, bands: as in ``choose``.

    Raises:
        NoStrategyError: if no layout can run the call, with every reason in the first one.
        SpecError: for arguments that context parallelism does not support.
    """
    how = axes, constants, memory, strategy, bands
    names = list(LAYOUTS)
    if documents is not None and documents[-1] >= prod(axes):
        names.append("documents")
    edge = band(spec)
    if documents is None and bands is None and edge.left is not None and edge.right == 0:
        names.append(layout_for_window(edge.left + 1))
    choices = [explain_choice(spec, documents, name, *how) for name in names]
    able = [(choice.estimate.order, choice) for choice in choices if choice.estimate is not None]
    if not able:
        raise NoStrategyError(choices[0])
    return tuple(choice for _, choice in sorted(able, key=lambda each: each[0]))


def shard_sizes(choice: Choice) -> tuple[int, int, int]:
    """Returns the places of a shard of q, k and v."""
    plan = plan_spec(choice.spec, choice.documents, choice.strategy or "", choice.layout, choice.axes, choice.bands)
    return plan.q_layout.shard, plan.k_layout.shard, plan.k_layout.shard
