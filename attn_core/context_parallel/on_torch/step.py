"""Runs one part's tiles of a step on torch tensors and merges their results in place.

Used by the JAX callback: a JAX program is identical on every device, so the part is known only when the callback runs.
A ``StepCall`` describes the step for all parts; ``prepare_part`` and ``attend`` run it for one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np

from attn_core import backends
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Inputs
from attn_core.context_parallel.call import ContextCall
from attn_core.context_parallel.on_torch.merge import merge
from attn_core.context_parallel.on_torch.places import GatheredPlaces, Places
from attn_core.context_parallel.places import places_in_gathered, places_of_tile
from attn_core.context_parallel.plan import Step
from attn_core.context_parallel.tiles import Tile

Tensor = Any


class StepCall(NamedTuple):
    """A step of a plan, and the form of its operands.

    Attributes:
        step_index: the step's place in the plan.
        stacked: whether k and v are one array: ``[2, batch, places, kv_heads, dim]``, or ``[parts, 2, batch, places,
            ...]`` if they were gathered; else each is ``[batch, places, ...]`` or ``[parts, batch, places, ...]``.
    """

    call: ContextCall
    step_index: int
    stacked: bool

    @property
    def step(self) -> Step:
        """The step."""
        return self.call.plan.steps[self.step_index]

    @property
    def has_earlier_results(self) -> bool:
        """Whether earlier steps have results, which this step merges its own into."""
        return self.step_index > 0

    @property
    def key_arrays(self) -> int:
        """The number of arrays that hold the keys and values."""
        return 1 if self.stacked else 2

    @property
    def rows(self) -> int:
        """The number of places of a part's queries."""
        return self.call.plan.inner * self.call.plan.q_layout.shard

    def scratch(self, kind: str) -> int:
        """Returns the number of elements of the largest temporary result of a kernel, over all parts; at least 1.

        Args:
            kind: of the devices, "cpu" or "cuda".
        """
        sizes = [1]
        for tiles in self.step.tiles:
            for at, tile in enumerate(tiles):
                spec, name = self.call.backend_of(tile)
                module = backends.load(name, kind)
                if backends.writes_into(module) and not (at == 0 and self.writes_all(tile)):
                    sizes.append(prod(spec.out_shape))
        return max(sizes)

    def writes_all(self, tile: Tile) -> bool:
        """Returns whether a tile that runs first is the part's whole result: every row, in the accumulator's dtype."""
        same_dtype = self.call.accumulator("q") == self.call.spec.dtype
        alone = not self.has_earlier_results and same_dtype and len(tile.segments) == 1
        return alone and tile.segments[0][:2] == (0, self.rows)


class TileRun(NamedTuple):
    """A tile as a call of a backend.

    Attributes:
        forward: the backend's forward.
        writes: whether ``forward`` takes buffers for its results.
        rows, keys: the places of its queries and keys in the step's operands; for gathered keys, in ``PartStep.keys``.
        first: whether no earlier tile or step has a result for its queries.
        direct: whether its result is the step's whole result, so that no merge is needed.
    """

    spec: AttentionSpec
    forward: Callable[..., Any]
    writes: bool
    rows: Places
    keys: Places
    cu_seqlens: tuple[Tensor, Tensor] | None
    first: bool
    direct: bool


class PartStep(NamedTuple):
    """A part's tiles in a step.

    Attributes:
        keys: the places of the gathered keys that the tiles need, in order; None if keys are not gathered.
        initialise: whether to set all rows to 0 and -inf first, the results of rows without keys.
    """

    tiles: tuple[TileRun, ...]
    keys: GatheredPlaces | None
    initialise: bool


class RowCoverage:
    """Tracks which rows have a result while tiles run in order.

    Args:
        rows: the number of rows.
        before: whether every row has a result already, from an earlier step.
    """

    def __init__(self, rows: int, *, before: bool = False) -> None:
        self._touched, self._initialised = np.full(rows, before), np.full(rows, before)

    def add(self, rows: np.ndarray) -> bool:
        """Records a tile's rows; returns whether no earlier tile had any of them, so that the tile may overwrite."""
        first = not self._touched[rows].any()
        self._touched[rows] = True
        self._initialised[rows] |= first
        return first

    @property
    def complete(self) -> bool:
        """Whether tiles that overwrite their rows cover every row."""
        return bool(self._initialised.all())


def tile_offsets(spec: AttentionSpec, tile: Tile, device: Any) -> tuple[Tensor, Tensor] | None:
    """Returns the offsets of a tile's segments, int32 on a torch.device; None if the tile is not packed."""
    if not spec.packed:
        return None
    import torch

    q, k = (torch.tensor(side, dtype=torch.int32, device=device) for side in tile.offsets)
    return q, k


def tile_inputs(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: tuple[Tensor, Tensor] | None) -> Inputs:
    """Returns a tile's operands for a backend; packed operands have no batch axis."""
    if cu_seqlens is None:
        return Inputs(q, k, v)
    return Inputs(q[0], k[0], v[0], cu_seqlens_q=cu_seqlens[0], cu_seqlens_k=cu_seqlens[1])


def prepare_part(step_call: StepCall, part: int, device: Any) -> PartStep:
    """Prepares a part's tiles on a torch.device."""
    call, step = step_call.call, step_call.step
    coverage, runs = RowCoverage(step_call.rows, before=step_call.has_earlier_results), []
    indices, gathered = [places_of_tile(tile) for tile in step.tiles[part]], None
    if step.gathered:
        needed = np.unique(np.concatenate([np.zeros(0, np.int64), *(keys for _, keys in indices)]))
        size = call.plan.inner * call.plan.k_layout.shard
        gathered = GatheredPlaces(places_in_gathered(call.plan, part)[needed], size, device)
        indices = [(rows, np.searchsorted(needed, keys)) for rows, keys in indices]
    for tile, (rows, keys) in zip(step.tiles[part], indices, strict=True):
        spec, name = call.backend_of(tile)
        module = backends.load(name, device.type)
        first = coverage.add(rows)
        runs.append(
            TileRun(
                spec=spec,
                forward=module.forward,
                writes=backends.writes_into(module),
                rows=Places(rows, device),
                keys=Places(keys, device),
                cu_seqlens=tile_offsets(spec, tile, device),
                first=first,
                direct=first and step_call.writes_all(tile),
            )
        )
    return PartStep(tuple(runs), gathered, not coverage.complete)


def attend(
    part_step: PartStep, q: Tensor, keys: Sequence[Tensor], results: tuple[Tensor, ...], scratch: Sequence[Tensor]
) -> None:
    """Merges a step into ``results`` in place; rows without keys get 0 and -inf.

    Args:
        q: ``[batch, rows, heads, head_dim]``.
        keys: in the form that ``StepCall`` describes.
        results: out ``[batch, rows, heads, value_dim]`` and lse ``[batch, heads, rows]`` of the earlier steps, if any.
        scratch: flat buffers for a tile's out and lse: ``StepCall.scratch`` elements, and as many as lse has.
    """
    out, lse = results
    if part_step.initialise:
        out.zero_()
        lse.fill_(-float("inf"))
    if not part_step.tiles:
        return
    if part_step.keys is not None:
        keys = tuple(map(part_step.keys.take, keys))
    k, v = keys if len(keys) == 2 else keys[0].unbind(0)
    for run in part_step.tiles:
        inputs = tile_inputs(run.rows.take(q), run.keys.take(k), run.keys.take(v), run.cu_seqlens)
        if run.writes:
            shapes = run.spec.out_shape, run.spec.lse_shape
            buffers = results if run.direct else tuple(map(_view, scratch, shapes))
            part_out, part_lse = run.forward(run.spec, inputs, buffers)
        else:
            part_out, part_lse = run.forward(run.spec, inputs)
        if run.spec.packed:
            part_out, part_lse = part_out[None], part_lse[None]
        if run.direct:
            for target, part in ((out, part_out), (lse, part_lse)):
                if part is not target:
                    target.copy_(part)
        else:
            merge_tile(run.rows, out, lse, part_out, part_lse, first=run.first)


def _view(scratch: Tensor, shape: tuple[int, ...]) -> Tensor:
    return scratch[: prod(shape)].view(shape)


def merge_tile(rows: Places, out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor, *, first: bool) -> None:
    """Merges a tile's results into its rows of out and lse, in place; overwrites the rows if ``first``."""
    if first:
        rows.put(out, part_out)
        rows.put(lse, part_lse, 2)
        return
    before, before_lse = rows.take(out), rows.take(lse, 2)
    merge(before, before_lse, part_out, part_lse)
    if not rows.is_one_range:  # of one range, ``before`` is a view
        rows.put(out, before)
        rows.put(lse, before_lse, 2)
