"""Runs one part's tiles of a step on torch tensors and merges their results in place.

Used by the JAX callback: a JAX program is identical on every device, so the part is known only when the callback runs.
A ``StepCall`` describes the step for all parts.
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
from attn_core.context_parallel.on_torch.places import Places, PlacesOfParts
from attn_core.context_parallel.places import among_all, of_tile
from attn_core.context_parallel.plan import Step
from attn_core.context_parallel.tiles import Tile

Tensor = Any


class StepCall(NamedTuple):
    """A step of a plan, and the layout of its operands.

    Attributes:
        at: the index of the step.
        paired: whether k and v are one array: ``[2, batch, places, kv_heads, dim]``, or ``[parts, 2, batch, places,
            ...]`` if they were gathered; else each is ``[batch, places, ...]`` or ``[parts, batch, places, ...]``.
    """

    call: ContextCall
    at: int
    paired: bool

    @property
    def step(self) -> Step:
        """The step."""
        return self.call.plan.steps[self.at]

    @property
    def after(self) -> bool:
        """Whether there are results of earlier steps to add to."""
        return self.at > 0

    @property
    def arrays(self) -> int:
        """The number of arrays that hold the keys and values."""
        return 1 if self.paired else 2

    @property
    def rows(self) -> int:
        """The places of a part's queries."""
        return self.call.plan.inner * self.call.plan.q_layout.shard

    def scratch(self, kind: str) -> int:
        """Elements of the largest temporary result of a kernel, over all parts; at least 1.

        Args:
            kind: of the devices, "cpu" or "cuda".
        """
        sizes = [1]
        for mine in self.step.tiles:
            for at, tile in enumerate(mine):
                spec, name = self.call.backend_of(tile)
                module = backends.load(name, kind)
                if backends.writes_into(module) and not (at == 0 and self.writes_all(tile)):
                    sizes.append(prod(spec.out_shape))
        return max(sizes)

    def writes_all(self, tile: Tile) -> bool:
        """Whether a part's first tile writes its whole result: every row, in the accumulators' dtype."""
        call = self.call
        wide = call.spec.lse_dtype != call.spec.dtype and any(map(call.sums_rows_wide, range(call.plan.outer)))
        alone = not self.after and not wide and len(tile.segments) == 1
        return alone and tile.segments[0][:2] == (0, self.rows)


class TileRun(NamedTuple):
    """A tile as a call of a backend.

    Attributes:
        forward: the backend's forward.
        writes: whether ``forward`` takes buffers for its results.
        rows, keys: places of its queries and keys in the step's; for gathered keys, in the keys that the part takes.
        first: whether no earlier tile or step has touched its queries.
        direct: whether it writes the step's whole result.
    """

    spec: AttentionSpec
    forward: Callable[..., Any]
    writes: bool
    rows: Places
    keys: Places
    cu_seqlens: tuple[Tensor, Tensor] | None
    first: bool
    direct: bool


class Runs(NamedTuple):
    """A part's tiles in a step.

    Attributes:
        taken: places of the gathered keys that the tiles need, in order; None if keys are not gathered.
        fresh: whether to initialise rows to 0 and -inf, the results of rows without keys.
    """

    call: StepCall
    tiles: tuple[TileRun, ...]
    taken: PlacesOfParts | None
    fresh: bool


class RowCoverage:
    """Tracks which rows have a result while tiles run in order; all rows have one ``before`` the step if it is True."""

    def __init__(self, rows: int, *, before: bool = False) -> None:
        self._touched, self._begun = np.full(rows, before), np.full(rows, before)

    def by(self, rows: np.ndarray) -> bool:
        """Marks a tile's rows; returns whether no earlier tile touched any of them."""
        first = not self._touched[rows].any()
        self._touched[rows] = True
        self._begun[rows] |= first
        return first

    @property
    def covered(self) -> bool:
        """Whether tiles that were the first on all of their rows cover every row."""
        return bool(self._begun.all())


def offsets_of(spec: AttentionSpec, tile: Tile, device: Any) -> tuple[Tensor, Tensor] | None:
    """The offsets of a tile's segments, int32 on a torch.device; None if the tile is not packed."""
    if not spec.packed:
        return None
    import torch

    q, k = (torch.tensor(side, dtype=torch.int32, device=device) for side in tile.offsets)
    return q, k


def inputs_of(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: tuple[Tensor, Tensor] | None) -> Inputs:
    """A tile's operands; packed operands have no batch axis."""
    if cu_seqlens is None:
        return Inputs(q, k, v)
    return Inputs(q[0], k[0], v[0], cu_seqlens_q=cu_seqlens[0], cu_seqlens_k=cu_seqlens[1])


def runs_of(call: StepCall, part: int, device: Any) -> Runs:
    """Prepares a part's tiles on a torch.device."""
    coverage, runs, tiles = RowCoverage(call.rows, before=call.after), [], call.step.tiles[part]
    placed, taken = [of_tile(tile) for tile in tiles], None
    if call.step.gathered:
        plan, needed = call.call.plan, np.unique(np.concatenate([np.zeros(0, np.int64), *(keys for _, keys in placed)]))
        taken = PlacesOfParts(among_all(plan, part)[needed], plan.inner * plan.k_layout.shard, device)
        placed = [(rows, np.searchsorted(needed, keys)) for rows, keys in placed]
    for tile, (rows, keys) in zip(tiles, placed, strict=True):
        spec, name = call.call.backend_of(tile)
        module = backends.load(name, device.type)
        first = coverage.by(rows)
        runs.append(
            TileRun(
                spec=spec,
                forward=module.forward,
                writes=backends.writes_into(module),
                rows=Places(rows, device),
                keys=Places(keys, device),
                cu_seqlens=offsets_of(spec, tile, device),
                first=first,
                direct=first and call.writes_all(tile),
            )
        )
    return Runs(call, tuple(runs), taken, not coverage.covered)


def attend(
    runs: Runs, q: Tensor, keys: Sequence[Tensor], results: tuple[Tensor, ...], scratch: Sequence[Tensor]
) -> None:
    """Merges a step into ``results`` in place; rows without keys have 0 and -inf.

    Args:
        q: ``[batch, rows, heads, head_dim]``; keys: as ``StepCall`` says.
        results: out ``[batch, rows, heads, value_dim]`` and lse ``[batch, heads, rows]`` of the earlier steps, if any.
        scratch: buffers for a tile's out and lse, of one axis: ``StepCall.scratch`` elements, and the size of lse.
    """
    out, lse = results
    if runs.fresh:
        out.zero_()
        lse.fill_(-float("inf"))
    if not runs.tiles:
        return
    if runs.taken is not None:
        keys = tuple(map(runs.taken.of, keys))
    k, v = keys if len(keys) == 2 else keys[0].unbind(0)
    for run in runs.tiles:
        inputs = inputs_of(run.rows.of(q), run.keys.of(k), run.keys.of(v), run.cu_seqlens)
        if run.writes:
            shapes = run.spec.out_shape, run.spec.lse_shape
            room = results if run.direct else tuple(map(_room, scratch, shapes))
            part_out, part_lse = run.forward(run.spec, inputs, room)
        else:
            part_out, part_lse = run.forward(run.spec, inputs)
        if run.spec.packed:
            part_out, part_lse = part_out[None], part_lse[None]
        if run.direct:
            for place, part in ((out, part_out), (lse, part_lse)):
                if part is not place:
                    place.copy_(part)
        else:
            put_together(run.rows, out, lse, part_out, part_lse, first=run.first)


def _room(scratch: Tensor, shape: tuple[int, ...]) -> Tensor:
    return scratch[: prod(shape)].view(shape)


def put_together(rows: Places, out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor, *, first: bool) -> None:
    """Merges a tile's results into its rows, in place; ``first`` if no row holds a result yet."""
    if first:
        rows.put(out, part_out)
        rows.put(lse, part_lse, 2)
        return
    before, before_lse = rows.of(out), rows.of(lse, 2)
    merge(before, before_lse, part_out, part_lse)
    if not rows.are_neighbours:
        rows.put(out, before)
        rows.put(lse, before_lse, 2)
