"""Prepares one rank's part of a context-parallel call: its tiles, their kernels, and the places that they read."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch

from attn_core import backends
from attn_core.context_parallel import places
from attn_core.context_parallel.call import ContextCall
from attn_core.context_parallel.on_torch.places import Places
from attn_core.context_parallel.on_torch.step import RowCoverage, tile_offsets
from attn_core.context_parallel.plan import Step
from attn_core.context_parallel.tiles import Tile
from torch_frontend.context_parallel.exchange import Axis
from torch_frontend.dispatch.plan import Plan, device_name, on_device

Tensor = torch.Tensor


class TileCall(NamedTuple):
    """A tile as a call of a backend.

    Attributes:
        q, k: where its queries and keys are in their blocks.
        sums: where its keys' gradients go; for gathered keys, the totals leave out the own block.
        first: whether it is the first tile to touch its queries.
    """

    plan: Plan
    q: Places
    k: Places
    sums: Places
    cu_seqlens: tuple[Tensor, Tensor] | None
    first: bool


class Program(NamedTuple):
    """What one rank does in a call.

    Attributes:
        part: the part of the row that the rank works on.
        steps: ``(step, tiles)`` of every step of the plan, including steps without tiles.
        q_held, k_held: where a part's positions are in its ranks' shards, end to end.
        k_size: places of a block of keys that travels.
        covered: whether tiles that are ``first`` write every query, so that the output needs no zeros.
        rows_wide, own_wide, sent_wide: whether results of queries, gradients of the own block's keys, and gradients
            that ranks send are added up in a wider dtype, see ``ContextCall``.
    """

    call: ContextCall
    part: int
    steps: tuple[tuple[Step, tuple[TileCall, ...]], ...]
    q_held: Places
    k_held: Places
    k_size: int
    covered: bool
    rows_wide: bool
    own_wide: bool
    sent_wide: bool


class Work(NamedTuple):
    """A prepared call and the two axes of its ranks."""

    program: Program
    outer: Axis
    inner: Axis


@lru_cache(maxsize=64)
def program(call: ContextCall, part: int, device: torch.device) -> Program:
    """Prepares a rank's part of a call; once for every call of its kind."""
    plan = call.plan
    q_block, k_block = plan.q_blocks[part], plan.k_blocks[part]
    split = plan.inner > 1
    q_size = q_block.count if split else plan.q_layout.shard
    k_size = max(block.count for block in plan.k_blocks) if split else plan.k_layout.shard
    covered = RowCoverage(q_size)
    steps = []
    for step in plan.steps:
        of_key = of_sum = None
        if step.gathered:  # gathered blocks stay in the order of ranks; tiles index into them
            seen, others = plan.key_block(step, part), plan.k_blocks[:part] + plan.k_blocks[part + 1 :]
            of_key, of_sum = (places.places_in_blocks(blocks, k_size, seen) for blocks in (plan.k_blocks, others))
        runs = []
        for tile in step.tiles[part]:
            rows, keys = places.places_of_tile(tile)
            read, summed = (keys if index is None else index[keys] for index in (of_key, of_sum))
            runs.append(_tile_call(call, tile, (rows, read, summed), device, first=covered.add(rows)))
        steps.append((step, tuple(runs)))
    return Program(
        call=call,
        part=part,
        steps=tuple(steps),
        q_held=Places(places.places_of_block(plan.q_layout, q_block) if split else np.arange(q_size), device),
        k_held=Places(places.places_of_block(plan.k_layout, k_block) if split else np.arange(k_size), device),
        k_size=k_size,
        covered=covered.complete,
        rows_wide=call.accumulator("q", part) != call.spec.dtype,
        own_wide=call.accumulator("own", part) != call.spec.dtype,
        sent_wide=call.accumulator("sent") != call.spec.dtype,
    )


def _tile_call(
    call: ContextCall, tile: Tile, index: tuple[np.ndarray, ...], device: torch.device, *, first: bool
) -> TileCall:
    spec, name = call.backend_of(tile)
    module = backends.load(name, backends.kind_of(device_name(device)))
    forward, backward = (on_device(function, device) for function in (module.forward, module.backward))
    plan = Plan(spec, name, forward, backward, False, None, backends.writes_into(module))
    q, k, sums = (Places(each, device) for each in index)
    return TileCall(plan, q, k, sums, tile_offsets(spec, tile, device), first)
