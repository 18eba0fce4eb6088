"""Runs one part's tiles of a step on torch tensors and merges their results in place.

Used by the JAX callback: a JAX program is identical on every device, so the part is known only when the callback runs.
A ``StepCall`` describes the step for all parts; ``prepare_part`` and ``attend`` run it for one.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from attn_core import backends
from attn_core.context_parallel.call import ContextCall
from attn_core.context_parallel.index_arrays import places_in_gathered, places_of_tile
from attn_core.context_parallel.on_torch.positions import GatheredPlaces
from attn_core.context_parallel.on_torch.tiles import RowCoverage, TileRun, build_tile_run
from attn_core.context_parallel.plan import Step
from attn_core.context_parallel.tiles import Tile

if TYPE_CHECKING:
    import torch
    from torch import Tensor


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
                backend = backends.load(name, kind)
                # A kernel that writes everything writes into the result itself, and others allocate their own results.
                if backend.writes_into and not (at == 0 and self.writes_all(tile)):
                    sizes.append(prod(spec.out_shape))
        return max(sizes)

    def writes_all(self, tile: Tile) -> bool:
        """Returns whether a tile that runs first is the part's whole result: every row, in the accumulator's dtype."""
        same_dtype = self.call.accumulator("q") == self.call.spec.dtype
        # A packed result has no batch axis, so a tile of several segments is not written into the result directly.
        alone = not self.has_earlier_results and same_dtype and not tile.packed
        return alone and tile.segments[0][:2] == (0, self.rows)


class PartStep(NamedTuple):
    """A part's tiles in a step.

    Attributes:
        keys: the places of the gathered keys that the tiles need, in order; None if keys are not gathered.
        direct: whether the first tile's result is the step's whole result, so that no merge is needed.
        initialise: whether to set all rows to 0 and -inf first, the results of rows without keys.
    """

    tiles: tuple[TileRun, ...]
    keys: GatheredPlaces | None
    direct: bool
    initialise: bool


def prepare_part(step_call: StepCall, part: int, device: torch.device) -> PartStep:
    """Prepares a part's tiles on a torch.device."""
    call, step = step_call.call, step_call.step
    coverage, tiles = RowCoverage(step_call.rows, before=step_call.has_earlier_results), step.tiles[part]
    places, gathered = [places_of_tile(tile) for tile in tiles], None
    if step.gathered:
        # Several tiles may see one key, and each key is gathered once. The empty array is for parts without tiles.
        needed = np.unique(np.concatenate([np.zeros(0, np.int64), *(keys for _, keys in places)]))
        size = call.plan.inner * call.plan.k_layout.shard
        gathered = GatheredPlaces(places_in_gathered(call.plan, part)[needed], size, device)
        # ``needed`` is sorted, so this finds each key's place among the gathered ones.
        places = [(rows, np.searchsorted(needed, keys)) for rows, keys in places]
    runs = [
        build_tile_run(call, tile, (rows, keys, keys), device, coverage)
        for tile, (rows, keys) in zip(tiles, places, strict=True)
    ]
    return PartStep(tuple(runs), gathered, bool(runs) and step_call.writes_all(tiles[0]), not coverage.complete)


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
    # XLA does not clear the buffers of results.
    if part_step.initialise:
        out.zero_()
        lse.fill_(-float("inf"))
    if not part_step.tiles:
        return
    if part_step.keys is not None:
        keys = tuple(map(part_step.keys.take, keys))
    k, v = keys if len(keys) == 2 else keys[0].unbind(0)
    for at, run in enumerate(part_step.tiles):
        if at or not part_step.direct:
            run.merge_into(q, k, v, out, lse, _views(scratch, run) if run.writes else ())
            continue
        buffers = [results] if run.writes else []
        # A kernel may return other tensors than the buffers, for example if a buffer is not aligned for it.
        for target, part in zip(results, run.attend(q, k, v, *buffers), strict=True):
            if part is not target:
                target.copy_(part)


def _views(scratch: Sequence[Tensor], run: TileRun) -> tuple[Tensor, ...]:
    shapes = run.spec.out_shape, run.spec.lse_shape
    return tuple(buffer[: prod(shape)].view(shape) for buffer, shape in zip(scratch, shapes, strict=True))
