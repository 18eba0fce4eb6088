"""One part's tiles of a step on torch tensors, put together in place.

For a host that learns only then which part it is. That of JAX is one, whose programs are the same on every device: a
``StepCall`` is what is the same for every part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

import numpy as np

from attn_core import backends
from attn_core.backends import Inputs
from attn_core.context_parallel.call import ContextCall
from attn_core.context_parallel.merge_torch import merge
from attn_core.context_parallel.places import among_all, spans
from attn_core.context_parallel.places_torch import Places
from attn_core.context_parallel.plan import Step
from attn_core.context_parallel.tiles import Tile
from attn_core.spec import AttentionSpec

Tensor = Any


class StepCall(NamedTuple):
    """A step of a plan, and the form of its operands.

    Attributes:
        at: which of the plan's steps it is.
        paired: whether k and v are one array: ``[2, batch, places, kv_heads, dim]``, or ``[parts, 2, batch, places,
            ...]`` where they were gathered; else each is ``[batch, places, ...]`` or ``[parts, batch, places, ...]``.
        after: whether results of steps before it are there to be added to.
        wide: whether results are put together in the dtype of the log-sum-exp.
    """

    call: ContextCall
    at: int
    paired: bool
    after: bool
    wide: bool

    @property
    def step(self) -> Step:
        """The step."""
        return self.call.plan.steps[self.at]

    @property
    def arrays(self) -> int:
        """How many arrays the keys and values are."""
        return 1 if self.paired else 2

    @property
    def rows(self) -> int:
        """The places of a part's queries."""
        return self.call.plan.inner * self.call.plan.q_layout.shard

    @property
    def scratch(self) -> int:
        """Elements of the largest result that is not written where it stays, over all parts; at least 1."""
        tiles = (self._in_order(part) for part in range(self.call.plan.outer))
        return max((prod(spec.out_shape) for mine in tiles for spec, direct in mine if not direct), default=1)

    def _in_order(self, part: int) -> list[tuple[AttentionSpec, bool]]:
        """(spec, whether a kernel writes all rows of the step's result at once) of each tile of a part."""
        return [
            (self.call.backend_of(tile)[0], at == 0 and self.writes_all(tile))
            for at, tile in enumerate(self.step.tiles[part])
        ]

    def writes_all(self, tile: Tile) -> bool:
        """Whether a part's first tile is its whole result: every row, in the dtype that results are put together in."""
        alone = not self.after and not self.wide and len(tile.segments) == 1
        return alone and tile.segments[0][:2] == (0, self.rows)


class TileRun(NamedTuple):
    """A tile as a call of a backend.

    Attributes:
        forward: the backend's; writes: whether it takes buffers for its results.
        rows, k, v: where its queries, keys and values lie in the step's.
        first: whether no tile, and no step, before has touched its queries.
        direct: whether it writes the step's whole result.
    """

    spec: AttentionSpec
    forward: Callable[..., Any]
    writes: bool
    rows: Places
    k: Places
    v: Places
    cu_seqlens: tuple[Tensor, Tensor] | None
    first: bool
    direct: bool


class Runs(NamedTuple):
    """What a part does in a step.

    Attributes:
        fresh: whether rows are to be set to what those without keys have: 0 and -inf.
    """

    call: StepCall
    tiles: tuple[TileRun, ...]
    fresh: bool


def runs_of(call: StepCall, part: int, device: Any) -> Runs:
    """Prepares a part's tiles on a torch.device."""
    touched = np.full(call.rows, call.after)
    begun = touched.copy()
    found = []
    for tile in call.step.tiles[part]:
        rows = spans([segment[:2] for segment in tile.segments])
        keys = spans([segment[2:] for segment in tile.segments])
        first = not touched[rows].any()
        found.append(_run(call, tile, rows, _places(call, part, keys), device, first=first))
        touched[rows] = True
        begun[rows] |= first
    return Runs(call, tuple(found), not begun.all())


def _run(
    call: StepCall, tile: Tile, rows: np.ndarray, keys: tuple[np.ndarray, ...], device: Any, *, first: bool
) -> TileRun:
    spec, name = call.call.backend_of(tile)
    module: Any = backends.load(name, device.type)
    offsets = None
    if spec.packed:
        import torch

        lengths = ([segment.q_len for segment in tile.segments], [segment.k_len for segment in tile.segments])
        sides = ([*accumulate(each, initial=0)] for each in lengths)
        one, other = (torch.tensor(side, dtype=torch.int32, device=device) for side in sides)
        offsets = one, other
    k, v = (Places(index, device) for index in keys)
    writes = backends.writes_into(module)
    direct = first and call.writes_all(tile)
    return TileRun(spec, module.forward, writes, Places(rows, device), k, v, offsets, first, direct)


def _places(call: StepCall, part: int, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where a tile's keys and values lie along the axis that ``_of_keys`` gives them."""
    plan = call.call.plan
    if not call.step.gathered:
        return keys, keys
    keys = among_all(plan, part)[keys]
    if not _in_turn(call):
        return keys, keys
    size = plan.inner * plan.k_layout.shard
    k = keys // size * (2 * size) + keys % size
    return k, k + size


def _in_turn(call: StepCall) -> bool:
    """Whether gathered keys are read as they came, a part's k and v in turn; of one row, which has one such axis."""
    return call.step.gathered and call.paired and call.call.spec.batch == 1


def _of_keys(call: StepCall, keys: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """k and v as ``[batch, places, heads, dim]``; one tensor for both where their places lie in turn."""
    if not call.step.gathered:
        k, v = keys[0] if call.paired else keys
        return k, v
    if _in_turn(call):
        every = keys[0].flatten(0, 3)[None]
        return every, every
    k, v = (keys[0][:, 0], keys[0][:, 1]) if call.paired else keys
    return k.transpose(0, 1).flatten(1, 2), v.transpose(0, 1).flatten(1, 2)


def attend(
    runs: Runs, q: Tensor, keys: Sequence[Tensor], results: tuple[Tensor, ...], scratch: Sequence[Tensor]
) -> None:
    """Adds a step to ``results``, which are changed; rows that have seen no key have 0 and -inf.

    Args:
        q: ``[batch, rows, heads, head_dim]``; keys: as ``StepCall`` says.
        results: out ``[batch, rows, heads, value_dim]``, lse ``[batch, heads, rows]``: of the steps before, if any.
        scratch: room for a tile's out and lse, of one axis each: ``StepCall.scratch`` elements, and as many as lse has.
    """
    out, lse = results
    k, v = _of_keys(runs.call, keys)
    if runs.fresh:
        out.zero_()
        lse.fill_(-float("inf"))
    for run in runs.tiles:
        shapes = run.spec.out_shape, run.spec.lse_shape
        room = results if run.direct else tuple(map(_room, scratch, shapes))
        part_out, part_lse = _computed(run, q, k, v, room)
        if run.direct:
            for place, found in ((out, part_out), (lse, part_lse)):
                if found is not place:
                    place.copy_(found)
        else:
            put_together(run.rows, out, lse, part_out, part_lse, first=run.first)


def _room(scratch: Tensor, shape: tuple[int, ...]) -> Tensor:
    return scratch[: prod(shape)].view(shape)


def _computed(run: TileRun, q: Tensor, k: Tensor, v: Tensor, room: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """(out, lse) of a tile, with the axis of rows."""
    inputs = Inputs(run.rows.of(q), run.k.of(k), run.v.of(v))
    if run.cu_seqlens is not None:
        cu_q, cu_k = run.cu_seqlens
        inputs = Inputs(inputs.q[0], inputs.k[0], inputs.v[0], cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    out, lse = run.forward(run.spec, inputs, room) if run.writes else run.forward(run.spec, inputs)
    return (out, lse) if run.cu_seqlens is None else (out[None], lse[None])


def put_together(rows: Places, out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor, *, first: bool) -> None:
    """Adds a tile's results at its rows, in place; ``first`` where none of them holds a result yet."""
    if first:
        rows.put(out, part_out)
        rows.put(lse, part_lse, 2)
        return
    before, before_lse = rows.of(out), rows.of(lse, 2)
    merge(before, before_lse, part_out, part_lse)
    if not rows.are_neighbours:
        rows.put(out, before)
        rows.put(lse, before_lse, 2)
