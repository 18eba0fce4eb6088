"""One rank's part of a context-parallel call, prepared: its tiles on their kernels, and which places they read."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch

from attn_core import backends
from attn_core.context_parallel import places
from attn_core.context_parallel.call import ContextCall
from attn_core.context_parallel.tiles import Tile
from torch_frontend.context_places import Places
from torch_frontend.plan import Plan, device_name, on_device

Tensor = torch.Tensor


class Run(NamedTuple):
    """A tile as a call of a backend."""

    made: Plan
    q: Places
    k: Places
    cu_seqlens: tuple[Tensor, Tensor] | None
    first: bool
    """Whether no tile before has touched its queries."""


class Program(NamedTuple):
    """What one rank does in a call.

    Attributes:
        part: which part of the row its ranks share.
        steps: ``(shift, runs)`` of every step of the plan, those in which this part does nothing among them.
        q_held, k_held: where a part's ranks hold its positions, in their shards end to end.
        k_size, q_size: places of a block of keys that travels, and of this part's queries.
        most: how many runs touch a query at most; covered: whether every query is touched by a run that is the first to
            touch any of its own.
        keys_alone: whether a single run reads every key of the block.
    """

    call: ContextCall
    part: int
    steps: tuple[tuple[int, tuple[Run, ...]], ...]
    q_held: Places
    k_held: Places
    k_size: int
    q_size: int
    most: int
    covered: bool
    keys_alone: bool


@lru_cache(maxsize=64)
def program(call: ContextCall, part: int, device: torch.device) -> Program:
    """Prepares a rank's part of a call; once for every call of its kind."""
    plan = call.plan
    q_block, k_block = plan.q_blocks[part], plan.k_blocks[part]
    split = plan.inner > 1
    q_size = q_block.count if split else plan.q_layout.shard
    k_size = max(block.count for block in plan.k_blocks) if split else plan.k_layout.shard
    touched, begun = np.zeros(q_size, np.int64), np.zeros(q_size, bool)
    travels = plan.outer > 1 and plan.gathered is not None
    # Where everybody gets all keys, they stay as they come, block after block: tiles find theirs there.
    of_key = places.in_blocks(plan.k_blocks, k_size, plan.gathered) if travels and plan.gathered else None
    steps = []
    for step in plan.steps:
        runs = []
        for tile in step.tiles[part]:
            rows = places.spans([segment[:2] for segment in tile.segments])
            keys = places.spans([segment[2:] for segment in tile.segments])
            keys = keys if of_key is None else of_key[keys]
            first = not touched[rows].any()
            runs.append(_run(call, tile, rows, keys, device, first=first))
            touched[rows] += 1
            begun[rows] |= first
        steps.append((step.shift, tuple(runs)))
    every_run = [run for _, runs in steps for run in runs]
    return Program(
        call=call,
        part=part,
        steps=tuple(steps),
        q_held=Places(places.order(plan.q_layout, q_block) if split else np.arange(q_size), device),
        k_held=Places(places.order(plan.k_layout, k_block) if split else np.arange(k_size), device),
        k_size=k_size,
        q_size=q_size,
        most=int(touched.max(initial=0)),
        covered=bool(begun.all()),
        keys_alone=len(every_run) == 1 and plan.outer == 1 and every_run[0].k.are_all_of(k_size),
    )


def _run(
    call: ContextCall, tile: Tile, rows: np.ndarray, keys: np.ndarray, device: torch.device, *, first: bool
) -> Run:
    spec, name = call.backend_of(tile)
    module: Any = backends.load(name, backends.kind_of(device_name(device)))
    forward, backward = (on_device(function, device) for function in (module.forward, module.backward))
    made = Plan(spec, name, forward, backward, False, None, backends.writes_into(module))
    offsets = None
    if spec.packed:
        lengths = ([segment.q_len for segment in tile.segments], [segment.k_len for segment in tile.segments])
        one, other = (torch.tensor([0, *np.cumsum(each)], dtype=torch.int32, device=device) for each in lengths)
        offsets = one, other
    return Run(made, Places(rows, device), Places(keys, device), offsets, first)
