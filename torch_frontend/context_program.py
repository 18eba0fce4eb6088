"""One rank's part of a context-parallel call, prepared: its tiles on their kernels, and which places they read."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch

from attn_core import backends
from attn_core.context_parallel import places
from attn_core.context_parallel.call import ContextCall
from attn_core.context_parallel.tiles import Tile
from torch_frontend.plan import Plan, device_name, on_device

Tensor = torch.Tensor


class Places:
    """Some places of an axis of positions: one range where they are neighbours, else an index on the device."""

    def __init__(self, index: np.ndarray, device: torch.device) -> None:
        self.count = len(index)
        ranges = places.slices(index, 2)
        self.range = (0, 0) if not self.count else ranges[0] if ranges and len(ranges) == 1 else None
        self.index: Any = None if self.range is not None else torch.from_numpy(index).to(device)

    def of(self, tensor: Tensor, axis: int = 1) -> Tensor:
        """The tensor at these places: a view of a range, else a copy."""
        if self.range is not None:
            return tensor.narrow(axis, self.range[0], self.count)
        return tensor.index_select(axis, self.index)

    def put(self, tensor: Tensor, values: Tensor, axis: int = 1) -> None:
        """Writes values to these places."""
        if self.range is not None:
            self.of(tensor, axis).copy_(values)
        else:
            tensor.index_copy_(axis, self.index, values.to(tensor.dtype))

    def add(self, tensor: Tensor, values: Tensor, axis: int = 1) -> None:
        """Adds values to these places, in the tensor's dtype."""
        if self.range is not None:
            self.of(tensor, axis).add_(values)
        else:
            tensor.index_add_(axis, self.index, values.to(tensor.dtype))

    def spread(self, values: Tensor, size: int, axis: int = 1) -> Tensor:
        """A tensor of ``size`` places with the values at these, and zeros elsewhere."""
        if self.range == (0, size):
            return values
        shape = (*values.shape[:axis], size, *values.shape[axis + 1 :])
        made = values.new_zeros(shape)
        self.put(made, values, axis)
        return made


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
        gathered: where all keys lie in every part's block, ``k_size`` places each.
        k_size: places of a block that travels.
        alone: whether every query is touched once at most; covered: at least once.
        keys_alone: whether a single run reads every key of the block.
    """

    call: ContextCall
    part: int
    steps: tuple[tuple[int, tuple[Run, ...]], ...]
    q_held: Places
    k_held: Places
    gathered: Places | None
    k_size: int
    q_size: int
    alone: bool
    covered: bool
    keys_alone: bool


@lru_cache(maxsize=256)
def program(call: ContextCall, part: int, device: torch.device) -> Program:
    """Prepares a rank's part of a call; once for every call of its kind."""
    plan = call.plan
    q_block, k_block = plan.q_blocks[part], plan.k_blocks[part]
    split = plan.inner > 1
    q_size = q_block.count if split else plan.q_layout.shard
    k_size = max(block.count for block in plan.k_blocks) if split else plan.k_layout.shard
    touched = np.zeros(q_size, np.int64)
    steps = []
    for step in plan.steps:
        runs = []
        for tile in step.tiles[part]:
            rows = _index([segment[:2] for segment in tile.segments])
            runs.append(_run(call, tile, device, first=not touched[rows].any()))
            touched[rows] += 1
        steps.append((step.shift, tuple(runs)))
    gathered = None
    if plan.outer > 1 and plan.gathered is not None:
        gathered = Places(places.in_blocks(plan.k_blocks, k_size, plan.gathered), device)
    everything = plan.gathered.count if plan.gathered is not None and (split or plan.outer > 1) else k_size
    every_run = [run for _, runs in steps for run in runs]
    return Program(
        call=call,
        part=part,
        steps=tuple(steps),
        q_held=Places(places.order(plan.q_layout, q_block) if split else np.arange(q_size), device),
        k_held=Places(places.order(plan.k_layout, k_block) if split else np.arange(k_size), device),
        gathered=gathered,
        k_size=k_size,
        q_size=q_size,
        alone=bool((touched <= 1).all()),
        covered=bool(touched.all()),
        keys_alone=len(every_run) == 1 and every_run[0].k.range == (0, everything),
    )


def _run(call: ContextCall, tile: Tile, device: torch.device, *, first: bool) -> Run:
    spec, name = call.backend_of(tile)
    module: Any = backends.load(name, backends.kind_of(device_name(device)))
    forward, backward = (on_device(function, device) for function in (module.forward, module.backward))
    made = Plan(spec, name, forward, backward, False, None, backends.writes_into(module))
    q, k = (Places(_index([segment[at : at + 2] for segment in tile.segments]), device) for at in (0, 2))
    offsets = None
    if spec.packed:
        lengths = ([segment.q_len for segment in tile.segments], [segment.k_len for segment in tile.segments])
        one, other = (torch.tensor([0, *np.cumsum(each)], dtype=torch.int32, device=device) for each in lengths)
        offsets = one, other
    return Run(made, q, k, offsets, first)


def _index(ranges: Sequence[Sequence[int]]) -> np.ndarray:
    return np.concatenate([np.arange(start, stop) for start, stop in ranges])
