"""Prepares a call: chooses and plans it, and builds what this rank runs."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np
import torch

from attn_core.context_parallel import index_arrays
from attn_core.context_parallel import request as requests
from attn_core.context_parallel.call import ContextCall, keeps_borders, keeps_gathered
from attn_core.context_parallel.choose import Explanation
from attn_core.context_parallel.on_torch.positions import Places
from attn_core.context_parallel.on_torch.tiles import RowCoverage, TileRun, build_tile_run
from attn_core.context_parallel.plan import Step, outer_and_inner
from attn_core.context_parallel.request import Request
from attn_core.selection import Target
from torch_frontend.context_parallel.mesh import SINGLE_RANK, RankAxis, find_axis
from torch_frontend.dispatch.plan import device_name, on_device

Tensor = torch.Tensor


class RankPlan(NamedTuple):
    """What one rank does in a call.

    Attributes:
        outer, inner: the axes of ranks; ``outer.rank`` is the part of the row that this rank computes.
        steps: (step, this rank's tiles) of every step of the plan, also of steps in which it has no tiles. Gradients of
            gathered keys are added up without the own block's places.
        q_places, k_places: the places of a part's positions in its ranks' shards, end to end. One object if they are
            equal, so that q, k and v can travel in one message.
        k_size: the places of a block of keys that is sent.
        covered: whether tiles that are ``first`` write every query, so that the output needs no zeros.
        query_count: the number of places of this rank's shard of q that hold a position. These places come first.
        regroups: whether heads are exchanged or computed in groups; else shards and blocks are the same tensors.
        keeps: whether a forward keeps the keys of other ranks, or of all borders, for its backward.
        gathers: whether this rank receives the keys of all other ranks at once.
        q_dtype, own_dtype, sent_dtype: the dtypes of sums, see ``ContextCall.accumulator``.
        lse_dtype: of the log-sum-exp, and of wide sums.
    """

    call: ContextCall
    outer: RankAxis
    inner: RankAxis
    steps: tuple[tuple[Step, tuple[TileRun, ...]], ...]
    q_places: Places
    k_places: Places
    k_size: int
    covered: bool
    query_count: int
    regroups: bool
    keeps: bool
    gathers: bool
    q_dtype: torch.dtype
    own_dtype: torch.dtype
    sent_dtype: torch.dtype
    lse_dtype: torch.dtype


def prepare(request: Request) -> RankPlan:
    """Chooses and plans a call; returns what this rank runs. Sends nothing."""
    choice, call = explain_request(request)[:2]
    axes = outer_and_inner(tuple(map(find_axis, request.axes)), choice.strategy or "", SINGLE_RANK)
    return build_rank_plan(call, *axes, request.device)


def explain_request(request: Request) -> Explanation:
    """Chooses the strategy of a call and plans it. Sends nothing."""
    return requests.explain_request(request, Target.here("torch", device_name(request.device)))


# A small cache, because a plan holds tensors on the device: the places of tiles and their offsets.
@lru_cache(maxsize=64)
def build_rank_plan(call: ContextCall, outer: RankAxis, inner: RankAxis, device: torch.device) -> RankPlan:
    """Returns what a rank does in a planned call; cached."""
    plan, part = call.plan, outer.rank
    q_places, k_places = np.arange(plan.q_layout.shard), np.arange(plan.k_layout.shard)
    k_size = plan.k_layout.shard
    if inner.size > 1:
        q_places = index_arrays.places_of_block(plan.q_layout, plan.q_blocks[part])
        k_places = index_arrays.places_of_block(plan.k_layout, plan.k_blocks[part])
        # Collectives need messages of one size, so every block is sent with the places of the largest.
        k_size = max(block.count for block in plan.k_blocks)
    coverage, wrap, steps = RowCoverage(len(q_places)), partial(on_device, device=device), []
    for step in plan.steps:
        read_index = sum_index = None
        if step.gathered:  # gathered blocks stay in the order of ranks, and tiles index into them
            keys, others = plan.key_block(step, part), plan.k_blocks[:part] + plan.k_blocks[part + 1 :]
            read_index = sum_index = index_arrays.places_in_blocks(others, k_size, keys)
            if outer.size > 2:
                read_index = index_arrays.places_in_blocks(plan.k_blocks, k_size, keys)
        tiles = []
        for tile in step.tiles[part]:
            rows, keys_of_tile = index_arrays.places_of_tile(tile)
            read = keys_of_tile if read_index is None else read_index[keys_of_tile]
            summed = read if sum_index is read_index else sum_index[keys_of_tile]  # type: ignore[index]
            tiles.append(build_tile_run(call, tile, (rows, read, summed), device, coverage, wrap))
        steps.append((step, tuple(tiles)))
    of_queries, query_count = Places(q_places, device), plan.q_layout.position_count(part * inner.size + inner.rank)
    regroups = inner.size > 1 or call.head_groups > 1
    dtypes = {
        "q_dtype": call.accumulator("q", part),
        "own_dtype": call.accumulator("own", part),
        "sent_dtype": call.accumulator("sent"),
        "lse_dtype": call.spec.lse_dtype,
    }
    return RankPlan(
        call,
        outer,
        inner,
        tuple(steps),
        of_queries,
        of_queries if plan.q_layout is plan.k_layout else Places(k_places, device),
        k_size,
        coverage.complete,
        query_count,
        regroups,
        keeps_gathered(call.spec, plan) or keeps_borders(call.spec, plan),
        plan.gathers,
        **{name: getattr(torch, dtype) for name, dtype in dtypes.items()},
    )
